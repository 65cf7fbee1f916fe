"""What is known of a group's load: the last report, and what was sent since."""

import pytest

from kunserve.control.cluster.placement import RATE_WEIGHT, Group, Placement
from kunserve.control.cluster.standing import Standing
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LeaderTotals, LoadReport
from kunserve_lab.world.fake_body import fake_spec

NUM_LAYERS = 4


def placed(*groups: tuple[int, ...]) -> Placement:
    """Instances of 100 blocks each, in groups of these members."""
    placement = Placement()
    for members in groups:
        for member in members:
            spec = fake_spec(InstanceId(member), NUM_LAYERS, 400, layer_bytes=3200)
            placement.specs[InstanceId(member)] = spec
        share = NUM_LAYERS // len(members)
        stages = tuple(
            Stage(InstanceId(member), LayerRange(place * share, (place + 1) * share))
            for place, member in enumerate(members)
        )
        placement.add(GroupLayout(placement.new_ids(1), stages))
    return placement


def only(placement: Placement) -> Group:
    (group,) = placement.groups.values()
    return group


def test_a_group_that_has_not_reported_has_room_and_no_load() -> None:
    group = only(placed((0,)))
    assert not group.is_reported and not group.load.is_reported
    assert (group.load.capacity_blocks, group.load.demand_blocks) == (100, 0)


def test_what_was_sent_counts_until_a_report_includes_it() -> None:
    group = only(placed((0,)))
    group.sent(1, 10)
    group.sent(2, 20)
    assert (group.load.num_unreported, group.load.demand_blocks) == (2, 30)
    group.note_report(LoadReport(GroupId(0), 1, num_received=1, used_blocks=10), 1.0)
    assert (group.load.num_unreported, group.load.demand_blocks) == (1, 30)
    group.note_report(LoadReport(GroupId(0), 2, num_received=2, used_blocks=30), 1.1)
    assert (group.load.num_unreported, group.load.demand_blocks) == (0, 30)


def test_the_load_is_the_same_value_until_something_changes() -> None:
    group = only(placed((0,)))
    load = group.load
    assert group.load is load
    group.sent(1, 10)
    assert group.load is not load


def test_a_report_in_a_transition_does_not_change_the_groups_capacity() -> None:
    group = only(placed((0,)))
    group.note_report(LoadReport(GroupId(0), 1, capacity_blocks=7), 1.0)
    assert (group.load.report.capacity_blocks, group.load.capacity_blocks) == (7, 100)


def test_a_pipeline_knows_what_its_members_hold_undropped() -> None:
    group = only(placed((0, 1)))
    assert group.load.num_instances == 2
    assert group.load.undropped_blocks == 200 < group.load.capacity_blocks


def test_the_prompt_rate_is_smoothed() -> None:
    group = only(placed((0,)))
    group.note_report(LoadReport(GroupId(0), 1, totals=LeaderTotals(prompt_tokens=1000)), 1.0)
    assert group.prompt_tokens_per_s == 0.0
    group.note_report(LoadReport(GroupId(0), 2, totals=LeaderTotals(prompt_tokens=1500)), 2.0)
    assert group.prompt_tokens_per_s == pytest.approx(RATE_WEIGHT * 500)


def test_ids_are_never_used_again() -> None:
    placement = placed((0,), (1,))
    placement.remove([group.layout for group in tuple(placement.groups.values())])
    assert placement.new_ids(3) == 2 and placement.new_ids(1) == 5


def test_a_group_that_is_gone_leaves_no_more() -> None:
    placement = placed((0,), (1,))
    placement.mark(GroupId(1), Standing.LEAVING)
    assert placement.leaving == {GroupId(1)}
    placement.remove((placement.groups[GroupId(1)].layout,))
    assert not placement.leaving
    placement.check()


def test_a_group_takes_no_leader_from_another_one() -> None:
    placement = placed((0,), (0,))  # as must not be, and must end well all the same
    older, newer = (group.layout for group in tuple(placement.groups.values()))
    placement.remove((older,))
    led = placement.led_by(InstanceId(0))
    assert led is not None and led.layout == newer
    placement.check()
    placement.remove((newer,))
    assert placement.led_by(InstanceId(0)) is None


def test_members_find_their_groups() -> None:
    placement = placed((0, 1), (2,))
    found = placement.with_member(InstanceId(1))
    assert found is not None and found.layout.leader == 0
    assert placement.with_member(InstanceId(9)) is None
    assert placement.led_by(InstanceId(1)) is None
    assert [spec.instance_id for spec in placement.specs_of([found.layout])] == [0, 1]


def test_a_group_with_a_hole_is_found_out() -> None:
    placement = placed((0, 1))
    group = only(placement)
    group.layout = GroupLayout(GroupId(0), group.layout.stages[:1])
    with pytest.raises(AssertionError):
        placement.check()
