"""One instance's part in a change of groups: prepare, commit, switch, exchange (section 5).

A drop and a restore are the same here: sequences are handed over, layers are kept or already
back, and every request's KV moves from where it lies by the old layout to where it belongs by
the new one.
"""

from kunserve.control.body import KvPiece, Remap
from kunserve.control.exchange import PIECES_IN_FLIGHT, Exchange, Move, choose_piece_blocks
from kunserve.control.lead import Lead
from kunserve.control.seat import Seat
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import (
    Commit,
    Committed,
    ExchangeProgress,
    Handover,
    KvMoved,
    Prepare,
    Prepared,
    Rollback,
    SequenceState,
)
from kunserve.policy.capacity import stage_units
from kunserve.policy.exchange import order_moves
from kunserve.policy.restore import assign_sequences


class Regroup:
    """The instance's transition: at most one at a time."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._pending: Prepare | None = None
        self._is_committing = False
        self._has_handed_over = False
        self._handovers: dict[GroupId, tuple[SequenceState, ...]] = {}
        self._exchange: Exchange | None = None
        self._lead: Lead | None = None
        self._last_progress: ExchangeProgress | None = None

    # Two phases

    def prepare(self, message: Prepare, is_reloading: bool) -> None:
        """Answer whether the transition can be done here. Changes nothing else."""
        refusal = self._refusal(message, is_reloading)
        if refusal is None:
            self._pending = message
            self._seat.specs.update((spec.instance_id, spec) for spec in message.specs)
        self._seat.send(None, Prepared(message.transition_id, self._seat.me, refusal))

    def _refusal(self, message: Prepare, is_reloading: bool) -> str | None:
        seat = self._seat
        if self._pending is not None or self._exchange is not None or self._lead is not None:
            return "another transition is under way"
        if is_reloading:
            return "layers are being loaded"
        if seat.layout not in message.old:
            return f"stands in {seat.layout}, not in one of the old groups"
        new = _layout_of(seat.me, message.new)
        layers = new.layers_of(seat.me) if new is not None else None
        if layers is None or not seat.held.covers(layers):
            return f"holds {seat.held}, which does not cover {layers}"
        piece = PIECES_IN_FLIGHT * choose_piece_blocks(message.specs) * layers.num_layers
        gained = stage_units(seat.spec, layers) - stage_units(seat.spec, seat.held)
        if layers != seat.held and gained < piece:
            return f"the drop would free {gained} KV units, too few to exchange KV in"
        return None

    def commit(self, message: Commit) -> None:
        """Stop at the next step boundary and change groups."""
        if self._pending is not None and self._pending.transition_id == message.transition_id:
            self._is_committing = True

    def rollback(self, message: Rollback) -> None:
        """Forget a prepared transition."""
        if self._pending is not None and self._pending.transition_id == message.transition_id:
            assert not self._is_committing, "a rollback after the commit"
            self._pending = None

    def handover(self, message: Handover) -> None:
        """An old leader's sequences; it has committed, so this instance may too."""
        if self._pending is None or self._pending.transition_id != message.transition_id:
            return
        self._is_committing = True
        self._handovers[message.old_group] = message.sequences

    @property
    def is_quiescing(self) -> bool:
        """Whether no further step of the present group may start here."""
        return self._is_committing

    def expects(self, group_id: GroupId) -> bool:
        """Whether this instance is about to enter the group."""
        return self._pending is not None and any(
            layout.group_id == group_id for layout in self._pending.new
        )

    def pump(self, now_s: float) -> None:
        """Take whatever step of the transition has become possible."""
        seat, pending = self._seat, self._pending
        if self._is_committing and pending is not None:
            scheduler = seat.scheduler
            if (
                not self._has_handed_over
                and scheduler is not None
                and not seat.is_running
                and scheduler.num_in_flight == 0
            ):
                self._hand_over(pending)
            if len(self._handovers) == len(pending.old) and not seat.is_running:
                self._switch(pending, now_s)
        self._tell_progress()

    def _hand_over(self, pending: Prepare) -> None:
        seat = self._seat
        assert seat.scheduler is not None and seat.layout is not None
        self._has_handed_over = True
        message = Handover(
            pending.transition_id, seat.layout.group_id, seat.scheduler.export()
        )
        self._handovers[seat.layout.group_id] = message.sequences
        for layout in pending.old:
            for member in layout.members:
                if member != seat.me:
                    seat.send(member, message)

    # The switch

    def _switch(self, pending: Prepare, now_s: float) -> None:
        seat = self._seat
        moves, states = self._plan_moves(pending)
        piece_blocks = choose_piece_blocks(pending.specs)
        alive = {move.request_id for move in moves}
        for request_id in seat.table.request_ids():
            if request_id not in alive:
                seat.table.release(request_id)
        for handed_over in self._handovers.values():
            for state in handed_over:
                seat.body.forget(state.request.request_id)
        new = _layout_of(seat.me, pending.new)
        assert new is not None and seat.layout is not None
        gap_s = now_s - seat.last_step_s
        remap = self._settle_memory(new)
        seat.enter(new, now_s)
        self._exchange = Exchange(
            pending.transition_id, seat.me, seat.table, seat.body, seat.mover, piece_blocks
        )
        if seat.scheduler is not None:
            self._lead = Lead(
                seat, pending.transition_id, piece_blocks, new, moves, states[new.group_id], now_s
            )
        self._exchange.begin(moves)
        seat.send(
            None,
            Committed(
                transition_id=pending.transition_id,
                instance_id=seat.me,
                held=seat.held,
                kv_units=remap.kv_units,
                freed_bytes=remap.moved_bytes,
                remap_s=remap.seconds,
                gap_s=gap_s + remap.seconds,
                sequences=tuple(state.request.request_id for state in states[new.group_id])
                if seat.leads
                else (),
            ),
        )
        self._pending = None
        self._is_committing = self._has_handed_over = False
        self._handovers = {}

    def _settle_memory(self, new: GroupLayout) -> Remap:
        """Keep what the new group needs; before blocks grow back to all layers, pack them."""
        seat = self._seat
        layers = new.layers_of(seat.me)
        assert layers is not None
        if not seat.layers.covers(layers):
            copies = seat.table.vacate(seat.table.used_units)
            if copies:
                seat.body.copy_units(copies)
        return seat.keep_only(layers)

    def _plan_moves(
        self, pending: Prepare
    ) -> tuple[list[Move], dict[GroupId, list[SequenceState]]]:
        """Every sequence with KV as a move, and every sequence by its new group.

        All instances of the transition compute the same from the same handovers.
        """
        found = [
            (state, layout)
            for layout in pending.old
            for state in self._handovers[layout.group_id]
        ]
        placed = self._assign(pending, [state for state, _ in found])
        by_id = {layout.group_id: layout for layout in pending.new}
        moves: list[Move] = []
        states: dict[GroupId, list[SequenceState]] = {group_id: [] for group_id in by_id}
        for state, layout in found:
            new = by_id[placed[state.request.request_id]]
            states[new.group_id].append(state)
            if state.num_blocks:
                moves.append(Move(state.request.request_id, state.num_blocks, layout, new))
        return order_moves(moves), states

    def _assign(
        self, pending: Prepare, states: list[SequenceState]
    ) -> dict[RequestId, GroupId]:
        """The new group of every sequence, waiting ones included."""
        if len(pending.new) == 1:
            return {s.request.request_id: pending.new[0].group_id for s in states}
        raise NotImplementedError

    # The exchange

    def pulled(self, piece: KvPiece, ok: bool) -> None:
        """The mover filled a piece, or its source had withdrawn it."""
        exchange = self._exchange
        if exchange is not None and exchange.transition_id == piece.transition_id:
            exchange.pulled(piece, ok)

    def kv_moved(self, message: KvMoved) -> None:
        """A piece that this instance gave has arrived."""
        exchange = self._exchange
        if exchange is not None and exchange.transition_id == message.transition_id:
            exchange.moved(message)

    def progress(self, message: ExchangeProgress, now_s: float) -> None:
        """On the leader: a member's account."""
        if self._lead is not None and self._lead.on_progress(message, now_s):
            self._lead = None

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks, also in the middle of an exchange."""
        if self._exchange is not None:
            self._exchange.release(request_id)
        else:
            self._seat.table.release(request_id)

    def abort(self, request_id: RequestId) -> bool:
        """Whether the request's only trace here was KV that leaves (now freed)."""
        if self._lead is not None:
            self._lead.on_abort(request_id)
        if self._exchange is None or not self._exchange.is_leaving(request_id):
            return False
        self._exchange.release(request_id)
        return True

    def _tell_progress(self) -> None:
        exchange, seat = self._exchange, self._seat
        if exchange is None or seat.layout is None:
            return
        exchange.advance()
        for src, message in exchange.drain_acks():
            seat.send(src, message)
        progress = exchange.progress()
        if progress != self._last_progress:
            self._last_progress = progress
            seat.send(seat.layout.leader, progress)
        if progress.is_finished:
            self._exchange = None
            self._last_progress = None


def _layout_of(me: InstanceId, layouts: tuple[GroupLayout, ...]) -> GroupLayout | None:
    for layout in layouts:
        if me in layout.members:
            return layout
    return None
