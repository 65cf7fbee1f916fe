"""Time as an argument: the engine passes a real clock, the simulator a virtual one."""

from typing import Protocol


class Clock(Protocol):
    """A source of seconds."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back; the origin is arbitrary."""
        ...
