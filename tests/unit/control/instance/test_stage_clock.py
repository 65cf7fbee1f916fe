"""What a stage reports of its time."""

from kunserve.control.instance.stage_clock import StageClock
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import StageTime

ME = InstanceId(0)
ALONE = GroupLayout(GroupId(1), (Stage(ME, LayerRange(0, 4)),))
PAIR = GroupLayout(
    GroupId(2), (Stage(ME, LayerRange(0, 2)), Stage(InstanceId(1), LayerRange(2, 4)))
)


def test_a_group_of_one_has_no_bubbles() -> None:
    clock = StageClock(ME)
    assert clock.report() is None
    clock.look(ALONE, 1, 0.0)
    clock.computed(1.0)
    assert clock.report() is None


def test_a_leader_counts_the_time_with_microbatches_in_flight() -> None:
    clock = StageClock(ME)
    for now_s, num_in_flight in ((10.0, 0), (11.0, 1), (13.0, 2), (13.5, 0), (20.0, 0)):
        clock.look(PAIR, num_in_flight, now_s)
    clock.computed(1.5)
    assert clock.report() == StageTime(ME, GroupId(2), 2, 1.5, 2.5)
    assert clock.report() is None, "no news"


def test_a_follower_knows_its_own_steps_only() -> None:
    clock = StageClock(ME)
    clock.look(PAIR, None, 0.0)
    clock.computed(0.25)
    assert clock.report() == StageTime(ME, GroupId(2), 2, 0.25, None)


def test_every_group_begins_at_nothing() -> None:
    clock = StageClock(ME)
    clock.look(ALONE, 3, 0.0)
    clock.computed(5.0)
    clock.look(PAIR, 1, 9.0)
    clock.look(PAIR, 1, 10.0)
    report = clock.report()
    assert report is not None and (report.busy_s, report.active_s) == (0.0, 1.0)
