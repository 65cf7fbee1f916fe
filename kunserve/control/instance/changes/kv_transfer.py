"""One request's KV on its way between instances: the giving end and the taking end.

Exchanges and migrations are made of these. The taking end pulls: it asks only for what it has
room for, and the blocks stay where they are on both ends while bytes move (paper 4.2).
"""

from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import KvPull


class KvExport:
    """A request's KV that others may pull from here."""

    def __init__(self, state: InstanceState, request_id: RequestId) -> None:
        self._state = state
        self._request_id = request_id
        self._first_block = 0

    def offer(self, num_blocks: int, first_block: int = 0) -> None:
        """Blocks [first_block, num_blocks) may be pulled from now on."""
        state, request_id = self._state, self._request_id
        row = state.table.row_of(request_id)
        state.mover.export_kv(request_id, state.table.tables[row, :num_blocks].copy())
        state.table.pin(request_id, first_block, num_blocks)
        self._first_block = first_block

    def close(self) -> None:
        """Nothing may be pulled any more."""
        state, request_id = self._state, self._request_id
        state.mover.withdraw_kv(request_id)
        end_block = state.table.num_blocks(request_id)
        state.table.unpin(request_id, self._first_block, end_block)


class KvImport:
    """A request's KV that is pulled to here, piece by piece."""

    def __init__(
        self,
        state: InstanceState,
        transfer_id: TransitionId,
        request_id: RequestId,
        sources: tuple[tuple[InstanceId, LayerRange], ...],
        *,
        has_part: bool,
        first_block: int = 0,
    ) -> None:
        """``has_part``: other layers of the blocks are here already.

        Blocks before ``first_block`` do not come: the request shares them, or they are not there.
        """
        self._first_block = first_block
        self.sources = sources
        self._state = state
        self._transfer_id = transfer_id
        self._request_id = request_id
        self._has_part = has_part
        self._in_flight: dict[int, int] = {}
        """Sources still missing, by the first block of a piece under way."""

    @property
    def num_in_flight(self) -> int:
        """Pieces under way."""
        return len(self._in_flight)

    def place(self, first_block: int, end_block: int, *, may_compact: bool) -> bool:
        """Take units for blocks [first_block, end_block); False when there is no run of them.

        Without ``may_compact`` no other block is moved, so that a step may run meanwhile.
        """
        state, request_id = self._state, self._request_id
        if self._has_part:
            copies = state.table.relayout(
                request_id, first_block, end_block, may_compact=may_compact
            )
        else:
            if self._first_block:
                state.table.begin_at(request_id, self._first_block)
            copies = state.table.grow(request_id, end_block, may_compact=may_compact)
        if copies is None:
            return False
        state.copy_units(copies)
        state.table.pin(request_id, first_block, end_block)
        return True

    def pull(self, first_block: int, end_block: int) -> None:
        """Ask every source for its layers of these blocks, which have been placed."""
        state, request_id = self._state, self._request_id
        row = state.table.row_of(request_id)
        entries = state.table.tables[row, first_block:end_block].copy()
        self._in_flight[first_block] = len(self.sources)
        for src, layers in self.sources:
            piece = KvPull(self._transfer_id, request_id, src, layers, first_block, end_block)
            state.mover.pull_kv(piece, entries)

    def awaits(self, piece: KvPull) -> bool:
        """Whether this is a piece under way."""
        return piece.transition_id == self._transfer_id and piece.first_block in self._in_flight

    def accept(self, piece: KvPull) -> bool:
        """One source's layers of a piece are here. True when those of all sources are."""
        self._in_flight[piece.first_block] -= 1
        if self._in_flight[piece.first_block]:
            return False
        del self._in_flight[piece.first_block]
        self._state.table.unpin(self._request_id, piece.first_block, piece.end_block)
        return True

    def cancel(self) -> None:
        """Nothing is written for the request any more."""
        state, request_id = self._state, self._request_id
        if self._in_flight:
            state.mover.cancel(request_id)
            self._in_flight.clear()
        end_block = state.table.num_blocks(request_id)
        state.table.unpin(request_id, self._first_block, end_block)
