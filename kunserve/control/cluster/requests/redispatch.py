"""Has leaders give waiting requests back that start at once elsewhere, or whose group leaves."""

from collections.abc import Sequence

from kunserve.control.cluster.commands import Outbox, Send
from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.requests import Requests
from kunserve.control.cluster.standing import Act
from kunserve.core.ids import RequestId
from kunserve.core.messages import ReturnWaiting
from kunserve.policy.dispatch.redispatch import plan_recalls

LOOK_GAP_S = 0.02
"""Shortest time between two looks: each costs time for every group."""
LOOK_GAP_PER_GROUP_S = 5e-5
"""More of them make it longer: at a thousand it is half a report period."""
PATIENCE_S = 10.0
"""After which a leader that has not answered is taken as if it had."""


class Redispatch:
    """Asks the policy after each report. What comes back, ``Requests`` sends anew."""

    def __init__(
        self, placement: Placement, requests: Requests, outbox: Outbox, step_tokens: int
    ) -> None:
        self._step_tokens = step_tokens
        self._placement = placement
        self._requests = requests
        self._outbox = outbox
        self._next_look_s = 0.0

    def watch(self, now_s: float) -> None:
        """Called at every report."""
        placement = self._placement
        if now_s < self._next_look_s or len(placement.groups) < 2:
            return
        self._next_look_s = now_s + max(LOOK_GAP_S, LOOK_GAP_PER_GROUP_S * len(placement.groups))
        asked = [group for group in placement.groups.values() if group.num_returning]
        for group in asked:
            if now_s - group.asked_s > PATIENCE_S:
                group.is_returned = True
        targets = [group.load for group in placement.candidates()]
        may_return = placement.that_may(Act.RETURN)
        sources = [group.load for group in may_return if not group.num_returning]
        for recall in plan_recalls(sources, targets, self._step_tokens):
            group = placement.groups[recall.group_id]
            self._recall(group, self._requests.waiting_at(group)[: recall.num_requests], now_s)

        reserved = placement.reserved
        if reserved is not None and not self._requests.quarantine.tested:
            emptied = placement.groups[reserved]
            if not emptied.num_returning:
                self._recall(emptied, self._requests.waiting_at(emptied), now_s)

    def empty_leaving(self, now_s: float) -> None:
        """Called at every tick: what waits where all is to be empty goes back to the backlog."""
        placement = self._placement
        emptied = placement.emptied
        if not emptied or not placement.candidates():
            return
        for group_id in sorted(emptied):
            group = placement.groups[group_id]
            is_asked = group.num_returning and now_s - group.asked_s <= PATIENCE_S
            if group.report.num_waiting and not is_asked and Act.RETURN in group.may:
                self._recall(group, self._requests.led_by(group.layout.leader), now_s)

    def _recall(self, group: Group, request_ids: Sequence[RequestId], now_s: float) -> None:
        """What of these runs, or is swapped, stays as it is."""
        if not request_ids:
            return
        num_waiting = max(1, group.report.num_waiting)
        num_returning = min(len(request_ids), num_waiting)
        size = -(-group.report.waiting_blocks // num_waiting)
        group.asked_back(num_returning, num_returning * size, now_s)
        self._outbox.append(Send(group.layout.leader, ReturnWaiting(tuple(request_ids))))
