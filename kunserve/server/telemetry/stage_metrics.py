"""Bubbles: how much of the time in which a pipeline has work its stages do nothing."""

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.snapshots import ClusterState, StageTime
from kunserve.server.telemetry.metric_row import Row, by_engine, counter, gauge

WINDOW_S = 1.0
"""Working time of a pipeline that one value of the ratio covers, at least."""


class StageMetrics:
    """Sums of ``StageTime`` over all the pipelines that instances have stood in."""

    def __init__(self) -> None:
        self._last: dict[InstanceId, StageTime] = {}
        self.busy_s: dict[InstanceId, float] = {}
        self.active_s: dict[InstanceId, float] = {}
        self._window: dict[GroupId, tuple[float, float]] = {}
        """(busy, active) sums of a group at the beginning of its window."""
        self.ratios: dict[InstanceId, float] = {}
        """Of the last whole window of each pipeline, by its leader; gone with the pipeline."""

    def observe(self, state: ClusterState) -> None:
        """Add what is new in a snapshot."""
        groups = {layout.group_id: layout for layout in state.groups}
        active_of = {
            time.group_id: time.active_s for time in state.stage_times if time.active_s is not None
        }
        for time in state.stage_times:
            before = self._last.get(time.instance_id)
            if before is None or before.group_id != time.group_id:
                before = StageTime(time.instance_id, time.group_id, time.num_stages, 0.0, 0.0)
            busy_s = max(0.0, time.busy_s - before.busy_s)
            active_s = active_of.get(time.group_id)
            if active_s is None:
                continue  # the leader has not reported yet
            grown_s = max(0.0, active_s - (before.active_s or 0.0))
            _add(self.busy_s, time.instance_id, busy_s)
            _add(self.active_s, time.instance_id, grown_s)
            self._last[time.instance_id] = StageTime(
                time.instance_id, time.group_id, time.num_stages, time.busy_s, active_s
            )
        self.ratios = {
            layout.leader: self.ratios[layout.leader]
            for layout in groups.values()
            if len(layout.stages) > 1 and layout.leader in self.ratios
        }
        for group_id, active_s in active_of.items():
            if group_id in groups:
                members = [t for t in state.stage_times if t.group_id == group_id]
                self._turn(group_id, groups[group_id].leader, members, active_s)
        self._window = {group: at for group, at in self._window.items() if group in groups}

    def _turn(
        self, group_id: GroupId, leader: InstanceId, members: list[StageTime], active_s: float
    ) -> None:
        """Close the group's window if it is long enough, and begin the next."""
        num_stages = members[0].num_stages
        if len(members) < num_stages:
            return
        busy_s = sum(time.busy_s for time in members)
        busy_before_s, active_before_s = self._window.setdefault(group_id, (0.0, 0.0))
        elapsed_s = active_s - active_before_s
        if elapsed_s >= WINDOW_S:
            ratio = 1.0 - (busy_s - busy_before_s) / (num_stages * elapsed_s)
            self.ratios[leader] = min(1.0, max(0.0, ratio))
            self._window[group_id] = (busy_s, active_s)


def _add(sums: dict[InstanceId, float], instance_id: InstanceId, seconds: float) -> None:
    sums[instance_id] = sums.get(instance_id, 0.0) + seconds


ROWS: tuple[Row[StageMetrics], ...] = (
    counter(
        "kunserve:stage_busy_seconds_total",
        "Time in which a pipeline's stage computed.",
        lambda stages: by_engine(stages.busy_s),
        "engine",
    ),
    counter(
        "kunserve:stage_active_seconds_total",
        "Time in which a stage's pipeline had work, whether the stage computed or not.",
        lambda stages: by_engine(stages.active_s),
        "engine",
    ),
    gauge(
        "kunserve:bubble_ratio",
        "Idle share of the stages' time over the pipeline's last second or more of work.",
        lambda stages: by_engine(stages.ratios),
        "engine",
    ),
)
