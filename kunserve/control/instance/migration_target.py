"""A running request comes to an instance: memory is set aside, its KV pulled (live migration).

The request is this instance's once the controller submits it here. It runs as soon as its last
blocks have arrived; if they cannot be had it is computed again from its tokens.
"""

from dataclasses import dataclass, field

from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import RequestId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import KvDropped, KvMoved, OfferKv, SequenceState, Submit
from kunserve.core.request import Request
from kunserve.core.transfer import KvPull
from kunserve.policy.exchange import cut_pieces
from kunserve.policy.moves import choose_piece_blocks


@dataclass(slots=True)
class _Coming:
    offer: OfferKv
    request: Request | None = None
    """Once it is this instance's."""
    wanted_blocks: int = 0
    """To have, as far as is known; ``asked_blocks`` of them are here or on their way."""
    asked_blocks: int = 0
    told_blocks: int | None = None
    """What the source was last told of."""
    in_flight: set[int] = field(default_factory=set)
    """First blocks of pieces on their way."""

    @property
    def request_id(self) -> RequestId:
        return self.offer.request_id


class MigrationTarget:
    """At most one at a time."""

    def __init__(self, seat: InstanceState) -> None:
        self._seat = seat
        self._coming: _Coming | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is on its way here."""
        return self._coming is not None

    def offer(self, offer: OfferKv, is_busy: bool) -> None:
        """The source's next blocks; ``is_busy`` with a transition."""
        coming, scheduler = self._coming, self._seat.scheduler
        if coming is None and not is_busy and self._may_come(offer):
            coming = self._coming = _Coming(offer)
        elif coming is None or coming.offer.migration_id != offer.migration_id:
            self._refuse(offer)
            return
        assert scheduler is not None
        if not scheduler.migration.reserve(offer.request_id, offer.reserved_blocks):
            self._fail(coming)
            return
        coming.offer = offer
        coming.wanted_blocks = offer.num_blocks

    def _may_come(self, offer: OfferKv) -> bool:
        seat = self._seat
        layout, scheduler = seat.layout, seat.scheduler
        return (
            layout is not None
            and scheduler is not None
            and layout.group_id == offer.group_id
            and len(layout.stages) == 1
            and offer.largest_blocks <= seat.capacity_blocks()
            and not scheduler.migration.knows(offer.request_id)
            and seat.table.num_blocks(offer.request_id) == 0
        )

    def _refuse(self, offer: OfferKv) -> None:
        self._seat.send(offer.source, KvDropped(offer.migration_id, offer.request_id))

    def submit(self, message: Submit) -> bool:
        """The request is this instance's now; False if nothing of it has come."""
        coming = self._coming
        if coming is None or coming.request_id != message.request.request_id:
            return False
        if coming.offer.migration_id != message.migration_id:
            self._fail(coming)
            return False
        request = coming.request = message.request
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        coming.wanted_blocks = -(-(num_tokens - 1) // self._seat.spec.block_size)
        assert coming.wanted_blocks <= coming.offer.reserved_blocks, (coming, num_tokens)
        return True

    # Taking

    def pump(self) -> None:
        """Ask for what is wanted, and tell of what is here."""
        coming = self._coming
        if coming is None:
            return
        if coming.asked_blocks < coming.wanted_blocks and not self._ask(coming):
            return
        if coming.in_flight or coming.asked_blocks < coming.wanted_blocks:
            return
        if coming.request is not None:
            self._finish(coming, coming.request)
        elif coming.told_blocks != coming.wanted_blocks:
            self._tell(coming)

    def _ask(self, coming: _Coming) -> bool:
        """Take units for the blocks wanted and pull them; False if that must wait."""
        seat, request_id = self._seat, coming.request_id
        first, end = coming.asked_blocks, coming.wanted_blocks
        copies = seat.table.grow(request_id, end, may_compact=not seat.is_running)
        if copies is None:
            if not seat.is_running:
                self._fail(coming)
            return False
        if copies:
            seat.body.copy_units(copies)
        seat.table.pin(request_id, first, end)
        coming.asked_blocks = end
        row = seat.table.row_of(request_id)
        entries = seat.table.tables[row]
        layers = LayerRange(0, seat.spec.num_layers)
        for begin, stop in cut_pieces(end - first, choose_piece_blocks([seat.spec])):
            coming.in_flight.add(first + begin)
            offer = coming.offer
            piece = KvPull(
                offer.migration_id, request_id, offer.source, layers, first + begin, first + stop
            )
            seat.mover.pull_kv(piece, entries[piece.first_block : piece.end_block].copy())
        return True

    def pulled(self, piece: KvPull, ok: bool) -> None:
        """A piece landed, or its source could not give it."""
        coming = self._coming
        if coming is None or coming.offer.migration_id != piece.transition_id:
            return
        if piece.first_block not in coming.in_flight:
            return
        coming.in_flight.discard(piece.first_block)
        if not ok:
            self._fail(coming)
            return
        self._seat.table.unpin(coming.request_id, piece.first_block, piece.end_block)

    def _tell(self, coming: _Coming) -> None:
        message = KvMoved(coming.offer.migration_id, coming.request_id, 0, coming.wanted_blocks)
        coming.told_blocks = coming.wanted_blocks
        self._seat.send(coming.offer.source, message)

    def _finish(self, coming: _Coming, request: Request) -> None:
        """All KV is here: the request runs."""
        scheduler = self._seat.scheduler
        assert scheduler is not None
        self._coming = None
        scheduler.migration.unreserve(coming.request_id)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        state = SequenceState(
            request, request.output_token_ids, num_tokens - 1, coming.wanted_blocks, 0
        )
        scheduler.adopt((state,))
        self._tell(coming)

    # Ends

    def ended(self, migration_id: TransitionId) -> None:
        """The source or the controller ends it: nothing more comes."""
        if self._coming is not None and self._coming.offer.migration_id == migration_id:
            self._fail(self._coming)

    def abort(self, request_id: RequestId) -> bool:
        """The client is gone; False if the request is not on its way here."""
        coming = self._coming
        if coming is None or coming.request_id != request_id or coming.request is None:
            return False
        self._drop(coming)
        return True

    def _fail(self, coming: _Coming) -> None:
        """Free what has come. If the request is this instance's already it is computed again."""
        seat = self._seat
        self._drop(coming)
        if coming.request is not None:
            assert seat.scheduler is not None
            request = coming.request
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            seat.note_preemption(coming.request_id, num_tokens - 1)
            seat.scheduler.add(request)

    def _drop(self, coming: _Coming) -> None:
        seat, request_id = self._seat, coming.request_id
        assert seat.scheduler is not None
        self._coming = None
        if coming.in_flight:
            seat.mover.cancel(request_id)
        seat.table.unpin(request_id, 0, seat.table.num_blocks(request_id))
        seat.table.release(request_id)
        seat.scheduler.migration.unreserve(request_id)
        self._refuse(coming.offer)
