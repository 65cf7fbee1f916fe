"""Finds groups that have work and complete no step, though all of their loops move on.

Something was lost between their stages. Judged by the front's clock, because a leader that was
stopped for a while counts that time too.
"""

from collections.abc import Callable, Iterable

from kunserve.cluster.processes.processes import Processes
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.standing import Standing
from kunserve.core.faults import Fault
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.core.load import LoadReport

PATIENCE_FACTOR = 2.0
"""Of a step's patience: a member that hangs is to be found first, and not its leader blamed."""


class GroupWatch:
    """Knows when each group was last seen to complete a step, or to have nothing to do."""

    def __init__(self, patience_s: Callable[[InstanceId], float]) -> None:
        """``patience_s``: how long an instance may take for what is a step's work."""
        self._patience_s = patience_s
        self._moved: dict[GroupId, tuple[float, float]] = {}
        """(when, what the leader said of the time since its last step)"""

    def look(self, controller: Controller, processes: Processes, now_s: float) -> None:
        """Kill the leaders of groups that stand still; their requests run again."""
        groups = controller.placement.groups.values()
        still = [group for group in groups if Standing.CHANGING not in group.standing]
        reports = [(group.layout, group.report) for group in still]
        for layout, still_s in self.stuck(reports, now_s):
            reason = f"its group completes no step since {still_s:.1f} s"
            processes.condemn(layout.leader, reason, Fault.REQUEST)

    def stuck(
        self, groups: Iterable[tuple[GroupLayout, LoadReport]], now_s: float
    ) -> list[tuple[GroupLayout, float]]:
        """Groups that stand still for too long, and for how long. Called at every tick."""
        found, moved = [], {}
        for layout, report in groups:
            since_s, before_s = self._moved.get(layout.group_id, (now_s, 0.0))
            if report.stuck_s < before_s or not report.stuck_s:
                since_s = now_s
            moved[layout.group_id] = (since_s, report.stuck_s)
            still_s = min(now_s - since_s, report.stuck_s)
            patience_s = max(self._patience_s(member) for member in layout.members)
            if still_s > PATIENCE_FACTOR * patience_s:
                found.append((layout, still_s))
        self._moved = moved
        return found
