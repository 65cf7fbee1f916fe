"""Threads for work on long texts, so that no client's text holds up the others."""

import asyncio
import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kunserve.core.errors import MAX_WAITING_TEXT, Overloaded

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2


class TextThreads:
    """Two threads behind a queue with a bound. Short work runs at once, on the event loop."""

    def __init__(self, inline_chars: int, max_waiting_chars: int) -> None:
        self.inline_chars = inline_chars
        self._max_waiting_chars = max_waiting_chars
        self.held_chars = 0
        """Characters that wait to be worked on, or are worked on."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def room(self, num_chars: int) -> Generator[None, None, None]:
        """Room in the queue for a text. Raises Overloaded when there is none.

        One text alone always has room, however long it is.
        """
        if self.held_chars and self.held_chars + num_chars > self._max_waiting_chars:
            raise Overloaded("Too much text is waiting to be tokenised.", limit=MAX_WAITING_TEXT)
        self.held_chars += num_chars
        try:
            yield
        finally:
            self.held_chars -= num_chars

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in a thread. A caller that is cancelled takes it out of the queue."""
        future = self._threads.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    async def run(
        self, num_chars: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``function`` on a text of this length: at once if it is short, else in a thread."""
        if num_chars <= self.inline_chars:
            return function(*args, **kwargs)
        with self.room(num_chars):
            return await self.call(function, *args, **kwargs)
