"""Groups that complete no step are found; those that were only stopped are not."""

from kunserve.cluster.driver.group_watch import GroupWatch
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport

STAGES = (Stage(InstanceId(0), LayerRange(0, 4)), Stage(InstanceId(1), LayerRange(4, 8)))
LAYOUT = GroupLayout(GroupId(7), STAGES)


def stuck(watch: GroupWatch, now_s: float, stuck_s: float) -> bool:
    report = LoadReport(LAYOUT.group_id, stuck_s=stuck_s)
    return bool(watch.stuck([(LAYOUT, report)], now_s))


def test_a_group_that_completes_no_step_is_found_after_its_slowest_member_s_patience() -> None:
    watch = GroupWatch(lambda instance_id: (10.0, 20.0)[instance_id])
    assert not any(stuck(watch, float(t), float(t)) for t in range(41))
    assert stuck(watch, 41.0, 41.0)


def test_a_step_begins_the_wait_anew() -> None:
    watch = GroupWatch(lambda _: 10.0)
    assert not any(stuck(watch, float(t), float(t % 18)) for t in range(100))
    assert not any(stuck(watch, 100.0 + t, 0.0) for t in range(100))


def test_a_leader_that_was_stopped_has_its_time() -> None:
    """Its first report after an hour's pause, which the front has slept through as well."""
    watch = GroupWatch(lambda _: 10.0)
    assert not stuck(watch, 1.0, 0.5)
    assert not stuck(watch, 1.5, 3600.0)
    assert not stuck(watch, 2.0, 0.1)


def test_groups_that_are_gone_are_forgotten() -> None:
    watch = GroupWatch(lambda _: 10.0)
    assert not stuck(watch, 0.0, 0.5)
    assert watch.stuck([], 15.0) == []
    assert not stuck(watch, 21.0, 21.5)
