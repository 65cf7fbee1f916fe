"""Simulated runs side by side: each is a process's work, and one bar shows them all."""

import functools
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kunserve.core.errors import KunServeError
from kunserve_lab.bench.environment import SIMULATED, version
from kunserve_lab.compare.experiment import Place
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.simulated.step_trace import StepTrace
from kunserve_lab.compare.systems import System

_LOOK_S = 0.2
_TELL_EVERY = 16
"""Requests that end between two words of a worker."""


class WorkerDied(KunServeError):
    """A process of a parallel run ended before its work did."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run to come."""

    place: Place
    system: System
    scenario: Scenario
    digest: str = ""
    trace_to: Path | None = None
    """Where a Chrome trace goes."""


def run_jobs(jobs: Sequence[Job], num_processes: int) -> Iterator[tuple[Job, SimResult]]:
    """Each job's result as soon as it is there. Raises WorkerDied, and what a job raises."""
    bar = _Bar(f"{len(jobs)} runs", sum(len(job.scenario.workload) for job in jobs))
    results = (
        ((job, _run(job, bar.advance)) for job in jobs)
        if num_processes == 1
        else _run_side_by_side(jobs, num_processes, bar)
    )
    for _ in jobs:
        with bar:
            result = next(results)
        yield result


def _run_side_by_side(
    jobs: Sequence[Job], num_processes: int, bar: "_Bar"
) -> Iterator[tuple[Job, SimResult]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # one import of it for all runs
    ended = context.Value("Q", 0)
    left = deque(jobs)
    running: dict[Connection, tuple[Job, BaseProcess]] = {}
    try:
        while left or running:
            while left and len(running) < num_processes:
                job = left.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_work, args=(job, ended, theirs), daemon=True
                )
                process.start()
                theirs.close()
                running[ours] = job, process
            done = wait(list(running), timeout=_LOOK_S)
            bar.show(ended.value)
            for connection in done:
                assert isinstance(connection, Connection)
                job, _ = running.pop(connection)
                yield job, _received(connection)
    finally:
        for _, process in running.values():
            process.terminate()


def _received(connection: Connection) -> SimResult:
    with connection:
        try:
            outcome: SimResult | Exception = connection.recv()
        except EOFError:
            raise WorkerDied(
                "a run was killed (out of memory?); try fewer at once: --jobs 1"
            ) from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _work(job: Job, ended: Any, connection: Connection) -> None:
    """A process of its own. Ctrl-C reaches it too, but ending it is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    untold = 0

    def add(count: int) -> None:
        with ended.get_lock():
            ended.value += count

    def tell() -> None:
        nonlocal untold
        untold += 1
        if untold == _TELL_EVERY:
            add(untold)
            untold = 0

    try:
        result = _run(job, tell)
    except Exception as error:
        connection.send(error)
        return
    add(untold)
    connection.send(result)


@functools.cache
def _version() -> dict[str, object]:
    """Asked where a run is, and once: a process keeps the code that it began with."""
    return version(SIMULATED)


def _run(job: Job, ended: Callable[[], None]) -> SimResult:
    of_code = tuple(_version().items())
    trace = None if job.trace_to is None else StepTrace()
    result = simulate(job.system, job.scenario, watcher=trace, ended=lambda record: ended())
    if trace is not None and job.trace_to is not None:
        trace.write(job.trace_to, result.transitions)
    return replace(result, run=replace(result.run, environment=of_code))


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
        console = Console(stderr=True)
        # On a pipe it would be an empty line each time.
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
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
