"""The clock by which the front judges others. It stands still while the front itself does."""

from collections.abc import Callable

MAX_STRIDE_S = 0.5
"""Longest time that passes between two looks at the clock; a running front looks every 0.1 s."""


class FrontClock:
    """Monotonic time without the front's own pauses.

    A front that was stopped (a debugger, Ctrl-Z, a suspended laptop) has not listened meanwhile.
    So the pause counts for nobody's deadline, because nobody could have been heard in it.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._looked_s = monotonic_s()
        self._now_s = self._looked_s

    def now_s(self) -> float:
        """The time. Must be called often, because a rare look counts as a pause."""
        looked_s = self._monotonic_s()
        self._now_s += min(looked_s - self._looked_s, MAX_STRIDE_S)
        self._looked_s = looked_s
        return self._now_s
