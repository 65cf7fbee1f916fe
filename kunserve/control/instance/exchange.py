"""One instance's part in an exchange: which KV it gives, which it takes, and when (section 4.2).

Receiver-driven: a member takes blocks for a piece only when it has room, then pulls it; the
source frees the piece on ``KvMoved``. Pieces are taken in the common order of ``policy.moves``,
and never beyond the room that was promised to the leader as the exchange's share: so what the
leader counts as free stays free, however late it learns of a piece.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kunserve.control.instance.block_table import BlockTable
from kunserve.control.instance.body import Body, Mover
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import ExchangeProgress, KvMoved
from kunserve.core.transfer import KvPull
from kunserve.policy.exchange import ExchangeShare, plan_exchange
from kunserve.policy.moves import Move, Piece

MAX_PIECES_IN_FLIGHT = 128
"""Pieces asked of the mover at once. Room is what bounds them; the mover bounds the wire."""
LEAD_SHARE = 0.5
"""Share of the KV memory nobody uses yet that taking may run ahead of giving by."""
PATIENCE_S = 0.5
"""How long a piece may wait for units that are free but scattered between blocks in transfer."""


class _Step(NamedTuple):
    """A piece that this instance takes or gives, in the common order."""

    request_id: RequestId
    first: int
    end: int
    given_units: int
    taken_units: int


@dataclass(slots=True)
class _Giving:
    """A request that others pull from here."""

    keep: LayerRange
    num_given_layers: int
    num_takers: int
    is_leaving: bool
    """The request's new group has no member here."""
    unmoved_blocks: int
    acks: dict[int, int] = field(default_factory=dict)
    """Takers that have a piece, by the piece's first block."""


@dataclass(slots=True)
class _Taking:
    """A request that is pulled to here."""

    receives: tuple[tuple[InstanceId, LayerRange], ...]
    has_part: bool
    """Some of the layers are here already, so blocks are laid out anew instead of added."""
    num_layers: int
    """Layers pulled."""
    unplaced_blocks: int
    missing_blocks: int
    in_flight: dict[int, int] = field(default_factory=dict)
    """Sources still missing, by the first block of a piece under way."""


