"""The free units of one instance's KV range, kept ready as runs of one length."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kunserve.control.arrays import Int32Array

Span = tuple[int, int]
"""Units [start, end)."""


class FreeUnits:
    """Owner of every unit that no block holds.

    Nearly all free memory is whole *runs* of the current length, taken and given back in O(1).
    What is too short for a run is a *fragment*; fragments are merged with their neighbours only
    when runs have become short.
    """

    def __init__(self, run_length: int, spans: Iterable[Span]) -> None:
        self.run_length = run_length
        self.num_units = 0
        self._runs: list[int] = []
        self._fragments: list[Span] = []
        self._merged = True
        self.reset(run_length, spans)

    def allocate(self, count: int) -> list[int] | None:
        """The starts of ``count`` runs, or None (and nothing changed) when they do not exist."""
        assert count > 0, count
        runs = self._runs
        if len(runs) < count:
            if self._merged or not self._fragments or self.num_units < count * self.run_length:
                return None
            self.reset(self.run_length, self.spans())
            runs = self._runs
            if len(runs) < count:
                return None
        taken = runs[-count:]
        del runs[-count:]
        taken.reverse()
        self.num_units -= count * self.run_length
        return taken

    def free(self, start: int, end: int) -> None:
        """Units [start, end) are free from now on."""
        self._merged = False
        self._carve(start, end)

    def free_all(self, starts: Int32Array, ends: Int32Array) -> None:
        """Like ``give`` for many spans, some of which may be empty."""
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if start < end:
                self.free(start, end)

    def free_runs(self, starts: list[int]) -> None:
        """Like ``give`` for many runs of exactly the current length."""
        self._merged = False
        self._runs.extend(starts)
        self.num_units += len(starts) * self.run_length

    def reset(self, run_length: int, spans: Iterable[Span]) -> None:
        """Forget everything: these spans (disjoint, not adjacent) are free, to be cut anew."""
        self.run_length = run_length
        self.num_units = 0
        self._runs = []
        self._fragments = []
        for start, end in spans:
            self._carve(start, end)
        self._runs.reverse()  # low units are taken first: a later shrink moves less
        self._merged = True

    def resize(self, run_length: int, end_before: int, end: int) -> None:
        """The range ends at ``end`` instead: what is added is free, what is free there is gone."""
        spans = self.spans()
        if end > end_before:
            spans.append((end_before, end))
        else:
            spans = [(s, min(e, end)) for s, e in spans if s < end]
        if len(spans) > 1 and spans[-2][1] == spans[-1][0]:
            spans[-2:] = [(spans[-2][0], spans[-1][1])]
        self.reset(run_length, spans)

    def spans(self) -> list[Span]:
        """All free units as maximal spans, in order."""
        runs = np.array(self._runs, dtype=np.int64)
        pieces = np.array(self._fragments, dtype=np.int64).reshape(-1, 2)
        starts = np.concatenate((runs, pieces[:, 0]))
        ends = np.concatenate((runs + self.run_length, pieces[:, 1]))
        if starts.size == 0:
            return []
        order = np.argsort(starts)
        starts, ends = starts[order], ends[order]
        breaks = np.flatnonzero(starts[1:] != ends[:-1])
        firsts = starts[np.concatenate(([0], breaks + 1))]
        lasts = ends[np.concatenate((breaks, [ends.size - 1]))]
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    def check(
        self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], num_units: int
    ) -> None:
        """Assert that every unit below ``num_units`` is free once, or in one of these spans."""
        pieces = [(start, start + self.run_length) for start in self._runs] + self._fragments
        free = np.array(pieces, dtype=np.int64).reshape(-1, 2)
        starts = np.concatenate((starts, free[:, 0]))
        ends = np.concatenate((ends, free[:, 1]))
        assert (starts < ends).all(), (starts, ends)
        order = np.argsort(starts)
        # Sorted, each piece begins where the one before it ends: no gap, and no unit twice.
        before = np.concatenate(([0], ends[order]))
        after = np.concatenate((starts[order], [num_units]))
        wrong = np.flatnonzero(before != after)
        spans = list(zip(before[wrong].tolist(), after[wrong].tolist(), strict=True))
        assert not spans, f"units owned other than once, between: {spans}"

    def _carve(self, start: int, end: int) -> None:
        length = self.run_length
        self.num_units += end - start
        cut = end - (end - start) % length
        self._runs.extend(range(start, cut, length))
        if cut < end:
            self._fragments.append((cut, end))
