"""A clock that stands still while its own process does."""

from collections.abc import Callable

MAX_STRIDE_S = 0.5
"""Longest time that passes between two looks at the clock; a running process looks every 0.1 s."""


class WakingClock:
    """Monotonic time without the pauses of the process that reads it.

    A process that was stopped (a debugger, Ctrl-Z, a suspended laptop) has not listened meanwhile.
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
