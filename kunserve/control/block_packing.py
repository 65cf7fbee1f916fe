"""Compaction as a plan: which runs to slide so that a free run of a given length appears.

Worked out on a copy of the memory map; the owner applies the result or throws it away. Needed
after uneven splits only (architecture, section 4): an even split frees exactly new blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kunserve.control.block_space import Span
from kunserve.control.body import UnitCopy


@dataclass(slots=True)
class LiveRun:
    """Consecutive units that one block holds, or that the plan reserves (no block: no content)."""

    start: int
    length: int
    fixed: bool
    """May not move: a bulk thread reads or writes it."""
    row: int | None
    block: int
    origin: int
    """Where the run was when planning began."""

    @property
    def end(self) -> int:
        """The first unit after the run."""
        return self.start + self.length

    @property
    def cost(self) -> int:
        """Units copied when the run moves."""
        return 0 if self.row is None else self.length


@dataclass(slots=True)
class Packing:
    """A memory map [0, limit) being rearranged."""

    runs: list[LiveRun]
    """In order of their units."""
    limit: int
    copies: list[UnitCopy] = field(default_factory=list)
    """What to execute, in this order."""

    def reserve(self, length: int, count: int) -> list[LiveRun] | None:
        """Make ``count`` free runs by sliding as few units as is cheaply found.

        Succeeds exactly when the free units between fixed runs allow it. The reserved runs may
        slide on while others are made, so their places are final only when planning is over.
        """
        reserved: list[LiveRun] = []
        while len(reserved) < count:
            windows = sorted(self._windows(length))
            if not windows:
                return None
            taken: set[int] = set()
            opened: list[LiveRun] = []
            for _, first, last in windows:
                if len(reserved) + len(opened) >= count:
                    break
                gaps = range(first, last + 1)
                if taken.isdisjoint(gaps):
                    taken.update(gaps)
                    start = self._slide(first, last)
                    opened.append(LiveRun(start, length, False, None, 0, start))
            self.runs.extend(opened)
            self.runs.sort(key=_start_of)
            reserved.extend(opened)
        return reserved

    def move(self, run: LiveRun, start: int) -> None:
        """Copy ``run`` to ``start``; down over its own units if need be, in steps that fit."""
        distance = run.start - start
        if run.row is not None and distance != 0:
            step = run.length if abs(distance) >= run.length else distance
            assert step > 0, (run, start)
            for offset in range(0, run.length, step):
                size = min(step, run.length - offset)
                self.copies.append(UnitCopy(run.start + offset, start + offset, size))
        run.start = start

    def slide_all(self) -> bool:
        """Move every run as far down as fixed ones allow; whether all end below the limit."""
        cursor = 0
        for run in self.runs:
            if not run.fixed:
                self.move(run, cursor)
            cursor = run.end
        return cursor <= self.limit

    def gaps(self) -> list[Span]:
        """The free spans below the limit, reserved runs counted as free, in order."""
        spans: list[Span] = []
        cursor = 0
        for run in self.runs:
            if run.row is not None:
                if run.start > cursor:
                    spans.append((cursor, run.start))
                cursor = run.end
        if self.limit > cursor:
            spans.append((cursor, self.limit))
        return spans

    def _windows(self, length: int) -> list[tuple[int, int, int]]:
        """Smallest stretches with ``length`` free units, as (units to copy, first gap, last gap).

        Gap ``i`` lies before run ``i``; the last one ends at the limit.
        """
        found: list[tuple[int, int, int]] = []
        sizes: list[int] = []
        first = free = cost = cursor = 0
        for index in range(len(self.runs) + 1):
            run = self.runs[index] if index < len(self.runs) else None
            size = (self.limit if run is None else run.start) - cursor
            sizes.append(size)
            free += size
            while first < index and free - sizes[first] >= length:
                free -= sizes[first]
                cost -= self.runs[first].cost
                first += 1
            if free >= length:
                found.append((cost, first, index))
            if run is not None:
                cursor = run.end
                if run.fixed:
                    first, free, cost = index + 1, 0, 0
                else:
                    cost += run.cost
        return found

    def _slide(self, first: int, last: int) -> int:
        """Close every gap of a window but the last; the start of the gap that results."""
        cursor = self.runs[first - 1].end if first > 0 else 0
        for run in self.runs[first:last]:
            self.move(run, cursor)
            cursor = run.end
        return cursor


def _start_of(run: LiveRun) -> int:
    return run.start


def plan_vacate(live_runs: Callable[[], list[LiveRun]], limit: int) -> Packing | None:
    """How to bring every run below ``limit``, by the cheapest of three ways that works.

    Always found when the runs fit and none is fixed; None when fixed runs are in the way.
    """
    runs = live_runs()
    high = [run for run in runs if run.end > limit]
    if not high:
        return Packing(runs, limit)
    if any(run.fixed for run in high):
        return None
    for arrange in (_move_into_gaps, _move_with_sliding, _slide_everything):
        packing = arrange(live_runs(), limit)
        if packing is not None:
            return packing
    return None


def _move_into_gaps(runs: list[LiveRun], limit: int) -> Packing | None:
    """Move runs above ``limit`` into gaps below it as they are; longest first, first fit."""
    low, high = _split(runs, limit)
    packing = Packing(low, min([limit, *(run.start for run in high)]))
    spans = packing.gaps()
    for run in sorted(high, key=lambda run: -run.length):
        index = next((i for i, (s, e) in enumerate(spans) if e - s >= run.length), None)
        if index is None:
            return None
        start, end = spans[index]
        packing.move(run, start)
        spans[index] = (start + run.length, end)
    return _finished(low, high, packing, limit)


def _move_with_sliding(runs: list[LiveRun], limit: int) -> Packing | None:
    """Move runs above ``limit`` into room made by sliding runs below it."""
    low, high = _split(runs, limit)
    packing = Packing(low, min([limit, *(run.start for run in high)]))
    places: list[tuple[LiveRun, LiveRun]] = []
    for length in sorted({run.length for run in high}, reverse=True):
        wanted = [run for run in high if run.length == length]
        reserved = packing.reserve(length, len(wanted))
        if reserved is None:
            return None
        places.extend(zip(wanted, reserved, strict=True))
    for run, place in places:
        packing.move(run, place.start)
    return _finished(packing.runs, high, packing, limit)


def _slide_everything(runs: list[LiveRun], limit: int) -> Packing | None:
    """The last resort: one long move down."""
    packing = Packing(runs, limit)
    return packing if packing.slide_all() else None


def _split(runs: list[LiveRun], limit: int) -> tuple[list[LiveRun], list[LiveRun]]:
    return [run for run in runs if run.end <= limit], [run for run in runs if run.end > limit]


def _finished(low: list[LiveRun], high: list[LiveRun], packing: Packing, limit: int) -> Packing:
    held = [run for run in low if run.row is not None] + high
    return Packing(sorted(held, key=_start_of), limit, packing.copies)
