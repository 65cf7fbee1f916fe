"""Compaction as a plan: which runs to slide so that free runs of a given length appear.

Worked out on a copy of the memory map; the owner applies the result or throws it away. Needed
after uneven splits and in tight restorations only, because an even split frees exactly new blocks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kunserve.control.instance.body import UnitCopy
from kunserve.control.instance.free_units import Span

RUN = np.dtype(
    [
        ("start", np.int64),
        ("length", np.int64),
        ("fixed", np.bool_),  # may not move: a bulk thread reads or writes it
        ("row", np.int64),  # of the block that holds the run; negative: reserved, no content
        ("block", np.int64),
        ("origin", np.int64),  # where it started before planning
    ]
)
"""Consecutive units that one block holds, or that a plan reserves."""

RunArray = npt.NDArray[np.void]

ROUND_COST = 128
"""What one more look for room is worth, in units copied: a few runs are made at a time."""


class _Window(NamedTuple):
    """The stretch from one gap to another whose gaps together hold ``num_runs`` runs.

    Gap ``i`` lies before run ``i``; the last one ends at the limit.
    """

    cost: int
    """Units to copy."""
    first: int
    last: int
    num_runs: int


class Packing:
    """A memory map [0, limit) being rearranged."""

    def __init__(self, runs: RunArray, limit: int) -> None:
        """``runs`` in order of their units, all below ``limit`` or still to be moved there."""
        self.runs = runs.copy()
        self.limit = limit
        self.copies: list[UnitCopy] = []
        """What to execute, in this order."""

    def reserve(self, length: int, count: int, spare: int = 0) -> bool:
        """Make ``count`` free runs, and up to ``spare`` more if that is cheaper by the run.

        Succeeds exactly when the free units between fixed runs suffice. Reserved runs may slide
        on while others are made: their places are final only when planning is over.
        """
        while count > 0:
            window = self._cheapest(length, count, max(count, spare))
            if window is None:
                return False
            self._open(window, length)
            count -= window.num_runs
        return True

    def reserved(self, length: int) -> list[int]:
        """Where the reserved runs of this length start."""
        runs = self.runs
        starts: list[int] = runs["start"][(runs["row"] < 0) & (runs["length"] == length)].tolist()
        return starts

    def copy(self, src: int, dst: int, num_units: int) -> None:
        """Copy units, down over themselves if need be: then in steps that do not overlap."""
        distance = abs(dst - src)
        if distance == 0:
            return
        assert dst < src or distance >= num_units, (src, dst, num_units)
        for offset in range(0, num_units, distance):
            size = min(distance, num_units - offset)
            self.copies.append(UnitCopy(src + offset, dst + offset, size))

    def slide_all(self) -> bool:
        """Move every run as far down as fixed ones allow; whether all end below the limit."""
        fixed = np.flatnonzero(self.runs["fixed"]).tolist()
        cursor = first = 0
        for last in [*fixed, len(self.runs)]:
            cursor = self._slide(first, last, cursor)
            if last < len(self.runs):
                cursor = int(self.runs["start"][last] + self.runs["length"][last])
            first = last + 1
        return cursor <= self.limit

    def gaps(self) -> list[Span]:
        """The free spans below the limit, reserved runs counted as free, in order."""
        held = self.runs[self.runs["row"] >= 0]
        ends = np.concatenate(([0], held["start"] + held["length"]))
        starts = np.concatenate((held["start"], [self.limit]))
        free = starts > ends
        return list(zip(ends[free].tolist(), starts[free].tolist(), strict=True))

    def free_spans(self, num_units: int) -> list[Span]:
        """The same below ``num_units``: what is behind the limit is free too."""
        spans = self.gaps()
        if self.limit < num_units:
            if spans and spans[-1][1] == self.limit:
                spans[-1] = (spans[-1][0], num_units)
            else:
                spans.append((self.limit, num_units))
        return spans

    def _cheapest(self, length: int, count: int, most: int) -> _Window | None:
        """The window that costs least by the run, among those for 1, 2, 4, ... ``most`` runs."""
        best: _Window | None = None
        for window in self._windows(length, count, most):
            score = (ROUND_COST + window.cost) / window.num_runs
            if best is None or score < (ROUND_COST + best.cost) / best.num_runs:
                best = window
        return best

    def _windows(self, length: int, count: int, most: int) -> Iterator[_Window]:
        runs = self.runs
        num_runs = len(runs)
        ends = np.concatenate(([0], runs["start"] + runs["length"]))
        sizes = np.concatenate((runs["start"], [self.limit])) - ends
        free = np.concatenate(([0], np.cumsum(sizes)))
        costs = np.where(runs["row"] >= 0, runs["length"], 0)
        costs = np.concatenate(([0], np.cumsum(costs)))
        # No window reaches back over a fixed run: the first gap after the last one before it.
        behind = np.where(runs["fixed"], np.arange(1, num_runs + 1), 0)
        behind = np.concatenate(([0], np.maximum.accumulate(behind)))
        tried = {count} | {1 << i for i in range(most.bit_length()) if 1 << i <= most}
        for wanted in sorted(tried):
            # The shortest window that ends with each gap.
            firsts = np.searchsorted(free, free[1:] - wanted * length, side="right") - 1
            lasts = np.flatnonzero(firsts >= behind)
            if lasts.size == 0:
                return
            firsts = firsts[lasts]
            prices = costs[lasts] - costs[firsts]
            i = int(np.argmin(prices))
            yield _Window(int(prices[i]), int(firsts[i]), int(lasts[i]), wanted)

    def _open(self, window: _Window, length: int) -> None:
        """Close every gap of a window but the last, and reserve the runs that fit into that."""
        before = window.first - 1
        cursor = 0
        if before >= 0:
            cursor = int(self.runs["start"][before] + self.runs["length"][before])
        cursor = self._slide(window.first, window.last, cursor)
        made = np.zeros(window.num_runs, dtype=RUN)
        made["start"] = cursor + length * np.arange(window.num_runs)
        made["length"] = length
        made["row"] = -1
        made["origin"] = made["start"]
        parts = (self.runs[: window.last], made, self.runs[window.last :])
        self.runs = np.concatenate(parts)

    def _slide(self, first: int, last: int, cursor: int) -> int:
        """Put runs [first, last) one after the other from ``cursor``; where they end."""
        part = self.runs[first:last]
        starts, lengths = part["start"].tolist(), part["length"].tolist()
        placed: list[int] = []
        for start, length, row in zip(starts, lengths, part["row"].tolist(), strict=True):
            if row >= 0:
                self.copy(start, cursor, length)
            placed.append(cursor)
            cursor += length
        part["start"] = placed
        return cursor


def plan_vacate(runs: RunArray, limit: int) -> Packing | None:
    """How to bring every run below ``limit``, by the cheapest of three ways that works.

    Always found when the runs fit and none is fixed; None when fixed runs are in the way.
    """
    is_high = runs["start"] + runs["length"] > limit
    if runs["fixed"][is_high].any():
        return None
    for arrange in (_move_into_gaps, _move_with_sliding, _slide_everything):
        packing = arrange(runs, is_high, limit)
        if packing is not None:
            return packing
    return None


def _move_into_gaps(runs: RunArray, is_high: npt.NDArray[np.bool_], limit: int) -> Packing | None:
    """Move runs above ``limit`` into gaps below it as they are; longest first, first fit."""
    high = runs[is_high]
    packing = Packing(runs[~is_high], _lowest(high, limit))
    gaps = packing.gaps()
    order = np.argsort(-high["length"], kind="stable").tolist()
    places = [0] * len(order)
    at, length_at = 0, None
    for i in order:
        length = int(high["length"][i])
        if length != length_at:
            at, length_at = 0, length
        while at < len(gaps) and gaps[at][1] - gaps[at][0] < length:
            at += 1
        if at == len(gaps):
            return None
        start, end = gaps[at]
        gaps[at] = (start + length, end)
        places[i] = start
    return _with_moved(packing, high, places, limit)


def _move_with_sliding(
    runs: RunArray, is_high: npt.NDArray[np.bool_], limit: int
) -> Packing | None:
    """Move runs above ``limit`` into room made by sliding runs below it."""
    high = runs[is_high]
    packing = Packing(runs[~is_high], _lowest(high, limit))
    lengths, counts = np.unique(high["length"], return_counts=True)
    for length, count in sorted(zip(lengths.tolist(), counts.tolist(), strict=True), reverse=True):
        if not packing.reserve(length, count):
            return None
    rooms = {length: packing.reserved(length) for length in lengths.tolist()}
    places = [rooms[length].pop() for length in high["length"].tolist()]
    return _with_moved(packing, high, places, limit)


def _slide_everything(runs: RunArray, is_high: npt.NDArray[np.bool_], limit: int) -> Packing | None:
    """The last resort: one long move down."""
    packing = Packing(runs, limit)
    return packing if packing.slide_all() else None


def _lowest(high: RunArray, limit: int) -> int:
    """Below this nothing is in the way: a run may straddle the limit."""
    return min(limit, int(high["start"][0])) if high.size else limit


def _with_moved(packing: Packing, high: RunArray, places: list[int], limit: int) -> Packing:
    moved = high.copy()
    moved["start"] = places
    sources, lengths = high["start"].tolist(), high["length"].tolist()
    for src, dst, length in zip(sources, places, lengths, strict=True):
        packing.copy(src, dst, length)
    runs = np.concatenate((packing.runs[packing.runs["row"] >= 0], moved))
    packing.runs = runs[np.argsort(runs["start"], kind="stable")]
    packing.limit = limit
    return packing
