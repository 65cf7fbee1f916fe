"""One instance's part in an exchange: which KV it gives, which it takes, and when (section 4.2).

Receiver-driven: a member takes blocks for a piece only when it has free units, then pulls
it; the source frees the piece on ``KvMoved``. Both sides so stay within their memory, and each
request resumes as soon as its own KV is complete.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kunserve.control.block_table import BlockTable
from kunserve.control.body import Body, KvPiece, Mover
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.messages import ExchangeProgress, KvMoved
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.exchange import cut_pieces, plan_exchange

PIECES_IN_FLIGHT = 2
"""Pieces that one instance pulls at once."""


MAX_PIECE_BLOCKS = 16
"""Blocks that one pull moves at most."""


def choose_piece_blocks(specs: Iterable[InstanceSpec]) -> int:
    """Blocks per pull, small beside the smallest pool, and the same on every instance."""
    smallest = min(spec.kv_units // spec.num_layers for spec in specs)
    return max(1, min(MAX_PIECE_BLOCKS, smallest // 16))


class Move(NamedTuple):
    """One request whose KV lies by ``old`` and shall lie by ``new``."""

    request_id: RequestId
    num_blocks: int
    old: GroupLayout
    new: GroupLayout


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
    pieces_left: int
    unplaced_blocks: int
    in_flight: dict[int, int] = field(default_factory=dict)
    """Sources still missing, by the first block of a piece under way."""
    is_dead: bool = False
    """Released while pieces were under way; its blocks are freed when the last one lands."""


class Exchange:
    """Gives and takes of one instance. Memory calls go to the table, bytes to the mover."""

    def __init__(
        self,
        transition_id: TransitionId,
        me: InstanceId,
        table: BlockTable,
        body: Body,
        mover: Mover,
        piece_blocks: int,
    ) -> None:
        self.transition_id = transition_id
        self._me = me
        self._table = table
        self._body = body
        self._mover = mover
        self._piece_blocks = piece_blocks
        self._giving: dict[RequestId, _Giving] = {}
        self._taking: dict[RequestId, _Taking] = {}
        self._queue: deque[tuple[RequestId, int, int]] = deque()
        self._num_in_flight = 0
        self._arrived: list[RequestId] = []
        self._moved_bytes = 0
        self._acks: list[tuple[InstanceId, KvMoved]] = []

    def begin(self, moves: Iterable[Move]) -> None:
        """Work out this instance's share of each move, in the order given, and start."""
        for move in moves:
            share = plan_exchange(move.old, move.new, self._me)
            if share.sends:
                self._give(move, share.keep, share.sends)
            if share.receives:
                self._take(move, share.keep, share.receives)
        self.advance()

    def _give(
        self,
        move: Move,
        keep: LayerRange,
        sends: tuple[tuple[InstanceId, LayerRange], ...],
    ) -> None:
        row = self._table.row_of(move.request_id)
        self._mover.export_kv(
            move.request_id, self._table.tables[row, : move.num_blocks].copy()
        )
        self._table.pin(move.request_id)
        self._giving[move.request_id] = _Giving(
            keep=keep,
            num_given_layers=sum(layers.num_layers for _, layers in sends),
            num_takers=len(sends),
            is_leaving=move.new.layers_of(self._me) is None,
            unmoved_blocks=move.num_blocks,
        )

    def _take(
        self,
        move: Move,
        keep: LayerRange,
        receives: tuple[tuple[InstanceId, LayerRange], ...],
    ) -> None:
        pieces = cut_pieces(move.num_blocks, self._piece_blocks)
        self._queue.extend((move.request_id, first, end) for first, end in pieces)
        self._taking[move.request_id] = _Taking(
            receives=receives,
            has_part=keep.num_layers > 0,
            num_layers=sum(layers.num_layers for _, layers in receives),
            pieces_left=len(pieces),
            unplaced_blocks=move.num_blocks,
        )

    # Progress

    def advance(self) -> None:
        """Start the next pulls that memory and the limit in flight admit."""
        while self._queue and self._num_in_flight < PIECES_IN_FLIGHT:
            request_id, first, end = self._queue[0]
            taking = self._taking[request_id]
            if not self._place(request_id, taking, first, end):
                return
            self._queue.popleft()
            row = self._table.row_of(request_id)
            entries = self._table.tables[row, first:end].copy()
            taking.in_flight[first] = len(taking.receives)
            self._num_in_flight += 1
            for src, layers in taking.receives:
                self._mover.pull_kv(
                    KvPiece(self.transition_id, request_id, src, layers, first, end), entries
                )

    def _place(self, request_id: RequestId, taking: _Taking, first: int, end: int) -> bool:
        if taking.has_part:
            copies = self._table.relayout(request_id, first, end)
        else:
            copies = self._table.grow(request_id, end)
        if copies is None:
            return False
        if copies:
            self._body.copy_units(copies)
        if first == 0:
            self._table.pin(request_id)
        taking.unplaced_blocks -= end - first
        return True

    def pulled(self, piece: KvPiece, ok: bool) -> None:
        """A piece landed, or its source no longer has the request (then it is dead here too)."""
        taking = self._taking.get(piece.request_id)
        if taking is None or piece.first_block not in taking.in_flight:
            return
        taking.in_flight[piece.first_block] -= 1
        if ok:
            self._moved_bytes += (
                (piece.end_block - piece.first_block)
                * piece.layers.num_layers
                * self._body.spec.unit_bytes
            )
            self._acks.append(
                (
                    piece.src,
                    KvMoved(
                        self.transition_id, piece.request_id, piece.first_block, piece.end_block
                    ),
                )
            )
        else:
            self._kill(piece.request_id, taking)
        if taking.in_flight[piece.first_block] == 0:
            self._land(piece.request_id, taking, piece.first_block)
        self.advance()

    def _land(self, request_id: RequestId, taking: _Taking, first_block: int) -> None:
        del taking.in_flight[first_block]
        self._num_in_flight -= 1
        taking.pieces_left -= 1
        if taking.is_dead:
            if not taking.in_flight:
                self._bury(request_id)
        elif taking.pieces_left == 0:
            del self._taking[request_id]
            self._table.unpin(request_id)
            self._arrived.append(request_id)

    def moved(self, message: KvMoved) -> None:
        """A taker has a piece; once every taker has it, its given layers are free."""
        giving = self._giving.get(message.request_id)
        if giving is None:
            return
        first, end = message.first_block, message.end_block
        giving.acks[first] = giving.acks.get(first, 0) + 1
        if giving.acks[first] < giving.num_takers:
            return
        self._table.release_layers(message.request_id, first, end, giving.keep)
        giving.unmoved_blocks -= end - first
        if giving.unmoved_blocks == 0:
            self._stop_giving(message.request_id)
        self.advance()

    def _stop_giving(self, request_id: RequestId) -> None:
        giving = self._giving.pop(request_id)
        self._mover.withdraw_kv(request_id)
        self._table.unpin(request_id)
        if giving.is_leaving:
            self._table.release(request_id)

    # Ends in the middle

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks here, now or as soon as no pull writes into them."""
        if request_id in self._giving:
            self._giving[request_id].is_leaving = True
            self._stop_giving(request_id)
        taking = self._taking.get(request_id)
        if taking is not None:
            self._kill(request_id, taking)
            if not taking.in_flight:
                self._bury(request_id)
        else:
            self._table.release(request_id)
        self.advance()

    def _kill(self, request_id: RequestId, taking: _Taking) -> None:
        taking.is_dead = True
        self._queue = deque(item for item in self._queue if item[0] != request_id)

    def _bury(self, request_id: RequestId) -> None:
        del self._taking[request_id]
        self._table.unpin(request_id)
        self._table.release(request_id)

    # Accounts

    def is_leaving(self, request_id: RequestId) -> bool:
        """Whether the request's KV is only here until others have pulled it."""
        giving = self._giving.get(request_id)
        return giving is not None and giving.is_leaving

    @property
    def is_finished(self) -> bool:
        """Nothing left to give or to take."""
        return not self._giving and not self._taking

    def extra_units(self) -> int:
        """Units held for others, less units that this member's own blocks have yet to take."""
        held = sum(g.unmoved_blocks * g.num_given_layers for g in self._giving.values())
        owed = sum(t.unplaced_blocks * t.num_layers for t in self._taking.values())
        return held - owed

    def drain_acks(self) -> list[tuple[InstanceId, KvMoved]]:
        """Messages to the sources of what has landed."""
        acks, self._acks = self._acks, []
        return acks

    def progress(self) -> ExchangeProgress:
        """What to tell the leader now; takes the arrivals since the last call."""
        message = ExchangeProgress(
            transition_id=self.transition_id,
            instance_id=self._me,
            extra_units=self.extra_units(),
            arrived=tuple(self._arrived),
            moved_bytes=self._moved_bytes,
            is_finished=self.is_finished,
        )
        self._arrived = []
        self._moved_bytes = 0
        return message
