"""A running request leaves an instance: its KV is copied while it decodes (live migration).

    choosing -> copying -> (copying ...) -> ready -> handed off -> over

Blocks that are full never change, so they are offered first; what was written meanwhile is
offered next; only for the last blocks does the request stop. Until the controller hands it off it
is this instance's, and whatever goes wrong it just runs on.
"""

from typing import Literal, NamedTuple, TypeAlias

from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.changes.change import Change, ChangeWord
from kunserve.control.instance.changes.kv_transfer import KvExport
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import RequestId, TransitionId
from kunserve.core.messages import (
    EndMigration,
    HandOff,
    Migrate,
    MigrationOver,
    MigrationReady,
    OfferKv,
    OfferRefused,
    OfferTaken,
    WithdrawKv,
)
from kunserve.policy.dispatch.migrate import choose_request

MAX_LAST_BLOCKS = 2
"""The request stops for the copy of so many blocks, or fewer, one of them unfinished."""
MAX_OFFERS = 8
"""A request that outruns the link stops for whatever is left then."""
SPARE_BLOCKS = 2
"""Set aside at the target beyond what the request has, for what it writes meanwhile."""

Phase: TypeAlias = Literal["choosing", "copying", "copied", "ready", "handed off", "over"]


class _Leaving(NamedTuple):
    """The request that was chosen."""

    request_id: RequestId
    kv: KvExport


