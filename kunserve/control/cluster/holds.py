"""What failed lately is not tried for a while, each time twice as long.

Nobody tells when it would succeed again, so it is tried then.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

LONGEST_HOLD_S = 480.0


@dataclass(slots=True)
class _Hold:
    until_s: float
    hold_s: float


class Holds(Generic[K]):
    """Owns until when each is held back."""

    def __init__(self, first_s: float, most: int) -> None:
        """``first_s``: how long at first. Of more than ``most`` those that would be tried first are
        forgotten.
        """
        self._first_s = first_s
        self._most = most
        self._holds: dict[K, _Hold] = {}

    def found(self, key: K, now_s: float) -> None:
        """It has failed just now. What many tell at once counts once."""
        hold = self._holds.get(key)
        if hold is None or now_s > hold.until_s + hold.hold_s:
            hold = self._holds[key] = _Hold(now_s, self._first_s)
        elif now_s > hold.until_s:
            hold.hold_s = min(2.0 * hold.hold_s, LONGEST_HOLD_S)
        hold.until_s = now_s + hold.hold_s
        if len(self._holds) > self._most:
            del self._holds[min(self._holds, key=lambda one: self._holds[one].until_s)]

    def forget(self, of: Callable[[K], bool]) -> None:
        """These have succeeded, or are others now."""
        for key in [key for key in self._holds if of(key)]:
            del self._holds[key]

    def held(self, now_s: float) -> dict[K, float]:
        """Those that are not to be tried now, and until when."""
        return {key: hold.until_s for key, hold in self._holds.items() if now_s <= hold.until_s}

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._holds) <= self._most
