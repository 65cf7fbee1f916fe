"""Requests that can run nowhere, and for how long that has been so."""

from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.requests.backlog import Backlog
from kunserve.control.cluster.requests.live import Live
from kunserve.control.cluster.requests.quarantine import Quarantine
from kunserve.core.ids import RequestId


class Unplaceable:
    """Owner of the times since which requests in the backlog have been homeless.

    Most of the backlog waits because others are served first. A request is homeless when it waits
    for another reason: no group is large enough for it, or it may only run in a test and no group
    is reserved for tests. Whoever waits for the end of a test is not homeless: a test ends.
    """

    def __init__(self, placement: Placement, quarantine: Quarantine, backlog: Backlog) -> None:
        self._placement = placement
        self._quarantine = quarantine
        self._backlog = backlog
        self._since_s: dict[RequestId, float] = {}

    def overdue(self, now_s: float, longest_s: float) -> list[Live]:
        """Those that have been homeless for longer than ``longest_s``. Called at every tick."""
        homeless = self._find()
        since_s = self._since_s
        self._since_s = {
            live.request.request_id: since_s.get(live.request.request_id, now_s)
            for live in homeless
        }
        return [
            live for live in homeless if now_s - self._since_s[live.request.request_id] > longest_s
        ]

    def _find(self) -> list[Live]:
        placement = self._placement
        groups = (*placement.candidates(is_reserved=True), *placement.expected.values())
        largest_blocks = max((group.capacity_blocks for group in groups), default=0)
        quarantine, backlog = self._quarantine, self._backlog
        is_held_up = placement.reserved is None and quarantine.holds_any
        if backlog.largest_blocks <= largest_blocks and not is_held_up:
            return []
        return [
            entry.live
            for entry in backlog
            if entry.num_blocks > largest_blocks
            or (is_held_up and quarantine.holds(entry.live.request.request_id))
        ]