class MigrationSource(Change):
    """One request's way out."""

    occupation = "a request migrates"

    def __init__(self, state: InstanceState, scheduler: Scheduler, order: Migrate) -> None:
        super().__init__(state)
        self._scheduler = scheduler
        self._order = order
        self._phase: Phase = "choosing"
        self._leaving: _Leaving | None = None
        """The request, once it is chosen."""
        self._num_offers = 0
        self._copied_blocks = 0
        """That the target has."""
        self._offered_blocks = 0
        self._reserved_blocks = 0
        self._is_target_done = False
        """The target has all, or wants no more."""

    @classmethod
    def begin(
        cls, state: InstanceState, membership: Membership, order: Migrate, obstacle: str | None
    ) -> "MigrationSource | None":
        """The controller's wish; None if it cannot be."""
        layout, scheduler = membership.layout, membership.scheduler
        if layout.group_id != order.group_id or len(layout.stages) > 1 or scheduler is None:
            obstacle = obstacle or f"stands in {layout}"
        elif obstacle is None:
            return cls(state, scheduler, order)
        state.send(None, MigrationOver(order.migration_id, state.me, obstacle))
        return None

    @property
    def change_id(self) -> TransitionId:
        """Which migration it is."""
        return self._order.migration_id

    @property
    def is_over(self) -> bool:
        """Nothing of the migration is left here."""
        return self._phase == "over"

    def advance(self, now_s: float) -> None:
        """Take the next step if the request allows it: between two steps of the group."""
        if self._scheduler.num_in_flight:
            return
        if self._phase == "choosing":
            self._choose()
        elif self._phase == "copied" and self._leaving is not None:
            self._go_on(self._leaving)

    def _choose(self) -> None:
        requests = self._scheduler.migration
        chosen = choose_request(requests.movable(), requests.missing_blocks, self._order.max_blocks)
        if chosen is None:
            self._end("no request can move")
            return
        self._leaving = _Leaving(chosen, KvExport(self._state, chosen))
        self._go_on(self._leaving)

    def _go_on(self, leaving: _Leaving) -> None:
        """Offer what was written since the last offer, or stop the request for the rest."""
        state = self._state
        tokens = self._scheduler.migration.written_tokens(leaving.request_id)
        if tokens is None:
            self._stay("preempted")
            return
        block_size = state.spec.block_size
        needed = -(-tokens // block_size)
        is_last = needed - self._copied_blocks <= MAX_LAST_BLOCKS
        is_last = is_last or self._num_offers >= MAX_OFFERS
        if self._num_offers and is_last and needed <= self._reserved_blocks:
            self._scheduler.migration.pause(leaving.request_id)
            self._phase, self._offered_blocks = "ready", needed
            leaving.kv.offer(needed)
            state.send(None, MigrationReady(self.change_id, state.me, leaving.request_id))
            return
        self._phase, self._offered_blocks = "copying", tokens // block_size
        self._num_offers += 1
        self._reserved_blocks = needed + SPARE_BLOCKS
        leaving.kv.offer(self._offered_blocks)
        self._send_offer(leaving.request_id)

    def _send_offer(self, request_id: RequestId) -> None:
        order = self._order
        offer = OfferKv(
            migration_id=order.migration_id,
            source=self._state.me,
            group_id=order.target_group,
            request_id=request_id,
            num_blocks=self._offered_blocks,
            reserved_blocks=self._reserved_blocks,
            largest_blocks=self._scheduler.migration.largest_blocks(request_id),
        )
        self._state.send(order.target, offer)

    # What others say

    def on(self, message: ChangeWord | OfferKv, now_s: float) -> None:
        """The target takes blocks or refuses them; the controller says whose the request is."""
        match message:
            case OfferTaken(_, end_block):
                self._offer_taken(end_block)
            case OfferRefused():
                self._offer_refused()
            case HandOff():
                assert self._phase == "ready", self._phase
                self._phase = "handed off"
                self._leave_if_done()
            case EndMigration():
                self._give_up("ended by the controller")

    def _offer_taken(self, end_block: int) -> None:
        """The target has blocks [0, end_block)."""
        self._copied_blocks = end_block
        if self._phase == "copying":
            self._phase = "copied"
        elif end_block == self._offered_blocks:
            self._is_target_done = True
            self._leave_if_done()

    def _offer_refused(self) -> None:
        """The target takes no more."""
        if self._phase in ("copying", "copied"):
            self._stay("the target gave it up", inform_target=False)
        else:
            # Whose the request is now, the controller says.
            self._is_target_done = True
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._phase == "handed off" and self._is_target_done:
            self._leave(None)

    # Ends

    def _give_up(self, reason: str) -> None:
        """Let the request stay; or if it is another's already, let its KV go."""
        if self._phase == "handed off":
            self._leave(reason)
        else:
            self._stay(reason)

    def abort(self, request_id: RequestId) -> bool:
        """The request stays for as long as it still takes to end."""
        self._request_ends(request_id, "aborted")
        return False

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks: it has ended, or is preempted."""
        self._request_ends(request_id, "ended or preempted")
        super().release(request_id)

    def swap_out(self, request_id: RequestId) -> None:
        """The request stays: what is offered of it must lie still."""
        self._request_ends(request_id, "it goes to host memory")

    def _request_ends(self, request_id: RequestId, reason: str) -> None:
        if self._leaving is not None and self._leaving.request_id == request_id:
            self._give_up(reason)

    def make_room(self) -> None:
        """Pinned blocks are in a step's way: let them go if they may."""
        if self._phase in ("copying", "copied"):
            self._stay("its blocks are in the way")

    def _leave(self, refusal: str | None) -> None:
        """The request is another's: what is left of it here goes, its KV with the next plan."""
        assert self._leaving is not None, self._phase
        self._leaving.kv.close()
        was_here = self._scheduler.abort(self._leaving.request_id)
        assert was_here, self._leaving
        self._end(refusal)

    def _stay(self, reason: str, *, inform_target: bool = True) -> None:
        """The request, if it lives, goes on here."""
        assert self._phase != "handed off", self._leaving
        if self._leaving is not None:
            self._leaving.kv.close()
            if self._phase == "ready":
                self._scheduler.resume(self._leaving.request_id)
            if inform_target:
                self._state.send(self._order.target, WithdrawKv(self.change_id))
        self._end(reason)

    def _end(self, refusal: str | None) -> None:
        self._phase, self._leaving = "over", None
        self._state.send(None, MigrationOver(self.change_id, self._state.me, refusal))
