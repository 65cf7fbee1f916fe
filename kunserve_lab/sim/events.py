"""The kernel of the simulation: what happens next, and what time it is."""

import heapq
from collections.abc import Callable
from typing import Any


class EventHeap:
    """Owner of the virtual clock.

    Events at one moment happen in the order in which they were scheduled, so equal inputs give
    equal runs.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0
        self.num_done = 0

    def now_s(self) -> float:
        """The moment of the event that happens now."""
        return self._now_s

    def at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call ``act(*args)`` at a moment that is not past."""
        assert time_s >= self._now_s, (time_s, self._now_s)
        heapq.heappush(self._heap, (time_s, self._num_scheduled, act, args))
        self._num_scheduled += 1

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call ``act(*args)`` so many seconds from now."""
        self.at(self._now_s + delay_s, act, *args)

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._heap:
            return False
        self._now_s, _, act, args = heapq.heappop(self._heap)
        self.num_done += 1
        act(*args)
        return True
