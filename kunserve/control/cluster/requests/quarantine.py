"""Requests that may be what kills instances: found out by letting fewer and fewer run together.

Each death adds to the *points* of the requests that may have caused it. With enough of them a
request is *held*: it runs among other suspects only, in a group reserved for the test. The older
half of those held is tested first, because a request that kills at its start is among the last.

the half does no harm   it is cleared, and the test goes on with the other half
its instance dies       the other half is released, and half of the half is tested
one alone dies          again and again, until the points for that convict it
"""

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kunserve.control.cluster.commands import LogQuarantine, Outbox
from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.transitions import Transitions
from kunserve.core.ids import GroupId, RequestId
from kunserve.policy.dispatch.choice import choose_empty


class Cause(enum.IntEnum):
    """Where a death came from; the value is the points of requests that ran there."""

    NOBODY = 0
    """It was killed on purpose: no request is to blame."""
    OUTSIDE = 1
    """A signal, silence, a lost connection, or not known: seldom a request's doing."""
    INSIDE = 2
    """It ended by itself, or hung in a step: likely what it ran."""


class Blame(NamedTuple):
    """What is known of a death."""

    cause: Cause = Cause.INSIDE
    named: tuple[RequestId, ...] = ()
    """The requests of the step that failed, if the process could say so."""


NOBODY = Blame(Cause.NOBODY)
UNKNOWN = Blame()

HELD_AT = 2 * Cause.INSIDE
"""Points of a request that runs among others no more."""
GUILTY_AT = 3 * Cause.INSIDE
"""Points for deaths of one that was alone, at which it ends with an error."""
NAMED_TWICE = 2
"""A request ends at once when it was alone in a step that failed, so often."""
CLEARING_TOKENS = 16
"""Tokens that a request makes in a test until it has done no harm."""


