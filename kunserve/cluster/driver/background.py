"""Work that nobody awaits, and errors that must not end the driver. None of them is silent."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    """Runs tasks of the event loop and keeps account of every error in them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: Counter[str] = Counter()

    @property
    def num_errors(self) -> int:
        """Errors so far. Each one is a bug."""
        return self._errors.total()

    @contextlib.contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """An error inside is counted and logged, and what follows goes on.

        An error that repeats is logged ever more rarely: the 1st, 2nd, 4th, 8th time.
        """
        try:
            yield
        except Exception:
            self.note(what)

    def note(self, what: str) -> None:
        """Count an error that is being handled, and log it."""
        self._errors[what] += 1
        count = self._errors[what]
        if count & (count - 1) == 0:
            logger.exception("internal error what=%r count=%d", what, count)

    def run(self, what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. An error ends it, but not unseen."""
        task = asyncio.create_task(self._watch(what, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it may never have begun
        return task

    async def _watch(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        with self.surviving(what):
            await work

    async def close(self) -> None:
        """Cancel what still runs, and wait until it has ended."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
