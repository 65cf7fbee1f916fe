"""Requests that may be what kills instances: found out by letting each run alone.

    1st death   the request runs again among others, because most deaths have another cause
    2nd death   it runs alone: nothing else runs beside it in that group
    a 3rd one   while it ran alone: it is guilty, and ends with an error

Alone it is cleared by its end, or by more tokens than can have been on their way at its death.
"""

from kunserve.control.cluster.commands import LogQuarantine, Outbox
from kunserve.control.cluster.placement import Group, Placement
from kunserve.core.ids import GroupId, RequestId
from kunserve.policy.dispatch import choose_empty

DEATHS_AMONG_OTHERS = 2
"""Deaths that a request may have been part of before it runs alone."""
CLEARING_TOKENS = 16
"""Tokens that a request makes alone until others may run beside it again."""


class Quarantine:
    """Knows who is suspected, and reserves a group for one of them at a time."""

    def __init__(self, placement: Placement, outbox: Outbox) -> None:
        self._placement = placement
        self._outbox = outbox
        self._num_deaths: dict[RequestId, int] = {}
        self.alone: RequestId | None = None
        """Runs in the reserved group."""
        self._clear_at = 0
        """Tokens of it after which it is cleared."""
        self.num_quarantined = 0
        """Requests that ran alone so far."""
        self.num_guilty = 0

    def died(self, request_id: RequestId) -> bool:
        """An instance died that may have run the request. Whether the request is to blame."""
        self._num_deaths[request_id] = self._num_deaths.get(request_id, 0) + 1
        if request_id != self.alone:
            return False
        self.num_guilty += 1
        reason = "it was alone when its instance died: it ends with an error"
        self._outbox.add(LogQuarantine(request_id, reason))
        return True

    def holds(self, request_id: RequestId) -> bool:
        """Whether the request may only run alone."""
        return self._num_deaths.get(request_id, 0) >= DEATHS_AMONG_OTHERS

    @property
    def holds_any(self) -> bool:
        """Whether any request may only run alone."""
        return any(map(self.holds, self._num_deaths))

    def interrupted(self, request_id: RequestId) -> None:
        """It runs no more where it ran, and has not ended."""
        if request_id == self.alone:
            self._release()

    def ended(self, request_id: RequestId) -> None:
        """Whatever it was, it is over."""
        self._num_deaths.pop(request_id, None)
        self.interrupted(request_id)

    def made_token(self, request_id: RequestId, num_tokens: int) -> None:
        """The request that runs alone has so many tokens now."""
        if request_id == self.alone and num_tokens >= self._clear_at:
            self._outbox.add(LogQuarantine(request_id, "it did no harm alone"))
            self.ended(request_id)

    def reserve(self, blocks: int, num_at: dict[GroupId, int]) -> Group | None:
        """The group in which a request of so many blocks may run now; None: not yet.

        Nothing new is sent to the group that empties soonest; ``num_at`` says how much is there.
        While an instance is missing none is emptied: its replacement comes with nothing in it.
        """
        placement = self._placement
        loads = [group.load for group in placement.candidates(is_reserved=True)]
        group_id = choose_empty(loads, blocks, num_at)
        if group_id is None or (num_at[group_id] > 0 and placement.num_missing > 0):
            placement.reserve(None)
            return None
        placement.reserve(group_id)
        group = placement.groups[group_id]
        return group if num_at[group_id] == 0 and group.is_clear else None

    def isolate(self, request_id: RequestId, num_tokens: int) -> None:
        """The request is sent to the reserved group, which has nothing else."""
        assert self.alone is None, (self.alone, request_id)
        self.alone = request_id
        self._clear_at = num_tokens + CLEARING_TOKENS
        self.num_quarantined += 1
        reason = f"it was part of {self._num_deaths[request_id]} deaths of instances: it runs alone"
        self._outbox.add(LogQuarantine(request_id, reason))

    def nobody(self) -> None:
        """Nobody is to be alone: the group, if one is being emptied for it, is as any other."""
        if self.alone is None:
            self._placement.reserve(None)

    def _release(self) -> None:
        self.alone = None
        self._placement.reserve(None)
