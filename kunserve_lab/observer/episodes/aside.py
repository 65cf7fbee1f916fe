"""Judges episodes in a process of its own, so that watching goes on, and none takes for ever."""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

from kunserve_lab.observer.episodes.episode import Episode
from kunserve_lab.observer.episodes.what_if import Judged, judge, measured_of
from kunserve_lab.observer.fleet import Factors
from kunserve_lab.observer.settings import Made
from kunserve_lab.sim.profile import InstanceProfile

DEADLINE_S = 300.0
"""For one episode."""
MOST_WAITING = 16
"""Episodes; one more is told without figures."""
MOST_AT_ONCE = 8
"""Simulations of a past day: each takes some 200 MiB."""
LOOK_S = 0.1
"""Between two looks at whether nobody waits for the answer any more."""
NICENESS = 10
"""The observer may stand beside what it watches."""

Work = tuple[Episode, InstanceProfile, Factors, Made]


class Judging:
    """Takes episodes, and gives them back judged, one after the other."""

    def __init__(self, told: Callable[[Judged], None], deadline_s: float = DEADLINE_S) -> None:
        self._told = told
        self._deadline_s = deadline_s
        self._queue: asyncio.Queue[Work] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None
        self._given_up = threading.Event()
        self._num_open = 0
        self._failure: Exception | None = None

    def start(self) -> None:
        """Called once, in a running loop."""
        self._task = asyncio.create_task(self._work())

    def give(self, work: Work) -> None:
        """An episode that is over."""
        try:
            self._queue.put_nowait(work)
            self._num_open += 1
        except asyncio.QueueFull:
            self._told(_unjudged(work, "too many episodes wait to be simulated"))

    async def finish(self) -> None:
        """Judge what waits, then end. All together have the deadline of one; who cancels this
        waits for none. Raises what telling one raised.
        """
        if self._task is None:
            return
        if self._num_open:
            print(
                f"bursts that are simulated still: {self._num_open}; waiting for at most "
                f"{self._deadline_s:.0f} s, another ^C leaves without them",
                file=sys.stderr,
            )
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._queue.join()
        except TimeoutError:
            self._given_up.set()
            await self._queue.join()
        finally:
            self._given_up.set()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    async def _work(self) -> None:
        while True:
            work = await self._queue.get()
            try:
                self._told(
                    await asyncio.to_thread(judge_aside, work, self._deadline_s, self._given_up)
                )
            except Exception as error:  # those that come after are judged still
                self._failure = self._failure or error
            finally:
                self._num_open -= 1
                self._queue.task_done()


class JudgingAll:
    """Judges the episodes of a past day, several at once; they come back in order."""

    def __init__(self, told: Callable[[Judged], None]) -> None:
        self._told = told
        self._given_up = threading.Event()
        self._num_at_once = max(1, min(len(os.sched_getaffinity(0)), MOST_AT_ONCE))
        self._threads = ThreadPoolExecutor(self._num_at_once)
        self._open: deque[Future[Judged]] = deque()
        self._num_given = self._num_told = 0

    def give(self, work: Work) -> None:
        """The next one."""
        if not self._num_given:
            print(
                f"bursts are simulated, {self._num_at_once} at once: each takes seconds to minutes",
                file=sys.stderr,
            )
        self._num_given += 1
        self._open.append(self._threads.submit(judge_aside, work, DEADLINE_S, self._given_up))
        while self._open and (self._open[0].done() or len(self._open) > 2 * self._num_at_once):
            self._tell_next()  # reading is faster: what it has read would fill the memory

    def finish(self) -> None:
        """Tell of all the others."""
        while self._open:
            self._tell_next()

    def close(self) -> None:
        """Wait for none that is not told of."""
        self._given_up.set()
        self._threads.shutdown(cancel_futures=True)

    def _tell_next(self) -> None:
        self._told(self._open.popleft().result())
        self._num_told += 1
        if self._num_given > self._num_at_once:
            print(f"bursts simulated: {self._num_told} of {self._num_given}", file=sys.stderr)


def judge_aside(work: Work, deadline_s: float, given_up: threading.Event) -> Judged:
    """In a process of its own, which is killed when its time is over or nobody waits for it."""
    if given_up.is_set():
        return _unjudged(work, "the watching ended")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, work), daemon=True)
    try:
        process.start()
    except OSError as error:
        ours.close()
        return _unjudged(work, f"no process for the simulation: {error}")
    finally:
        theirs.close()
    end_s = time.monotonic() + deadline_s
    try:
        while not ours.poll(LOOK_S):
            if given_up.is_set():
                return _unjudged(work, "the watching ended")
            if time.monotonic() >= end_s:
                return _unjudged(work, f"the simulation took longer than {deadline_s:g} s")
        found = ours.recv()
        assert isinstance(found, Judged), found
        return found
    except (EOFError, OSError):  # the latter in the midst of its answer
        return _unjudged(work, "the simulation's process ended before it was done")
    finally:
        ours.close()
        process.kill()
        process.join()


def judge_here(work: Work) -> Judged:
    """In this process. What it cannot simulate it says."""
    try:
        return _without_readings(judge(*work))
    except Exception as error:  # whatever a fleet's numbers lead to: the watch goes on
        return _unjudged(work, f"{type(error).__name__}: {error}")


def _child(results: Connection, work: Work) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    results.send(judge_here(work))


def _unjudged(work: Work, why_not: str) -> Judged:
    measured = measured_of(work[0])
    return _without_readings(Judged(work[0], measured, factors=work[2], why_not=why_not))


def _without_readings(judged: Judged) -> Judged:
    """As it is told and kept. A burst's readings are megabytes, which nobody asks for any more."""
    return replace(judged, episode=replace(judged.episode, changes=()))
