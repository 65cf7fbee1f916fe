"""Finds instances of other hosts that cannot be reached, by the connection to them.

ZeroMQ's own pulses end a connection on which nothing comes. That takes a link's timeout, while the
heartbeats of a process, which may compute for long, are waited for much longer.
"""

from collections.abc import Callable, Iterable

from kunserve.core.ids import InstanceId

DOWN_S = 0.2
"""How long a connection may be down: one that was reset comes back sooner."""


class Reachability:
    """Knows since when each instance cannot be reached."""

    def __init__(self, reaches: Callable[[InstanceId], bool]) -> None:
        """``reaches``: whether there is a connection now."""
        self._reaches = reaches
        self._down_since_s: dict[InstanceId, float] = {}

    def lost(self, instances: Iterable[InstanceId], now_s: float) -> list[InstanceId]:
        """Those that have been out of reach for too long. Called at every tick."""
        down = {i: self._down_since_s.get(i, now_s) for i in instances if not self._reaches(i)}
        self._down_since_s = down
        return sorted(i for i, since_s in down.items() if now_s - since_s >= DOWN_S)
