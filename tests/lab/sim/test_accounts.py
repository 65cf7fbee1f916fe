"""What a simulated cluster counts for figures."""

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.snapshots import StageTime
from kunserve_lab.sim.accounts import ClusterAccounts


def stage(instance: int, group: int, busy_s: float, active_s: float | None = None) -> StageTime:
    return StageTime(InstanceId(instance), GroupId(group), 2, busy_s, active_s)


def test_bubbles_are_what_stages_idle_while_their_pipeline_has_work() -> None:
    accounts = ClusterAccounts()
    assert accounts.bubble_ratio is None
    accounts.note_stage_time(stage(1, 7, 1.0))
    assert accounts.bubble_ratio is None, "only the leader knows whether there was work"
    accounts.note_stage_time(stage(0, 7, 2.0, 3.0))
    accounts.note_stage_time(stage(0, 7, 3.0, 4.0))
    assert accounts.bubble_ratio == 1.0 - (3.0 + 1.0) / (2 * 4.0)
    accounts.note_stage_time(stage(0, 9, 2.0, 2.0))
    accounts.note_stage_time(stage(1, 9, 2.0))
    assert accounts.bubble_ratio == 1.0 - 8.0 / 12.0, "the instances' former pipeline counts too"


def test_instances_are_held_from_order_to_end() -> None:
    accounts = ClusterAccounts()
    accounts.note_order(InstanceId(0), 1.0)
    accounts.note_order(InstanceId(1), 2.0)
    accounts.note_end(InstanceId(0), 5.0)
    assert accounts.instance_seconds(10.0) == 4.0 + 8.0
