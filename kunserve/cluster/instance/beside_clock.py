"""Where an instance's thread is while it does not compute: for the trace."""

import resource
import time
from typing import NamedTuple


class Beside(NamedTuple):
    """What an instance's thread did between the end of one work and the begin of the next."""

    cpu_s: float
    """Planning, mail, accounts. What is neither this nor sleep is a wait for a core."""
    asleep_s: float
    """It had nothing to do and waited for mail."""
    num_sleeps: int
    """How often it gave its core away; during the work before, too."""
    num_evicted: int
    """How often another thread took its core."""


class BesideClock:
    """Counts from one work of an instance's thread to the next. Belongs to that thread."""

    def __init__(self) -> None:
        self._asleep_s = 0.0
        self._since_cpu_s = time.thread_time()
        self._began_cpu_s = self._since_cpu_s
        self._sleeps, self._evictions = _switches()

    def slept(self, seconds: float) -> None:
        """A wait for mail has ended."""
        self._asleep_s += seconds

    def begin_work(self) -> Beside:
        """The thread is about to compute; what it did since ``end_work``."""
        sleeps, evictions = _switches()
        self._began_cpu_s = time.thread_time()
        cpu_s = self._began_cpu_s - self._since_cpu_s
        found = Beside(cpu_s, self._asleep_s, sleeps - self._sleeps, evictions - self._evictions)
        self._sleeps, self._evictions, self._asleep_s = sleeps, evictions, 0.0
        return found

    def worked_s(self) -> float:
        """What the thread has computed since ``begin_work``, whoever else had the core."""
        return time.thread_time() - self._began_cpu_s

    def end_work(self) -> None:
        """It has computed."""
        self._since_cpu_s = time.thread_time()


def _switches() -> tuple[int, int]:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw, usage.ru_nivcsw
