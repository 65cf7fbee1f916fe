"""Runs side by side: each system at each load is a process's work, and one bar shows them all."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kunserve.bench.simulate.chrome_trace import StepTrace
from kunserve.bench.simulate.run import Scenario, SimResult, simulate
from kunserve.bench.simulate.systems import find_system
from kunserve.core.errors import KunServeError

_LOOK_S = 0.2
_TELL_EVERY = 16
"""Requests that end between two words of a worker."""

_ended: Any = None
"""In a worker: requests that have ended in all of them."""


class WorkerDied(KunServeError):
    """A process of a parallel run ended before its work did."""


@dataclass(frozen=True, slots=True)
class Job:
    """One system under one load."""

    label: str
    scenario: Scenario
    trace_to: Path | None = None
    """Where a Chrome trace goes."""


def num_jobs_at_once(num_jobs: int, limit: int | None) -> int:
    """As many as there are cores, unless a limit is given."""
    return max(1, min(num_jobs, len(os.sched_getaffinity(0)) if limit is None else limit))


def run_jobs(jobs: Sequence[Job], num_processes: int) -> Iterator[SimResult]:
    """Results in the order of the jobs. Raises WorkerDied, and what a job raises."""
    bar = _Bar(f"{len(jobs)} runs", sum(len(job.scenario.workload) for job in jobs))
    results = (
        (_run(job, bar.advance) for job in jobs)
        if num_processes == 1
        else _run_side_by_side(jobs, num_processes, bar)
    )
    for _ in jobs:
        with bar:
            result = next(results)
        yield result


def _run_side_by_side(jobs: Sequence[Job], num_processes: int, bar: "_Bar") -> Iterator[SimResult]:
    context = multiprocessing.get_context("spawn")
    ended = context.Value("Q", 0)
    pool = ProcessPoolExecutor(num_processes, context, _begin, (ended,))
    try:
        for future in [pool.submit(_run_and_tell, job) for job in jobs]:
            _await(future, lambda: bar.show(ended.value))
            yield future.result()
    except BrokenProcessPool:
        raise WorkerDied(
            "a process of the simulation ended early (out of memory?); try fewer at once: --jobs 1"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _await(future: Future[SimResult], look: Callable[[], None]) -> None:
    while not future.done():
        wait([future], timeout=_LOOK_S)
        look()


def _begin(ended: Any) -> None:
    """A worker starts. Interrupts end it at once and without a word: its parent says what is."""
    global _ended
    _ended = ended
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run_and_tell(job: Job) -> SimResult:
    untold = 0

    def tell() -> None:
        nonlocal untold
        untold += 1
        if untold == _TELL_EVERY:
            add(untold)
            untold = 0

    def add(count: int) -> None:
        with _ended.get_lock():
            _ended.value += count

    result = _run(job, tell)
    add(untold)
    return result


def _run(job: Job, ended: Callable[[], None]) -> SimResult:
    trace = None if job.trace_to is None else StepTrace()
    result = simulate(
        find_system(job.label), job.scenario, watcher=trace, ended=lambda record: ended()
    )
    if trace is not None and job.trace_to is not None:
        trace.write(job.trace_to, result.transitions)
    return result


class _Bar:
    """Shown within its context only, so that tables can be printed between."""

    def __init__(self, name: str, total: int) -> None:
        columns = (
            TextColumn(f"[bold]{name}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} requests"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(name, total=total)

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """One more request has ended."""
        self._progress.advance(self._task)

    def show(self, num_ended: int) -> None:
        """So many have."""
        self._progress.update(self._task, completed=num_ended)
