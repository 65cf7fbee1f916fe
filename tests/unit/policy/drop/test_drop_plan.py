from dataclasses import replace

import pytest

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.capacity import (
    group_capacity_blocks,
    undropped_capacity_blocks,
)
from kunserve.policy.drop.plan import DropPlan, blocks_for_bytes
from kunserve.policy.exchange.moves import find_obstacle
from tests.specs import instance_spec
from tests.unit.policy.drop.plans import FIRST_ID, planned

NUM_LAYERS = 12


def spec(instance: int, kv_units: int = 1200) -> InstanceSpec:
    """A copy of the weights is worth 1,200 units: 100 whole blocks, as its KV is."""
    return instance_spec(instance, NUM_LAYERS, kv_units)


def whole(instance: int) -> GroupLayout:
    return GroupLayout(GroupId(instance), (Stage(InstanceId(instance), LayerRange(0, NUM_LAYERS)),))


def pipeline(group: int, *instances: int) -> GroupLayout:
    cuts = [NUM_LAYERS * k // len(instances) for k in range(len(instances) + 1)]
    return GroupLayout(
        GroupId(group),
        tuple(
            Stage(InstanceId(i), LayerRange(cuts[k], cuts[k + 1])) for k, i in enumerate(instances)
        ),
    )


def plan(layouts: list[GroupLayout], required: int, **options: object) -> DropPlan:
    specs = {m: spec(m) for layout in layouts for m in layout.members}
    return planned(layouts, specs, required, **options)


def shape(plan: DropPlan) -> list[list[int]]:
    return [list(merge.new.members) for merge in plan.merges]


def test_nothing_is_merged_for_nothing():
    assert plan([whole(1), whole(2)], 0) == DropPlan((), 0, True)


def of_ranks(**sizes: int) -> dict[InstanceId, InstanceSpec]:
    """Instances by number (``i1=2``), with so many ranks."""
    specs = [
        replace(spec(int(name[1:])), tensor_parallel_size=size) for name, size in sizes.items()
    ]
    return {one.instance_id: one for one in specs}


def test_instances_of_other_numbers_of_ranks_share_nothing():
    specs = of_ranks(i1=1, i2=2, i3=1, i4=2)
    layouts = [whole(instance) for instance in specs]
    found = planned(layouts, specs, 10_000)
    assert shape(found) == [[1, 3], [2, 4]]
    assert not found.enough
    assert (
        found.obstacle is not None and "instances of 1 and 2 ranks do not merge" in found.obstacle
    )
    lone = planned(layouts[:2], specs, 1)
    assert lone.merges == () and lone.obstacle == found.obstacle
    alike = planned([layouts[0], layouts[2]], specs, 10_000)
    assert alike.obstacle is None, "they did all they could"


def test_many_instances_of_other_ranks_hide_no_partner():
    """Partners are looked for among few groups: none of these may be of the other kind."""
    specs = of_ranks(**{f"i{n}": 1 + (n in (0, 30)) for n in range(31)})
    layouts = [whole(instance) for instance in specs]
    found = planned(layouts, specs, 1, pressed=[GroupId(0)], waiting_blocks=0)
    assert shape(found) == [[0, 30]]


def test_members_would_refuse_to_merge_over_different_ranks():
    specs = of_ranks(i1=1, i2=4)
    why = find_obstacle(tuple(specs), [whole(1), whole(2)], [pipeline(3, 1, 2)], specs)
    assert why is not None and "1 and 4 ranks" in why


def test_two_instances_share_one_copy():
    found = plan([whole(1), whole(2)], 50)
    assert shape(found) == [[1, 2]]
    merge = found.merges[0]
    assert merge.new.stages == (
        Stage(InstanceId(1), LayerRange(0, 6)),
        Stage(InstanceId(2), LayerRange(6, 12)),
    )
    assert merge.new.group_id == FIRST_ID
    # 2 x (1200 + 599) units of six layers each: one granule of the half copy stays.
    assert merge.gain_blocks == 1799 // 6 - 200
    assert merge.freed_bytes == 2 * 5990
    assert found.enough


def test_as_few_instances_as_the_need_asks_for():
    groups = [whole(k) for k in range(6)]
    assert shape(plan(groups, 99)) == [[0, 1]]
    assert shape(plan(groups, 100)) == [[0, 1], [2, 3]]
    assert shape(plan(groups, 250)) == [[0, 1], [2, 3], [4, 5]]


def test_the_two_smallest_merge_first():
    """The paper's example: of groups of 1, 2 and 3, those of 1 and 2 merge."""
    groups = [pipeline(1, 10, 11, 12), pipeline(2, 20, 21), whole(3)]
    found = plan(groups, 1)
    assert [g.group_id for g in found.merges[0].old] == [3, 2]
    assert sorted(found.merges[0].new.members) == [3, 20, 21]


def test_several_levels_in_one_plan():
    found = plan([whole(1), whole(2), whole(3), whole(4)], 250)
    assert shape(found) == [[1, 2, 3, 4]]
    assert len(found.merges[0].old) == 4
    assert [s.layers.num_layers for s in found.merges[0].new.stages] == [3, 3, 3, 3]


def test_not_enough_is_said_and_what_there_is_is_given():
    found = plan([whole(1), whole(2), whole(3)], 1000)
    assert len(found.merges) == 1
    assert not found.enough
    assert plan([whole(1)], 1) == DropPlan((), 1, False)


def test_groups_in_transition_stay_out():
    assert shape(plan([whole(1), whole(2), whole(3)], 1, untouchable={GroupId(2)})) == [[1, 3]]


def test_groups_that_lack_memory_go_first():
    groups = [whole(k) for k in range(4)]
    assert shape(plan(groups, 1, pressed={GroupId(3), GroupId(1)})) == [[1, 3]]
    assert shape(plan(groups, 1, pressed={GroupId(2)})) == [[2, 0]]


def test_a_largest_group_size():
    found = plan([whole(k) for k in range(4)], 1000, max_group_size=2)
    assert sorted(map(sorted, shape(found))) == [[0, 1], [2, 3]]
    assert not found.enough


def test_depth_must_be_worth_it():
    """Pairs add 50 % of memory; fours, of pairs, 17 %."""
    four = [whole(i) for i in range(4)]
    assert shape(plan(four, 250, min_deep_gain=0.15)) == [[0, 1, 2, 3]]
    found = plan(four, 250, min_deep_gain=0.2)
    assert shape(found) == [[0, 1], [2, 3]] and not found.enough
    assert shape(plan(four[:2], 30, min_deep_gain=9.0)) == [[0, 1]], "pairs need no excuse"


def test_like_budgets_merge_since_the_scarcest_stage_bounds_the_group():
    budgets = {1: 600, 2: 2400, 3: 600, 4: 2400}
    specs = {InstanceId(k): spec(k, units) for k, units in budgets.items()}
    found = planned([whole(k) for k in budgets], specs, 150)
    assert sorted(map(sorted, shape(found))) == [[1, 3], [2, 4]]


@pytest.mark.parametrize(("small", "layers"), [(1200, 5), (600, 4), (60, 3)])
def test_very_unequal_budgets_are_split_by_memory_if_an_even_split_gains_nothing(small, layers):
    specs = {InstanceId(1): spec(1, 2400), InstanceId(2): spec(2, small)}
    (merge,) = planned([whole(1), whole(2)], specs, 1).merges
    before = sum(group_capacity_blocks(layout, specs) for layout in merge.old)
    assert merge.gain_blocks == group_capacity_blocks(merge.new, specs) - before > 0
    held = merge.new.layers_of(InstanceId(2))
    assert held is not None
    assert held.num_layers == layers


def test_what_the_members_would_refuse_is_not_planned():
    """An even split would gain, but leave no room to exchange KV in; another one does."""
    specs = {InstanceId(1): spec(1, 1200), InstanceId(2): spec(2, 2340)}
    old = [whole(1), whole(2)]
    even = pipeline(3, 1, 2)
    before = sum(group_capacity_blocks(layout, specs) for layout in old)
    assert group_capacity_blocks(even, specs) > before
    assert "too few" in str(find_obstacle(even.members, old, [even], specs))
    (merge,) = planned(old, specs, 1).merges
    assert merge.new.layers_of(InstanceId(1)) == LayerRange(0, 5)
    assert find_obstacle(merge.new.members, merge.old, [merge.new], specs) is None


def test_a_merge_that_gains_nothing_is_not_made():
    """An instance with ten times the memory would be bound to the scarce one's."""
    specs = {InstanceId(1): spec(1, 60_000), InstanceId(2): spec(2, 0)}
    found = planned([whole(1), whole(2)], specs, 1)
    assert found == DropPlan((), 1, False)


def test_a_group_without_a_gainful_partner_does_not_stop_the_rest():
    specs = {InstanceId(k): spec(k, 60_000) for k in (1, 2)} | {InstanceId(0): spec(0, 0)}
    found = planned([whole(k) for k in range(3)], specs, 1)
    assert shape(found) == [[1, 2]]


def test_capacity_is_the_minimum_over_stages():
    specs = {InstanceId(1): spec(1), InstanceId(2): spec(2, 0)}
    layout = pipeline(1, 1, 2)
    assert group_capacity_blocks(layout, specs) == specs[2].units_when_holding(6) // 6
    assert undropped_capacity_blocks(layout, specs) == 100


def test_a_stage_frees_what_it_does_not_hold_less_a_granule_wherever_it_stands():
    assert spec(1).units_when_holding(6) == 1200 + 599
    assert spec(1).units_when_holding(12) == 1200
    assert spec(1).backed_units(LayerRange(3, 9)) >= 1200 + 599


def test_bytes_asked_for_by_hand():
    specs = {InstanceId(1): spec(1)}
    assert blocks_for_bytes(1, specs) == 1
    assert blocks_for_bytes(240, specs) == 2
    assert blocks_for_bytes(241, specs) == 3


class TestRequestsThatWait:
    """They run in any group: a plan counts on it."""

    def test_one_beside_two_idle_instances_moves_and_nothing_is_merged(self):
        groups = [pipeline(1, 10, 11), whole(2), whole(3)]
        found = plan(groups, 20, pressed={1}, waiting_blocks=20, spare_blocks=180)
        assert found == DropPlan((), 20, True)

    def test_what_has_no_room_elsewhere_is_freed(self):
        groups = [whole(1), whole(2), whole(3)]
        found = plan(groups, 120, pressed={1}, waiting_blocks=120, spare_blocks=50)
        assert shape(found) == [[1, 2]]
        assert found.enough

    def test_only_what_waits_can_use_the_memory_of_others(self):
        groups = [whole(1), whole(2), whole(3)]
        found = plan(groups, 20, pressed={1}, waiting_blocks=5, spare_blocks=180)
        assert shape(found) == [[1, 2]]

    def test_what_runs_gets_memory_where_it_runs_and_idle_ones_stay_single(self):
        groups = [pipeline(1, 10, 11), whole(2), whole(3)]
        assert shape(plan(groups, 20, pressed={1})) == [[10, 2, 11]]
        assert shape(plan(groups, 20, pressed={1}, waiting_blocks=20)) == [[2, 3]]

    def test_where_the_pressed_cannot_merge_others_do(self):
        groups = [pipeline(1, 10, 11), whole(2), whole(3)]
        found = plan(groups, 20, pressed={1}, max_group_size=2)
        assert shape(found) == [[2, 3]]
