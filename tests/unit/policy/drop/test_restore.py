from dataclasses import replace

from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport
from kunserve.core.messages import LayerSource, MemberSources
from kunserve.policy.drop.assignment import SequenceToPlace, assign_sequences
from kunserve.policy.drop.restore import (
    Postponed,
    RestorePlan,
    choose_sources,
    parting_capacity_blocks,
    parts_of,
    plan_restore,
)
from tests.specs import instance_spec

IDLE = LoadReport(GroupId(7), sequence_number=1, capacity_blocks=500)


def layout(*stages: tuple[int, int, int]) -> GroupLayout:
    return GroupLayout(
        GroupId(7), tuple(Stage(InstanceId(i), LayerRange(a, b)) for i, a, b in stages)
    )


PAIR = layout((1, 0, 5), (2, 5, 10))
SPECS = {InstanceId(i): instance_spec(i, 10, 1000) for i in range(1, 5)}


def source(first: int, end: int, instance: int | None) -> LayerSource:
    return LayerSource(LayerRange(first, end), None if instance is None else InstanceId(instance))


def sources(layout: GroupLayout, holders: dict[int, tuple[int, int]]) -> list[tuple[int, object]]:
    known = {InstanceId(i): LayerRange(*layers) for i, layers in holders.items()}
    return [(m.instance_id, m.sources) for m in choose_sources(layout, known, SPECS)]


def parted(load: LoadReport) -> RestorePlan | Postponed:
    return plan_restore(PAIR, SPECS, load, first_id=GroupId(20))


def test_each_member_becomes_whole_from_the_other():
    plan = parted(replace(IDLE, used_blocks=30, largest_expected_blocks=20))
    whole = LayerRange(0, 10)
    assert isinstance(plan, RestorePlan)
    assert plan.new == (
        GroupLayout(GroupId(20), (Stage(InstanceId(1), whole),)),
        GroupLayout(GroupId(21), (Stage(InstanceId(2), whole),)),
    )
    assert plan.members == (
        MemberSources(InstanceId(1), (source(5, 10, 2),)),
        MemberSources(InstanceId(2), (source(0, 5, 1),)),
    )
    # 55 units are the exchange's float: beside it 94 blocks of 10 layers have room in each of both.
    assert plan.capacity_blocks == 2 * 94 - 20


def test_a_request_larger_than_an_undropped_pool_postpones():
    """It goes on in the pipeline; nothing dies (the deadlock that others have)."""
    assert parted(replace(IDLE, largest_request_blocks=101)) == Postponed(
        "large request", "a request of 101 blocks is larger than a pool of 100"
    )


def test_what_runs_and_grows_must_fit_while_parting():
    fits = replace(IDLE, used_blocks=138, growth_blocks=30, largest_expected_blocks=20)
    assert isinstance(parted(fits), RestorePlan)
    assert parted(replace(fits, growth_blocks=31)) == Postponed(
        "too much in use", "169 blocks are in use or growing, 168 fit while parting"
    )


def test_a_limit_that_is_not_expected_to_be_reached_does_not_delay():
    """Clients ask for thousands of tokens and take hundreds."""
    asked = replace(IDLE, used_blocks=89, largest_expected_blocks=20, largest_request_blocks=100)
    assert isinstance(parted(asked), RestorePlan)
    assert isinstance(parted(replace(asked, largest_expected_blocks=100)), Postponed)


def test_the_scarcest_member_sets_the_bound():
    specs = SPECS | {InstanceId(2): replace(SPECS[InstanceId(2)], kv_units=500)}
    new = parts_of(PAIR, GroupId(20))
    assert parting_capacity_blocks(PAIR, new, SPECS, 0) == 2 * 94
    # Pieces are smaller where a pool is, and the float with them: 500 - 25 units for 5 layers each.
    assert parting_capacity_blocks(PAIR, new, specs, 0) == 95
    assert parting_capacity_blocks(PAIR, new, specs, 90) == 97 + 47 - 90
    assert parting_capacity_blocks(PAIR, new, specs, 1000) == 0


class TestSources:
    def test_an_inner_stage_pulls_both_sides(self):
        trio = layout((1, 0, 3), (2, 3, 7), (3, 7, 10))
        held = {1: (0, 3), 2: (3, 7), 3: (7, 10)}
        assert dict(sources(trio, held))[2] == (source(0, 3, 1), source(7, 10, 3))

    def test_a_layer_whose_only_holder_died_comes_from_disk(self):
        trio = layout((1, 0, 3), (2, 3, 7), (3, 7, 10))
        held = {1: (0, 3), 3: (7, 10)}
        assert dict(sources(trio, held))[1] == (source(3, 7, None), source(7, 10, 3))

    def test_whole_instances_elsewhere_share_the_work(self):
        held = {1: (0, 5), 2: (5, 10), 3: (0, 10), 4: (0, 10)}
        found = dict(sources(PAIR, held))
        assert found[1] == (source(5, 7, 2), source(7, 9, 3), source(9, 10, 4))
        assert found[2] == (source(0, 3, 1), source(3, 4, 3), source(4, 5, 4))


def sequence(name: str, blocks: int, need: int = 0, arrival_s: float = 0.0) -> SequenceToPlace:
    return SequenceToPlace(RequestId(name), blocks, need or blocks, arrival_s)


class TestAssignment:
    def assign(self, sequences: list[SequenceToPlace], *capacities: int) -> dict[str, int] | None:
        placed = assign_sequences(sequences, {GroupId(g): c for g, c in enumerate(capacities)})
        return None if placed is None else {str(r): int(g) for r, g in placed.items()}

    def test_balanced_by_blocks(self):
        found = self.assign(
            [sequence(n, b) for n, b in zip("abcd", (5, 4, 3, 2), strict=True)], 9, 9
        )
        assert found == {"a": 0, "b": 1, "c": 1, "d": 0}

    def test_relative_to_capacity(self):
        found = self.assign([sequence(n, 3) for n in "abcd"], 10, 30)
        assert found is not None
        assert list(found.values()).count(1) == 3

    def test_waiting_requests_are_balanced_in_order_of_arrival(self):
        waiting = [sequence(n, 0, 4, arrival_s=9.0 - k) for k, n in enumerate("wxyz")]
        assert self.assign([sequence("a", 5), *waiting], 9, 9) == {
            "a": 0, "z": 1, "y": 1, "x": 0, "w": 1,
        }  # fmt: skip

    def test_waiting_requests_queue_beyond_the_capacity_but_never_where_they_cannot_run(self):
        waiting = [sequence(n, 0, 8) for n in "wxyz"]
        assert self.assign(waiting, 5, 9) == dict.fromkeys("wxyz", 1)
        assert self.assign(waiting, 5, 7) is None

    def test_none_when_kv_does_not_fit(self):
        assert self.assign([sequence("a", 6), sequence("b", 6), sequence("c", 6)], 9, 9) is None

    def test_a_tight_fit_is_found_by_the_second_try(self):
        sizes = zip("abc", (6, 4, 3), strict=True)
        assert self.assign([sequence(n, b) for n, b in sizes], 10, 3) == {"a": 0, "b": 0, "c": 1}
