"""Requests that may be what kills instances: found out by letting fewer and fewer run together.

Each death adds to the *points* of the requests that may have caused it. With enough of them a
request is *held*: it runs among other suspects only, in a group reserved for the test. The older
half of those held is tested first, because a request that kills at its start is among the last.

the half does no harm   it is cleared, and the test goes on with the other half
its instance dies       the other half is released, and half of the half is tested
one alone dies          again and again, until the points for that convict it
"""

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kunserve.control.cluster.commands import LogQuarantine, Outbox
from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.live import Live
from kunserve.control.cluster.standing import Act
from kunserve.core.faults import Fault
from kunserve.core.ids import GroupId, RequestId
from kunserve.policy.dispatch.choice import choose_empty


class Cause(enum.IntEnum):
    """Where a death came from; the value is the points of requests that ran there."""

    NOBODY = 0
    """It was killed on purpose, or the machine failed: no request is to blame."""
    OUTSIDE = 1
    """A signal, silence, a lost connection, or not known: seldom a request's doing."""
    INSIDE = 2
    """It ended by itself, or hung in a step: likely what it ran."""


class Blame(NamedTuple):
    """What is known of a death."""

    cause: Cause = Cause.INSIDE
    named: tuple[RequestId, ...] = ()
    """The requests of the step that failed, if the process could say so."""


_CAUSES = {
    Fault.REQUEST: Cause.INSIDE,
    Fault.UNKNOWN: Cause.OUTSIDE,
    Fault.MACHINE: Cause.NOBODY,
    Fault.ORDER: Cause.NOBODY,
}


def blame_of(fault: Fault, request_ids: tuple[RequestId, ...] = ()) -> Blame:
    """Whom a failure speaks against, of those in the step that failed: the only place to decide."""
    return Blame(_CAUSES[fault], request_ids if fault is Fault.REQUEST else ())


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
RETURN_S = 30.0
"""For so long no group is emptied for a test while an instance is missing: its replacement comes
with nothing in it. Some never come back."""
EMPTYING_S = 30.0
"""After so long the group that is kept for a test starts anew, and what still ran there runs again
elsewhere."""


class Quarantine:
    """Knows who is suspected, and reserves a group for one test at a time."""

    def __init__(self, placement: Placement, outbox: Outbox) -> None:
        self._placement = placement
        self._outbox = outbox
        self._points: dict[RequestId, int] = {}
        self._points_alone: dict[RequestId, int] = {}
        self._times_named: dict[RequestId, int] = {}
        self.held: dict[RequestId, None] = {}
        """Those that may only run in a test."""
        self._of_inside: set[RequestId] = set()
        """Those that were part of a death from inside."""
        self._whole_s = self._kept_s = math.inf
        """When nobody was missing last, and when no group was being emptied."""
        self._awaits_return = True
        self.tested: dict[RequestId, int | None] = {}
        """Those that run in the reserved group, and the token at which each has done no harm.

        None: it has come to that.
        """
        self._last_tested: frozenset[RequestId] = frozenset()
        self._failed: set[RequestId] = set()
        """Those of the last test that failed: one of them at least is guilty."""
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
            self._set_points(request_id, self._points.get(request_id, 0) + blame.cause)
            if blame.cause is Cause.INSIDE:
                self._of_inside.add(request_id)
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
            self._failed = set(under_test)
            self._release_all_but(under_test)
        return set()

    def _release_all_but(self, suspects: Collection[RequestId]) -> None:
        """Others may run these again; one more death, and they are held again."""
        for request_id in self.held.keys() - suspects:
            self._set_points(request_id, HELD_AT - Cause.INSIDE)

    def release(self, request_id: RequestId) -> bool:
        """Let others run it again that has waited for a test too long; False if it may well be why
        instances ended by themselves.
        """
        if request_id not in self.held or request_id in self._of_inside:
            return False
        self._set_points(request_id, HELD_AT - Cause.INSIDE)
        self._say(request_id, "all deaths that it was part of came from outside: it is released")
        if not self.held:
            self.nobody()
        return True

    def _set_points(self, request_id: RequestId, points: int) -> None:
        self._points[request_id] = points
        if points >= HELD_AT:
            self.held[request_id] = None
        else:
            self.held.pop(request_id, None)

    def holds(self, request_id: RequestId) -> bool:
        """Whether the request may only run in a test."""
        return request_id in self.held

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
        if not self.held:
            self.nobody()

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
        for account in (self._points, self._points_alone, self._times_named, self.held):
            account.pop(request_id, None)
        self._of_inside.discard(request_id)
        self._failed.discard(request_id)

    def choose(self, held: Sequence[Live]) -> Sequence[Live]:
        """Which of those held, oldest first, to test next: half of those whose test has failed,
        because others may come to be held as fast as tests release them.
        """
        failed = [live for live in held if live.request.request_id in self._failed]
        among = failed or held
        return among[: (len(among) + 1) // 2]

    def reserve(self, blocks: int, num_at: dict[GroupId, int]) -> Group | None:
        """The group in which a request of so many blocks may be tested now; None: not yet.

        Nothing new is sent to the group that empties soonest; ``num_at`` says how much is there.
        While an instance may still come back none is emptied.
        """
        placement = self._placement
        loads = [group.load for group in placement.that_may(Act.TEST)]
        group_id = choose_empty(loads, blocks, num_at)
        if group_id is None or (
            num_at[group_id] > 0 and placement.num_missing > 0 and self._awaits_return
        ):
            placement.reserve(None)
            return None
        placement.reserve(group_id)
        group = placement.groups[group_id]
        return group if num_at[group_id] == 0 and group.is_clear else None

    def overdue(self, now_s: float) -> Group | None:
        """Called at every tick: the group that was to be empty by now, and is to start anew."""
        placement = self._placement
        is_whole = not self.held or not placement.num_missing
        self._whole_s = now_s if is_whole else min(self._whole_s, now_s)
        self._awaits_return = now_s - self._whole_s < RETURN_S
        reserved = None if self.tested else placement.reserved
        is_emptied = reserved is not None and placement.may(reserved, Act.TEST)
        self._kept_s = min(self._kept_s, now_s) if is_emptied else now_s
        if reserved is None or now_s - self._kept_s < EMPTYING_S:
            return None
        self._kept_s = now_s
        return placement.groups[reserved]

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

    def check(self) -> None:
        """Assert that who is tested is held, and in a group that is reserved for somebody."""
        is_reserved = self._placement.reserved is not None
        assert is_reserved or not self.tested, self.tested
        assert not is_reserved or self.tested or self.held, self._placement.reserved
        held = {i for i, points in self._points.items() if points >= HELD_AT}
        assert held == self.held.keys() >= self.tested.keys(), (held, self.held)

    def _say(self, request_id: RequestId, reason: str) -> None:
        self._outbox.append(LogQuarantine(request_id, reason))
