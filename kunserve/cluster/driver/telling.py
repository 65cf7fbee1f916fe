"""Begins the merges of a large plan a few at a time, so that HTTP has its turns in between."""

import asyncio
from collections.abc import Callable

from kunserve.cluster.driver.background import Background
from kunserve.control.cluster.controller import Controller


class Telling:
    """Belongs to the driver's event loop."""

    def __init__(
        self,
        controller: Controller,
        now_s: Callable[[], float],
        flush: Callable[[], None],
        background: Background,
    ) -> None:
        """``flush`` carries out the controller's commands, and calls ``go_on``."""
        self._controller = controller
        self._now_s = now_s
        self._flush = flush
        self._background = background
        self._is_due = False
        self.is_over = False
        """Whether the cluster closes."""

    def go_on(self) -> None:
        """If there are merges to begin, begin a few in the loop's next turn."""
        if self._controller.has_more_to_tell and not (self._is_due or self.is_over):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        if not self.is_over:
            with self._background.surviving("beginning merges"):
                self._controller.tell_more(self._now_s())
            self._flush()
