"""Which KV units hold each request's blocks on one instance: the memory that a drop adds to.

Entry ``e`` of a block means that layer ``l`` of it is unit ``e + l``. A block holds a contiguous
range of layers, usually exactly those that the instance computes; while layers are exchanged it
may hold more (not sent yet), fewer (not received yet) or none.

Blocks of the prefix cache belong to prefixes, which have rows as requests have. A request that
shares them has their entries at the same places of its row, and no units there.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from kunserve.control.arrays import Int32Array
from kunserve.control.instance.body import UnitCopy
from kunserve.control.instance.compaction import RUN, Packing, RunArray, plan_vacate
from kunserve.control.instance.free_units import FreeUnits, Span
from kunserve.control.instance.shared_blocks import Loan, SharedBlocks
from kunserve.core.ids import PrefixId, RequestId
from kunserve.core.layout import LayerRange

NOTHING = LayerRange(0, 0)

SPARE_RUNS = 32
"""Free runs that a compaction makes beyond those needed, at most, if cheaper by the run."""

_Saved = tuple[Int32Array, Int32Array, Int32Array, list[Span]]


class BlockTable:
    """Owner of one instance's KV units: each belongs to one block or is free.

    A method that returns copies has already changed the table: the caller must execute the
    copies, in order, before anything reads or writes KV. ``None`` is a shortage, and then
    nothing has changed.
    """

    def __init__(
        self, num_layers: int, num_units: int, max_requests: int, max_blocks_per_request: int
    ) -> None:
        """A table without blocks over every layer. The two maxima are first sizes, not limits."""
        self.layers = LayerRange(0, num_layers)
        self.num_units = num_units
        shape = (max(1, max_requests), max(1, max_blocks_per_request))
        self.tables: Int32Array = np.zeros(shape, dtype=np.int32)
        """[rows, max_blocks] entries. Replaced by a larger array when it must grow."""
        self._first: Int32Array = np.zeros(shape, dtype=np.int32)
        self._end: Int32Array = np.zeros(shape, dtype=np.int32)
        self.rows: dict[RequestId, int] = {}
        """Row of ``tables`` of each request, until its release; read only, as is the next."""
        self.counts: dict[RequestId, int] = {}
        """Blocks of each request."""
        self.loans = SharedBlocks()
        """Who shares what."""
        self._free_rows = list(range(shape[0] - 1, -1, -1))
        self._pinned: npt.NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)
        self._free = FreeUnits(num_layers, [(0, num_units)])

    @property
    def free_units(self) -> int:
        """Units that no block holds."""
        return self._free.num_units

    @property
    def used_units(self) -> int:
        """Units that blocks hold."""
        return self.num_units - self._free.num_units

    def row_of(self, request_id: RequestId) -> int:
        """The request's row of ``tables``, fixed from its first block to its release."""
        return self.rows[request_id]

    def num_blocks(self, request_id: RequestId) -> int:
        """Blocks that the request has; 0 if it is unknown."""
        return self.counts.get(request_id, 0)

    def request_ids(self) -> tuple[RequestId, ...]:
        """Every holder of blocks, so that an instance can free those it lost track of.

        Prefixes come last, because nobody may share what is released.
        """
        return tuple(sorted(self.rows, key=self._is_lender))

    def held(self, request_id: RequestId, block: int) -> LayerRange:
        """The layers whose KV the block has room for."""
        assert block < self.counts[request_id], (request_id, block)
        row = self.rows[request_id]
        return LayerRange(int(self._first[row, block]), int(self._end[row, block]))

    def grow(
        self, request_id: RequestId, num_blocks: int, *, may_compact: bool = True
    ) -> tuple[UnitCopy, ...] | None:
        """Give the request blocks for the current layers until it has ``num_blocks``.

        Called for every chunk of a plan; O(1) per new block unless runs are short. Without
        ``may_compact`` nothing is ever copied, so that a step may run meanwhile.
        """
        have = self.counts.get(request_id, 0)
        count = num_blocks - have
        if count <= 0:
            return ()
        copies: tuple[UnitCopy, ...] | None = ()
        starts = self._free.allocate(count)
        if starts is None:
            copies = self._compact(count) if may_compact else None
            if copies is None:
                return None
            starts = self._free.allocate(count)
            assert starts is not None, (request_id, num_blocks)
        row = self._row_for(request_id, num_blocks)
        for block, start in enumerate(starts, have):
            self._put(row, block, start)
        self.counts[request_id] = num_blocks
        return copies

    def release(self, request_id: RequestId) -> None:
        """Free everything of the request but what it shares. Unknown ids are allowed.

        Pinned ones are not, nor prefixes that are shared.
        """
        row = self.rows.get(request_id)
        if row is None:
            return
        assert not self.loans.borrowers(request_id), f"{request_id} is shared"
        self._free_blocks(row, self.loans.num_blocks(request_id), self.counts[request_id])
        self.loans.cut(request_id, 0)
        del self.rows[request_id], self.counts[request_id]
        self._free_rows.append(row)

    # The prefix cache

    def keep(
        self, request_id: RequestId, prefix_id: PrefixId, first_block: int, end_block: int
    ) -> None:
        """The request's own blocks [first_block, end_block) are the prefix's from now on.

        It shares them if they follow those that it shares already.
        """
        shared = self.loans.num_blocks(request_id)
        assert prefix_id not in self.rows, prefix_id
        assert shared <= first_block < end_block <= self.counts[request_id], request_id
        row = self._row_for(prefix_id, end_block)
        old, blocks = self.rows[request_id], slice(first_block, end_block)
        self.tables[row, blocks] = self.tables[old, blocks]
        for array in (self._first, self._end, self._pinned):
            array[row, blocks] = array[old, blocks]
            array[old, blocks] = 0
        self.counts[prefix_id] = end_block
        if first_block == shared:
            self.loans.add(request_id, Loan(prefix_id, first_block, end_block))
        else:
            # The request ends with this plan, and with it whatever transfer it was in.
            self._pinned[row, blocks] = False

    def share(self, request_id: RequestId, prefix_id: PrefixId, end_block: int) -> None:
        """The request's next blocks, up to ``end_block``, are those of the prefix."""
        first_block = self.counts.get(request_id, 0)
        assert end_block <= self.counts[prefix_id], (prefix_id, end_block)
        row = self._row_for(request_id, end_block)
        blocks = slice(first_block, end_block)
        self.tables[row, blocks] = self.tables[self.rows[prefix_id], blocks]
        self.counts[request_id] = end_block
        self.loans.add(request_id, Loan(prefix_id, first_block, end_block))

    def evict(self, prefix_id: PrefixId, end_block: int) -> None:
        """Free a prefix's blocks at ``end_block`` and behind, which nobody shares.

        Unknown ids are allowed: an exchange may have lost it.
        """
        if prefix_id not in self.rows:
            return
        assert self.loans.lent_end(prefix_id) <= end_block, f"{prefix_id} is shared"
        row = self.rows[prefix_id]
        self._free_blocks(row, end_block, self.counts[prefix_id])
        self.counts[prefix_id] = end_block
        if not (self._end[row, :end_block] > self._first[row, :end_block]).any():
            self.release(prefix_id)

    def set_layers(self, layers: LayerRange, num_units: int) -> None:
        """From now on blocks are for ``layers`` and the KV range has ``num_units`` units.

        Called at a commit, and when the tail shrinks before a restore. Blocks that exist keep
        their layers and places; those places must lie below ``num_units``.
        """
        assert layers.num_layers > 0, layers
        used = self.used_units
        self._free.resize(layers.num_layers, self.num_units, num_units)
        self.layers = layers
        self.num_units = num_units
        assert self.used_units == used, f"live units at or above {num_units}"

    def begin_at(self, holder: RequestId, first_block: int) -> None:
        """A holder without blocks will have blocks at ``first_block`` and behind, none before."""
        if holder not in self.rows:
            self._row_for(holder, first_block)
            self.counts[holder] = first_block

    def copy(
        self, prefix_id: PrefixId, copy_id: PrefixId, first_block: int, end_block: int
    ) -> tuple[UnitCopy, ...] | None:
        """Give another prefix the content of blocks [first_block, end_block), in its own units."""
        self.begin_at(copy_id, first_block)
        copies = self.grow(copy_id, end_block)
        if copies is None:
            self.release(copy_id)
            return None
        row, copy, layers = self.rows[prefix_id], self.rows[copy_id], self.layers
        starts = self.tables[[row, copy], first_block:end_block] + layers.first
        pairs = zip(*starts.tolist(), strict=True)
        return (*copies, *(UnitCopy(src, dst, layers.num_layers) for src, dst in pairs))

    def change_loans(self, holders: Iterable[RequestId], ids: Mapping[PrefixId, PrefixId]) -> None:
        """Whoever of these shares a prefix shares the copy of it that ``ids`` names instead."""
        for holder in holders:
            self.loans.move(holder, ids)
        self._refresh_loans()

    def release_layers(
        self, request_id: RequestId, first_block: int, end_block: int, keep: LayerRange
    ) -> None:
        """Blocks [first_block, end_block) hold no other layers than ``keep`` any more.

        Called when peers have received them (or nobody needs them); allowed while pinned.
        """
        assert end_block <= self.counts[request_id], (request_id, end_block)
        row = self.rows[request_id]
        if not keep.num_layers:
            assert self.loans.lent_end(request_id) <= first_block, f"{request_id} is shared"
            self.loans.cut(request_id, first_block)
        assert self.loans.num_blocks(request_id) <= first_block, f"{request_id} shares these"
        self._keep_only(row, first_block, end_block, keep)

    def relayout(
        self, request_id: RequestId, first_block: int, end_block: int, *, may_compact: bool = True
    ) -> tuple[UnitCopy, ...] | None:
        """Blocks [first_block, end_block) get room for every current layer, keeping content.

        Called in a restore, before the missing layers' KV is pulled from peers. These blocks
        must not be pinned, though others of the request may be. Without ``may_compact`` no
        other block is moved, so that a step over other requests may run meanwhile.
        """
        assert end_block <= self.counts[request_id], (request_id, end_block)
        assert self.loans.num_blocks(request_id) <= first_block, f"{request_id} shares these"
        row = self.rows[request_id]
        assert not self._pinned[row, first_block:end_block].any(), f"{request_id} is in transfer"
        blocks = [
            block
            for block in range(first_block, end_block)
            if (self._first[row, block], self._end[row, block]) != self.layers
        ]
        copies: list[UnitCopy] = []
        starts = self._free.allocate(len(blocks)) if blocks else []
        if starts is not None:
            for block, start in zip(blocks, starts, strict=True):
                self._rehouse(row, block, start, copies)
            self._refresh_loans()
            return tuple(copies)
        # Too little for all at once: one after the other, each leaving its old run to the next.
        saved = self._save()
        for block in blocks:
            moved: tuple[UnitCopy, ...] | None = ()
            starts = self._free.allocate(1)
            if starts is None:
                moved = self._compact(1) if may_compact else None
                starts = None if moved is None else self._free.allocate(1)
            if moved is None or starts is None:
                self._restore(saved)
                return None
            copies.extend(moved)
            self._rehouse(row, block, starts[0], copies)
        self._refresh_loans()
        return tuple(copies)

    def vacate(self, num_units: int) -> tuple[UnitCopy, ...] | None:
        """Move every live unit below ``num_units``, so that the tail can be given up.

        None when they do not fit, or when pinned blocks are in the way.
        """
        if self.used_units > num_units:
            return None
        packing = plan_vacate(self._live_runs(), num_units)
        if packing is None:
            return None
        self._apply(packing)
        return tuple(packing.copies)

    def pin(self, request_id: RequestId, first_block: int, end_block: int) -> None:
        """Leave blocks [first_block, end_block) where they are: a transfer reads or fills them."""
        assert end_block <= self.counts[request_id], (request_id, end_block)
        self._set_pinned(request_id, first_block, end_block, True)

    def unpin(self, request_id: RequestId, first_block: int, end_block: int) -> None:
        """The transfer of these blocks is over. Allowed for blocks and requests not pinned."""
        if request_id in self.rows:
            self._set_pinned(request_id, first_block, end_block, False)

    def _set_pinned(self, request_id: RequestId, first: int, end: int, pinned: bool) -> None:
        self._pinned[self.rows[request_id], first:end] = pinned
        for prefix_id, lent_first, lent_end in self.loans.of(request_id):
            blocks = slice(max(first, lent_first), min(end, lent_end))
            self._pinned[self.rows[request_id], blocks] = False
            self._pinned[self.rows[prefix_id], blocks] = pinned

    def check(self) -> None:
        """Assert that every unit is held once or free once, and lies below ``num_units``."""
        held = np.nonzero(self._end > self._first)
        places = self.tables[held]
        self._free.check(places + self._first[held], places + self._end[held], self.num_units)
        assert self._free.run_length == self.layers.num_layers, self.layers
        assert self.rows.keys() == self.counts.keys()
        rows = sorted([*self.rows.values(), *self._free_rows])
        assert rows == list(range(self.tables.shape[0])), rows
        self._check_loans()

    def _check_loans(self) -> None:
        self.loans.check()
        for request_id, (prefix_id, first, end) in self.loans:
            row, lender = self.rows[request_id], self.rows[prefix_id]
            assert end <= min(self.counts[request_id], self.counts[prefix_id]), request_id
            blocks = slice(first, end)
            assert (self.tables[row, blocks] == self.tables[lender, blocks]).all(), request_id
            assert (self._first[row, blocks] == self._end[row, blocks]).all(), request_id

    def _is_lender(self, holder: RequestId) -> bool:
        return bool(self.loans.borrowers(holder))

    def _refresh_loans(self) -> None:
        """Blocks have moved, perhaps shared ones: name their new places to all who share them."""
        for request_id, (prefix_id, first, end) in self.loans:
            source = self.tables[self.rows[prefix_id], first:end]
            self.tables[self.rows[request_id], first:end] = source

    def _free_blocks(self, row: int, first_block: int, end_block: int) -> None:
        """Free what these blocks hold, most often exactly the current layers."""
        blocks = slice(first_block, end_block)
        assert not self._pinned[row, blocks].any(), f"row {row} is in transfer"
        first, end = self._first[row, blocks], self._end[row, blocks]
        if (first == self.layers.first).all() and (end == self.layers.end).all():
            self._free.free_runs((self.tables[row, blocks] + first).tolist())
            first[:] = end[:] = 0
        else:
            self._keep_only(row, first_block, end_block, NOTHING)

    def _put(self, row: int, block: int, start: int) -> None:
        """The block lies at units [start, start + layers held): a whole new run."""
        layers = self.layers
        self.tables[row, block] = start - layers.first
        self._first[row, block] = layers.first
        self._end[row, block] = layers.end

    def _rehouse(self, row: int, block: int, start: int, copies: list[UnitCopy]) -> None:
        """Move what the block holds into a run for every current layer; free its old run."""
        held = LayerRange(int(self._first[row, block]), int(self._end[row, block]))
        assert self.layers.covers(held), f"relayout would lose layers: {held}, {self.layers}"
        if held.num_layers:
            old = int(self.tables[row, block]) + held.first
            new = start + held.first - self.layers.first
            copies.append(UnitCopy(old, new, held.num_layers))
            self._free.free(old, old + held.num_layers)
        self._put(row, block, start)

    def _keep_only(self, row: int, first_block: int, end_block: int, keep: LayerRange) -> None:
        """Shrink these blocks to ``keep`` and free the units on either side."""
        blocks = slice(first_block, end_block)
        entries = self.tables[row, blocks]
        first, end = self._first[row, blocks], self._end[row, blocks]
        kept_first = np.clip(keep.first, first, end)
        kept_end = np.clip(keep.end, kept_first, end)
        self._free.free_all(entries + first, entries + kept_first)
        self._free.free_all(entries + kept_end, entries + end)
        empty = kept_end <= kept_first
        kept_first[empty] = kept_end[empty] = entries[empty] = 0
        first[:], end[:] = kept_first, kept_end

    def _row_for(self, request_id: RequestId, num_blocks: int) -> int:
        rows, columns = self.tables.shape
        row = self.rows.get(request_id)
        more_rows = rows if row is None and not self._free_rows else 0
        more_columns = 0 if num_blocks <= columns else max(columns, num_blocks - columns)
        if more_rows or more_columns:
            pad = ((0, more_rows), (0, more_columns))
            self.tables = np.pad(self.tables, pad)
            self._first = np.pad(self._first, pad)
            self._end = np.pad(self._end, pad)
            self._pinned = np.pad(self._pinned, pad)
            self._free_rows.extend(range(rows + more_rows - 1, rows - 1, -1))
        if row is None:
            row = self.rows[request_id] = self._free_rows.pop()
        return row

    def _compact(self, count: int) -> tuple[UnitCopy, ...] | None:
        """Slide blocks together until ``count`` free runs exist."""
        length = self.layers.num_layers
        if self._free.num_units < count * length:
            return None
        packing = Packing(self._live_runs(), self.num_units)
        spare = min(SPARE_RUNS, self._free.num_units // length)
        if not packing.reserve(length, count, spare):
            return None
        self._apply(packing)
        return tuple(packing.copies)

    def _apply(self, packing: Packing) -> None:
        runs = packing.runs[packing.runs["row"] >= 0]
        moved = (runs["start"] - runs["origin"]).astype(np.int32)
        self.tables[runs["row"], runs["block"]] += moved
        self._free.reset(self.layers.num_layers, packing.free_spans(self.num_units))
        self._refresh_loans()

    def _live_runs(self) -> RunArray:
        """Every non-empty block, in order of units."""
        rows, blocks = np.nonzero(self._end > self._first)
        firsts = self._first[rows, blocks]
        runs = np.zeros(rows.size, dtype=RUN)
        runs["start"] = runs["origin"] = self.tables[rows, blocks] + firsts
        runs["length"] = self._end[rows, blocks] - firsts
        runs["fixed"] = self._pinned[rows, blocks]
        runs["row"], runs["block"] = rows, blocks
        return runs[np.argsort(runs["start"], kind="stable")]

    def _save(self) -> _Saved:
        return self.tables.copy(), self._first.copy(), self._end.copy(), self._free.spans()

    def _restore(self, saved: _Saved) -> None:
        self.tables, self._first, self._end, spans = saved
        self._free.reset(self.layers.num_layers, spans)