class Exchange:
    """Gives and takes of one instance. Memory calls go to the table, bytes to the mover."""

    def __init__(
        self,
        transition_id: TransitionId,
        me: InstanceId,
        table: BlockTable,
        body: Body,
        mover: Mover,
        spare_units: int,
    ) -> None:
        """``spare_units``: room beside before and after (``policy.moves.float_units``)."""
        self.transition_id = transition_id
        self.num_in_flight = 0
        self._me = me
        self._table = table
        self._body = body
        self._mover = mover
        self._spare_units = spare_units
        self._giving: dict[RequestId, _Giving] = {}
        self._taking: dict[RequestId, _Taking] = {}
        self._steps: deque[_Step] = deque()
        self._open: set[InstanceId] = set()
        """Sources that have switched too, so that their KV may be pulled."""
        self._held_units = 0
        """Of blocks given and not yet taken by all."""
        self._owed_units = 0
        """That the group's own blocks have yet to take."""
        self._decline = 0
        """How much less the exchange uses after all remaining steps."""
        self._lead_units = 0
        """How far taking may run ahead of giving beside ``spare_units``."""
        self._promise: int | None = None
        self._blocked_s: float | None = None
        self._arrived: list[RequestId] = []
        self._lost: list[RequestId] = []
        self._moved_bytes = 0
        self._acks: list[tuple[InstanceId, KvMoved]] = []

    def begin(self, moves: Iterable[Move], pieces: Iterable[Piece]) -> None:
        """Work out this instance's share. Pulling starts with ``advance``."""
        shares: dict[RequestId, ExchangeShare] = {}
        for move in moves:
            share = shares[move.request_id] = plan_exchange(move.old, move.new, self._me)
            assert not (share.sends and share.receives), move
            if share.sends:
                self._give(move, share)
            if share.receives:
                num_layers = sum(layers.num_layers for _, layers in share.receives)
                self._taking[move.request_id] = _Taking(
                    receives=share.receives,
                    has_part=share.keep.num_layers > 0,
                    num_layers=num_layers,
                    unplaced_blocks=move.num_blocks,
                    missing_blocks=move.num_blocks,
                )
                self._owed_units += move.num_blocks * num_layers
        for move, first, end in pieces:
            share = shares[move.request_id]
            given = sum(layers.num_layers for _, layers in share.sends) * (end - first)
            taken = sum(layers.num_layers for _, layers in share.receives) * (end - first)
            if given or taken:
                self._steps.append(_Step(move.request_id, first, end, given, taken))
                self._decline += given - taken
        self._lead_units = self._choose_lead()
        self._renew_promise()

    def _choose_lead(self) -> int:
        """Units lent to the exchange so that it need not wait for a peer after every few pieces.

        A peer acknowledges between two layers or two steps, while its bytes take milliseconds.
        The leader has the other half for new requests at once, and all of it soon after.
        """
        own = self._owed_units - self._held_units
        promised = max(0, -own, self._decline) + self._spare_units
        return max(0, int(LEAD_SHARE * (self._table.free_units - own - promised)))

    def _give(self, move: Move, share: ExchangeShare) -> None:
        row = self._table.row_of(move.request_id)
        self._mover.export_kv(move.request_id, self._table.tables[row, : move.num_blocks].copy())
        self._table.pin(move.request_id, 0, move.num_blocks)
        num_layers = sum(layers.num_layers for _, layers in share.sends)
        self._giving[move.request_id] = _Giving(
            keep=share.keep,
            num_given_layers=num_layers,
            num_takers=len(share.sends),
            is_leaving=move.new.layers_of(self._me) is None,
            unmoved_blocks=move.num_blocks,
        )
        self._held_units += move.num_blocks * num_layers

    def open(self, source: InstanceId) -> None:
        """The instance stands in its new group: what it gives may be pulled."""
        self._open.add(source)

    # Taking

    def advance(self, now_s: float, is_running: bool = False) -> None:
        """Start the next pulls that memory and the limit in flight admit.

        While a step runs nothing is moved that it might use: only requests that stall anyway.
        """
        while self._steps:
            step = self._steps[0]
            if step.taken_units == 0:
                self._pass_step()
                continue
            taking = self._taking[step.request_id]
            if self.num_in_flight >= MAX_PIECES_IN_FLIGHT or not self._has_room(step):
                break
            if any(src not in self._open for src, _ in taking.receives):
                break
            if not self._place(step, taking, may_compact=not is_running):
                if not is_running:
                    self._wait_for_units(step.request_id, now_s)
                break
            self._blocked_s = None
            self._pass_step()
            self._pull(step, taking)
        self._renew_promise()

    def _pass_step(self) -> None:
        step = self._steps.popleft()
        self._decline -= step.given_units - step.taken_units

    def _has_room(self, step: _Step) -> bool:
        assert self._promise is not None
        return self._held_units - self._owed_units + step.taken_units <= self._promise

    def _place(self, step: _Step, taking: _Taking, *, may_compact: bool) -> bool:
        if taking.has_part:
            copies = self._table.relayout(
                step.request_id, step.first, step.end, may_compact=may_compact
            )
        else:
            copies = self._table.grow(step.request_id, step.end, may_compact=may_compact)
        if copies is None:
            return False
        if copies:
            self._body.copy_units(copies)
        self._table.pin(step.request_id, step.first, step.end)
        taking.unplaced_blocks -= step.end - step.first
        self._owed_units -= step.taken_units
        return True

    def _wait_for_units(self, request_id: RequestId, now_s: float) -> None:
        """Enough units are free, but no run of them: give the request up if it stays so."""
        if self.num_in_flight:
            return
        if self._blocked_s is None:
            self._blocked_s = now_s
        elif now_s - self._blocked_s >= PATIENCE_S:
            self._lose(request_id)

    def _pull(self, step: _Step, taking: _Taking) -> None:
        row = self._table.row_of(step.request_id)
        entries = self._table.tables[row, step.first : step.end].copy()
        taking.in_flight[step.first] = len(taking.receives)
        self.num_in_flight += 1
        for src, layers in taking.receives:
            piece = KvPull(self.transition_id, step.request_id, src, layers, step.first, step.end)
            self._mover.pull_kv(piece, entries)

    def pulled(self, piece: KvPull, ok: bool) -> None:
        """A piece landed, or its source could not give it."""
        taking = self._taking.get(piece.request_id)
        if taking is None or piece.first_block not in taking.in_flight:
            return
        num_blocks = piece.end_block - piece.first_block
        if not ok:
            self._lose(piece.request_id)
            return
        self._blocked_s = None
        self._moved_bytes += num_blocks * piece.layers.num_layers * self._body.spec.unit_bytes
        message = KvMoved(self.transition_id, piece.request_id, piece.first_block, piece.end_block)
        self._acks.append((piece.src, message))
        taking.in_flight[piece.first_block] -= 1
        if taking.in_flight[piece.first_block]:
            return
        del taking.in_flight[piece.first_block]
        self.num_in_flight -= 1
        self._table.unpin(piece.request_id, piece.first_block, piece.end_block)
        taking.missing_blocks -= num_blocks
        if taking.missing_blocks == 0:
            del self._taking[piece.request_id]
            self._arrived.append(piece.request_id)

    # Giving

    def moved(self, message: KvMoved) -> None:
        """A taker has a piece; once every taker has it, its given layers are free."""
        giving = self._giving.get(message.request_id)
        if giving is None:
            return
        first, end = message.first_block, message.end_block
        giving.acks[first] = giving.acks.get(first, 0) + 1
        if giving.acks[first] < giving.num_takers:
            return
        self._table.unpin(message.request_id, first, end)
        self._table.release_layers(message.request_id, first, end, giving.keep)
        self._held_units -= (end - first) * giving.num_given_layers
        giving.unmoved_blocks -= end - first
        if giving.unmoved_blocks == 0:
            self._stop_giving(message.request_id)
        self._blocked_s = None

    def _stop_giving(self, request_id: RequestId) -> None:
        giving = self._giving.pop(request_id)
        self._held_units -= giving.unmoved_blocks * giving.num_given_layers
        self._mover.withdraw_kv(request_id)
        self._table.unpin(request_id, 0, self._table.num_blocks(request_id))
        if giving.is_leaving:
            self._table.release(request_id)

    # Ends in the middle

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks here, whatever is being done with them."""
        if request_id in self._giving:
            self._stop_giving(request_id)
        taking = self._taking.pop(request_id, None)
        if taking is not None:
            self._stop_taking(request_id, taking)
        self._table.release(request_id)
        self._blocked_s = None
        kept = [step for step in self._steps if step.request_id != request_id]
        if len(kept) < len(self._steps):
            self._steps = deque(kept)
            self._decline = sum(step.given_units - step.taken_units for step in kept)

    def _stop_taking(self, request_id: RequestId, taking: _Taking) -> None:
        if taking.in_flight:
            self._mover.cancel(request_id)
            self.num_in_flight -= len(taking.in_flight)
        self._table.unpin(request_id, 0, self._table.num_blocks(request_id))
        unplaced = taking.unplaced_blocks * taking.num_layers
        self._owed_units -= unplaced
        assert self._promise is not None
        # The leader sets the blocks of a request that ends here aside until the exchange is over.
        self._promise += unplaced

    def _lose(self, request_id: RequestId) -> None:
        """The KV cannot be had: the leader will have the request recomputed."""
        self._lost.append(request_id)
        self.release(request_id)

    def dropped(self, request_id: RequestId) -> None:
        """The request ended in a group without this instance: nobody will pull it any more."""
        giving = self._giving.get(request_id)
        if giving is not None and giving.is_leaving:
            self.release(request_id)

    # Accounts

    @property
    def is_finished(self) -> bool:
        """Nothing left to give or to take."""
        return not self._giving and not self._taking

    def _renew_promise(self) -> None:
        """Lower the promised share to what the rest of the exchange may need; never raise it."""
        wanted = max(0, self._held_units - self._owed_units)
        if self._owed_units:
            ahead = min(self._lead_units, self._owed_units)
            wanted = max(wanted, self._decline) + self._spare_units + ahead
        self._promise = wanted if self._promise is None else min(self._promise, wanted)

    def drain_acks(self) -> list[tuple[InstanceId, KvMoved]]:
        """Messages to the sources of what has landed."""
        acks, self._acks = self._acks, []
        return acks

    def progress(self) -> ExchangeProgress:
        """What to tell the leader now; takes what happened since the last call."""
        self._renew_promise()
        assert self._promise is not None
        message = ExchangeProgress(
            transition_id=self.transition_id,
            instance_id=self._me,
            extra_units=0 if self.is_finished else self._promise,
            arrived=tuple(self._arrived),
            moved_bytes=self._moved_bytes,
            is_finished=self.is_finished,
            lost=tuple(self._lost),
        )
        self._arrived, self._lost = [], []
        self._moved_bytes = 0
        return message

    def check(self) -> None:
        """Assert that the accounts agree with the gives and takes."""
        held = sum(g.unmoved_blocks * g.num_given_layers for g in self._giving.values())
        owed = sum(t.unplaced_blocks * t.num_layers for t in self._taking.values())
        decline = sum(step.given_units - step.taken_units for step in self._steps)
        flying = sum(len(taking.in_flight) for taking in self._taking.values())
        assert held == self._held_units, (held, self._held_units)
        assert owed == self._owed_units, (owed, self._owed_units)
        assert decline == self._decline, (decline, self._decline)
        assert flying == self.num_in_flight, (flying, self.num_in_flight)
        assert self._promise is not None and held - owed <= self._promise, self._promise
