"""What a simulated cluster has used and done, for figures."""

from kunserve.control.group.load import SchedulerTotals
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.snapshots import StageTime


class ClusterAccounts:
    """Written by the cluster and its instances; nothing is decided by it."""

    def __init__(self) -> None:
        self.totals: list[SchedulerTotals] = []
        """Of every instance that ever was."""
        self._ordered_s: dict[InstanceId, float] = {}
        self._past_instance_s = 0.0
        self._stage_times: dict[tuple[GroupId, InstanceId], StageTime] = {}
        """The last report of every stage of every pipeline."""

    def note_order(self, instance_id: InstanceId, now_s: float) -> None:
        """The instance is held from now on."""
        self._ordered_s[instance_id] = now_s

    def note_end(self, instance_id: InstanceId, now_s: float) -> None:
        """The instance is held no more, if it was."""
        self._past_instance_s += now_s - self._ordered_s.pop(instance_id, now_s)

    def instance_seconds(self, now_s: float) -> float:
        """Time that instances were held, from order to end, so far."""
        held_s = sum(now_s - ordered_s for ordered_s in self._ordered_s.values())
        return self._past_instance_s + held_s

    def note_stage_time(self, time: StageTime) -> None:
        """A stage's account of its time in its present pipeline."""
        self._stage_times[time.group_id, time.instance_id] = time

    @property
    def bubble_ratio(self) -> float | None:
        """Idle stage time over stage time of all pipelines; None when none ever had work.

        As the served system counts (``docs/metrics.md``, Bubbles).
        """
        times = self._stage_times.values()
        active_s = {t.group_id: t.active_s for t in times if t.active_s is not None}
        stage_s = sum(active_s.get(time.group_id, 0.0) for time in times)
        busy_s = sum(time.busy_s for time in times if time.group_id in active_s)
        return 1.0 - busy_s / stage_s if stage_s > 0.0 else None