class Quarantine:
    """Knows who is suspected, and reserves a group for one test at a time."""

    def __init__(self, placement: Placement, transitions: Transitions, outbox: Outbox) -> None:
        self._placement = placement
        self._transitions = transitions
        self._outbox = outbox
        self._points: dict[RequestId, int] = {}
        self._points_alone: dict[RequestId, int] = {}
        self._times_named: dict[RequestId, int] = {}
        self.tested: dict[RequestId, int | None] = {}
        """Those that run in the reserved group, and the token at which each has done no harm.

        None: it has come to that.
        """
        self._last_tested: frozenset[RequestId] = frozenset()
        self._harm = 0
        """Points of deaths while these were tested."""
        self.num_quarantined = 0
        """Times that a request ran in a test."""
        self.num_guilty = 0

    def died(self, suspects: Sequence[RequestId], blame: Blame) -> set[RequestId]:
        """An instance died that may have run these; those that are to blame.

        All others are to be told of by ``interrupted`` next.
        """
        if blame.named:
            suspects = [request_id for request_id in suspects if request_id in blame.named]
        for request_id in suspects:
            self._points[request_id] = self._points.get(request_id, 0) + blame.cause
        guilty = set()
        if len(blame.named) == 1 and suspects and self._is_named_too_often(suspects[0]):
            guilty.add(suspects[0])
        under_test = [request_id for request_id in suspects if request_id in self.tested]
        if under_test:
            guilty |= self._fail_test(under_test, blame)
        for request_id in guilty:
            self.num_guilty += 1
            self._say(request_id, "its instance died of it: it ends with an error")
        return guilty

    def _is_named_too_often(self, request_id: RequestId) -> bool:
        times = self._times_named[request_id] = self._times_named.get(request_id, 0) + 1
        return times >= NAMED_TWICE

    def _fail_test(self, under_test: Sequence[RequestId], blame: Blame) -> set[RequestId]:
        """The instance died in which only these ran: who is guilty; who is released now."""
        self._harm += blame.cause
        if len(self.tested) == 1:
            (request_id,) = under_test
            points = self._points_alone.get(request_id, 0) + blame.cause
            self._points_alone[request_id] = points
            if points >= GUILTY_AT or request_id in blame.named:
                return {request_id}
        if self._harm >= Cause.INSIDE or blame.named:
            self._release_all_but(under_test)
        return set()

    def _release_all_but(self, suspects: Collection[RequestId]) -> None:
        """Others may run these again; one more death, and they are held again."""
        for request_id in self._points:
            if self.holds(request_id) and request_id not in suspects:
                self._points[request_id] = HELD_AT - Cause.INSIDE

    def holds(self, request_id: RequestId) -> bool:
        """Whether the request may only run in a test."""
        return self._points.get(request_id, 0) >= HELD_AT

    @property
    def holds_any(self) -> bool:
        """Whether any request may only run in a test."""
        return any(map(self.holds, self._points))

    def interrupted(self, request_id: RequestId) -> None:
        """It runs no more where it ran, and has not ended: a test that it is in is over."""
        if request_id in self.tested:
            self._end_test()

    def ended(self, request_id: RequestId) -> None:
        """Whatever it was, it is over."""
        self._forget(request_id)
        if request_id in self.tested:
            del self.tested[request_id]
            self._end_test_if_passed()

    def made_token(self, request_id: RequestId, num_tokens: int) -> None:
        """A request in the test has so many tokens now."""
        clear_at = self.tested[request_id]
        if clear_at is not None and num_tokens >= clear_at:
            self.tested[request_id] = None
            self._end_test_if_passed()

    def _end_test_if_passed(self) -> None:
        if any(clear_at is not None for clear_at in self.tested.values()):
            return
        for request_id in self.tested:
            self._say(request_id, "it did no harm")
            self._forget(request_id)
        self._end_test()

    def _end_test(self) -> None:
        self.tested = {}
        self._placement.reserve(None)

    def _forget(self, request_id: RequestId) -> None:
        for account in (self._points, self._points_alone, self._times_named):
            account.pop(request_id, None)

    def choose(self, held: Sequence[RequestId]) -> Sequence[RequestId]:
        """Which of those held, oldest first, to test next."""
        return held[: (len(held) + 1) // 2]

    def testable(self) -> list[Group]:
        """Groups in which a test may be made now: no transition changes them meanwhile."""
        busy = self._transitions.busy_groups
        candidates = self._placement.candidates(is_reserved=True)
        return [group for group in candidates if group.layout.group_id not in busy]

    def reserve(self, blocks: int, num_at: dict[GroupId, int]) -> Group | None:
        """The group in which a request of so many blocks may be tested now; None: not yet.

        Nothing new is sent to the group that empties soonest; ``num_at`` says how much is there.
        While an instance is missing none is emptied: its replacement comes with nothing in it.
        """
        placement = self._placement
        loads = [group.load for group in self.testable()]
        group_id = choose_empty(loads, blocks, num_at)
        if group_id is None or (num_at[group_id] > 0 and placement.num_missing > 0):
            placement.reserve(None)
            return None
        placement.reserve(group_id)
        group = placement.groups[group_id]
        return group if num_at[group_id] == 0 and group.is_clear else None

    def isolate(self, num_tokens: Mapping[RequestId, int]) -> None:
        """These requests, with so many tokens each, are sent to the reserved group."""
        assert not self.tested and num_tokens, (self.tested, num_tokens)
        self.tested = {i: number + CLEARING_TOKENS for i, number in num_tokens.items()}
        if self._last_tested != frozenset(num_tokens):
            self._last_tested = frozenset(num_tokens)
            self._harm = 0
        self.num_quarantined += len(num_tokens)
        where = "it runs alone" if len(num_tokens) == 1 else f"it runs with {len(num_tokens)} such"
        for request_id in num_tokens:
            self._say(request_id, f"it was part of deaths of instances: {where}")

    def nobody(self) -> None:
        """Nobody is to be tested: the group, if one is being emptied for it, is as any other."""
        if not self.tested:
            self._placement.reserve(None)

    def _say(self, request_id: RequestId, reason: str) -> None:
        self._outbox.add(LogQuarantine(request_id, reason))
