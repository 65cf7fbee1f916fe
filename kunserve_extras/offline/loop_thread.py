"""An event loop in a thread of its own, for a caller that has none, or one that is busy."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from kunserve.core.errors import Unavailable

T = TypeVar("T")
Tell: TypeAlias = Callable[[Any], None]
"""Called on the event loop with news for the caller who waits."""
_NOT_BEGUN = object()
_END_S = 60.0
"""How long an interrupted call may take to end."""


def _ignore(news: Any) -> None:
    """Hear nothing."""


class LoopThread:
    """Runs coroutines for any thread but its own.

    The thread is a daemon, so that a program may end without a word. Instances are started by it,
    and a process dies with the thread that started it: so the thread lives as long as they do.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: set[asyncio.Task[Any]] = set()
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kunserve", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[Tell], Coroutine[Any, Any, T]], hear: Tell = _ignore) -> T:
        """What ``work`` returns. The caller waits; if it is interrupted, ``work`` is ended first.

        What ``work`` tells comes to ``hear``, in the caller's thread. Raises Unavailable once
        closed.
        """
        if self._pid != os.getpid():
            raise Unavailable("this LLM belongs to the process that made it; make another one here")
        assert threading.current_thread() is not self._thread
        mail: SimpleQueue[Any] = SimpleQueue()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work(mail.put))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            task.add_done_callback(mail.put)
            begun.append(task)

        def end() -> None:  # behind ``begin``, if that was ever asked for
            if begun:
                begun[0].cancel()
            else:
                mail.put(_NOT_BEGUN)

        try:  # Ctrl-C may come anywhere in it
            with self._closing:  # so that ``_finish``, which comes later, knows of it
                is_closed, news = self._is_closed, None
                if not is_closed:
                    self._loop.call_soon_threadsafe(begin)
            while not is_closed and not isinstance(news := mail.get(), asyncio.Task):
                hear(news)
        except BaseException:
            with contextlib.suppress(RuntimeError, Empty):  # the loop is closed, or just now
                self._loop.call_soon_threadsafe(end)
                while not isinstance(last := mail.get(timeout=_END_S), asyncio.Task):
                    if last is _NOT_BEGUN:
                        break
            raise
        if news is None or news.cancelled():
            raise Unavailable("this LLM was closed")
        result: T = news.result()
        return result

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End all calls, run ``last``, and end the thread. Whoever comes later waits for the first.

        A forked child has no such thread, and nothing to end.
        """
        if self._pid != os.getpid():
            return
        with self._closing:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._finish(last)))
        if threading.current_thread() is not self._thread:  # where garbage may be collected too
            self._thread.join()

    async def _finish(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            calls = list(self._calls)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await last()
        finally:
            self._loop.stop()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
