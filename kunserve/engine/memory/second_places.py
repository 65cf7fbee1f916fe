"""Granules at two places at a time: where they go to before a change, where they were after it.

Device memory cannot be moved, and mapping takes long, so both are done a few granules at a time.
"""

import logging
import time
from typing import NamedTuple

from kunserve.core.layout import LayerRange
from kunserve.engine.memory.arena import Arena, VirtualRange

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Granules that one call maps or unmaps: steps wait for it."""


class Move(NamedTuple):
    """Consecutive granules that change their range."""

    source: VirtualRange
    slot: int
    target: VirtualRange
    target_slot: int
    num: int


class SecondPlaces:
    """Owner of what is to be mapped for the next change, and of how long that took."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.wanted: LayerRange | None = None
        """Layers to be held next, whose granules are linked but for ``_to_link``."""
        self._to_link: list[Move] = []
        """The next one last."""
        self._prepare_s = self._tidy_s = 0.0
        self._has_warned = False

    @property
    def is_preparing(self) -> bool:
        """See ``control.instance.body.Memory``."""
        return bool(self._to_link)

    @property
    def tidied_s(self) -> float | None:
        """See ``control.instance.body.Memory``."""
        return None if self._arena.num_aliases else self._tidy_s

    def want(self, layers: LayerRange, moves: list[Move]) -> None:
        """``prepare`` links these from now on."""
        self.wanted, self._prepare_s = layers, 0.0
        self._to_link = [
            Move(source, slot + done, target, target_slot + done, min(AT_ONCE, num - done))
            for source, slot, target, target_slot, num in moves
            for done in range(0, num, AT_ONCE)
        ][::-1]

    def forget(self) -> None:
        """Nothing is wanted, and what is linked goes."""
        self.wanted = None
        self._to_link.clear()

    def changed(self) -> float:
        """Linked granules belong where they were wanted. The seconds that it took to link them."""
        self.forget()
        prepare_s, self._prepare_s, self._tidy_s = self._prepare_s, 0.0, 0.0
        return prepare_s

    def prepare(self) -> str | None:
        """Link some; a refusal says why it cannot be, and is the end of it."""
        began_s = time.perf_counter()
        try:
            if self._to_link:
                self._arena.link(*self._to_link[-1])
                self._to_link.pop()
        except OSError as error:
            self.forget()
            return f"cannot map memory a second time: {error.strerror}"
        self._prepare_s += time.perf_counter() - began_s
        return None

    def tidy(self) -> None:
        """Unmap some that nobody wants."""
        if self.wanted is not None or not self._arena.num_aliases:
            return
        began_s = time.perf_counter()
        try:
            self._arena.unlink_some(AT_ONCE)
        except OSError as error:
            if not self._has_warned:
                logger.warning("cannot unmap old addresses, will try again: %s", error.strerror)
            self._has_warned = True
        self._tidy_s += time.perf_counter() - began_s
