"""A running request leaves an instance: its KV is copied while it decodes (live migration).

    choosing -> copying -> (copying ...) -> ready -> handed off -> over

Blocks that are full never change, so they are offered first; what was written meanwhile is
offered next; only for the last blocks does the request stop. Until the controller hands it off it
is this instance's, and whatever goes wrong it just runs on.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import RequestId
from kunserve.core.messages import (
    EndMigration,
    HandOff,
    KvDropped,
    KvMoved,
    Migrate,
    MigrationOver,
    MigrationReady,
    OfferKv,
    WithdrawKv,
)
from kunserve.policy.migrate import choose_request

MAX_LAST_BLOCKS = 2
"""The request stops for the copy of so many blocks, or fewer, one of them unfinished."""
MAX_OFFERS = 8
"""A request that outruns the link stops for whatever is left then."""
SPARE_BLOCKS = 2
"""Set aside at the target beyond what the request has, for what it writes meanwhile."""

Phase: TypeAlias = Literal["choosing", "copying", "copied", "ready", "handed off"]


@dataclass(slots=True)
class _Leaving:
    order: Migrate
    phase: Phase = "choosing"
    request_id: RequestId | None = None
    num_offers: int = 0
    copied_blocks: int = 0
    """That the target has."""
    offered_blocks: int = 0
    reserved_blocks: int = 0
    is_taken: bool = False
    """The target has all, or wants no more."""


class MigrationSource:
    """At most one at a time."""

    def __init__(self, seat: InstanceState) -> None:
        self._seat = seat
        self._leaving: _Leaving | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is about to leave or leaving."""
        return self._leaving is not None

    def begin(self, order: Migrate, is_busy: bool) -> None:
        """The controller's wish; ``is_busy`` with a transition."""
        seat = self._seat
        layout = seat.layout
        if self._leaving is not None or is_busy:
            self._tell_over(order, "busy")
        elif layout is None or layout.group_id != order.group_id or len(layout.stages) > 1:
            self._tell_over(order, f"stands in {layout}")
        else:
            self._leaving = _Leaving(order)

    def pump(self) -> None:
        """Take the next step if the request allows it: between two steps of the group."""
        leaving, scheduler = self._leaving, self._seat.scheduler
        if leaving is None or scheduler is None or scheduler.num_in_flight:
            return
        if leaving.phase == "choosing":
            self._choose(leaving)
        elif leaving.phase == "copied":
            self._go_on(leaving)

    def _choose(self, leaving: _Leaving) -> None:
        scheduler = self._seat.scheduler
        assert scheduler is not None
        chosen = choose_request(
            scheduler.migration.movable(),
            scheduler.migration.missing_blocks,
            leaving.order.max_blocks,
        )
        if chosen is None:
            self._leaving = None
            self._tell_over(leaving.order, "no request can move")
            return
        leaving.request_id = chosen
        self._go_on(leaving)

    def _go_on(self, leaving: _Leaving) -> None:
        """Offer what was written since the last offer, or stop the request for the rest."""
        seat, request_id = self._seat, leaving.request_id
        assert seat.scheduler is not None and request_id is not None
        tokens = seat.scheduler.migration.written_tokens(request_id)
        if tokens is None:
            self._stay("preempted")
            return
        block_size = seat.spec.block_size
        needed = -(-tokens // block_size)
        is_last = needed - leaving.copied_blocks <= MAX_LAST_BLOCKS
        is_last = is_last or leaving.num_offers >= MAX_OFFERS
        if leaving.num_offers and is_last and needed <= leaving.reserved_blocks:
            seat.scheduler.migration.pause(request_id)
            leaving.phase = "ready"
            self._export(leaving, needed)
            seat.send(None, MigrationReady(leaving.order.migration_id, seat.me, request_id))
            return
        leaving.phase = "copying"
        leaving.num_offers += 1
        leaving.reserved_blocks = needed + SPARE_BLOCKS
        self._export(leaving, tokens // block_size)
        self._offer(leaving, request_id)

    def _export(self, leaving: _Leaving, num_blocks: int) -> None:
        seat, request_id = self._seat, leaving.request_id
        assert request_id is not None
        leaving.offered_blocks = num_blocks
        row = seat.table.row_of(request_id)
        seat.mover.export_kv(request_id, seat.table.tables[row, :num_blocks].copy())
        seat.table.pin(request_id, 0, num_blocks)

    def _offer(self, leaving: _Leaving, request_id: RequestId) -> None:
        seat, order = self._seat, leaving.order
        assert seat.scheduler is not None
        seat.send(
            order.target,
            OfferKv(
                migration_id=order.migration_id,
                source=seat.me,
                group_id=order.target_group,
                request_id=request_id,
                num_blocks=leaving.offered_blocks,
                reserved_blocks=leaving.reserved_blocks,
                largest_blocks=seat.scheduler.migration.largest_blocks(request_id),
            ),
        )

    # What others say

    def hear(self, message: KvMoved | KvDropped | HandOff | EndMigration) -> None:
        """The target's or the controller's word; that of another migration is ignored."""
        leaving = self._leaving
        if leaving is None:
            return
        match message:
            case KvMoved(transition_id=migration_id):
                if migration_id == leaving.order.migration_id:
                    self._moved(leaving, message.end_block)
            case KvDropped(transition_id=migration_id):
                if migration_id == leaving.order.migration_id:
                    self._dropped(leaving)
            case HandOff(migration_id):
                if migration_id == leaving.order.migration_id:
                    self._hand_off(leaving)
            case EndMigration(migration_id):
                if migration_id == leaving.order.migration_id:
                    self.give_up("ended by the controller")

    def _moved(self, leaving: _Leaving, end_block: int) -> None:
        leaving.copied_blocks = end_block
        if leaving.phase == "copying":
            leaving.phase = "copied"
        elif end_block == leaving.offered_blocks:
            leaving.is_taken = True
            self._leave_if_taken(leaving)

    def _dropped(self, leaving: _Leaving) -> None:
        if leaving.phase in ("copying", "copied"):
            self._stay("the target gave it up", tell_target=False)
        else:
            # Whose the request is now, the controller says.
            leaving.is_taken = True
            self._leave_if_taken(leaving)

    def _hand_off(self, leaving: _Leaving) -> None:
        assert leaving.phase == "ready", leaving
        leaving.phase = "handed off"
        self._leave_if_taken(leaving)

    def _leave_if_taken(self, leaving: _Leaving) -> None:
        if leaving.phase == "handed off" and leaving.is_taken:
            self._free(leaving)
            self._tell_over(leaving.order, None)

    # Ends

    def _free(self, leaving: _Leaving) -> None:
        """The request is another's: what is left of it here goes, its KV with the next plan."""
        scheduler, request_id = self._seat.scheduler, leaving.request_id
        assert scheduler is not None and request_id is not None
        self._leaving = None
        self._withdraw(request_id)
        gone = scheduler.abort(request_id)
        assert gone, request_id

    def _withdraw(self, request_id: RequestId) -> None:
        seat = self._seat
        seat.mover.withdraw_kv(request_id)
        seat.table.unpin(request_id, 0, seat.table.num_blocks(request_id))

    def _stay(self, reason: str, *, tell_target: bool = True) -> None:
        """The request, if it lives, goes on here."""
        leaving, seat = self._leaving, self._seat
        assert leaving is not None and leaving.phase != "handed off", leaving
        self._leaving = None
        if leaving.request_id is not None:
            assert seat.scheduler is not None
            self._withdraw(leaving.request_id)
            if leaving.phase == "ready":
                seat.scheduler.resume(leaving.request_id)
            if tell_target:
                seat.send(leaving.order.target, WithdrawKv(leaving.order.migration_id))
        self._tell_over(leaving.order, reason)

    def give_up(self, reason: str) -> None:
        """Let the request stay; or if it is another's already, let its KV go."""
        leaving = self._leaving
        if leaving is None:
            return
        if leaving.phase == "handed off":
            self._free(leaving)
            self._tell_over(leaving.order, reason)
        else:
            self._stay(reason)

    def ends(self, request_id: RequestId, reason: str) -> None:
        """A request of this instance has ended or loses its KV."""
        if self._leaving is not None and self._leaving.request_id == request_id:
            self.give_up(reason)

    def make_room(self) -> None:
        """Pinned blocks are in a step's way: let them go if they may."""
        if self._leaving is not None and self._leaving.phase in ("copying", "copied"):
            self._stay("its blocks are in the way")

    def _tell_over(self, order: Migrate, refusal: str | None) -> None:
        self._seat.send(None, MigrationOver(order.migration_id, self._seat.me, refusal))
