"""The real world: a server of its own for each run, and the client of ``kunserve bench``."""

import asyncio
import json
import os
import secrets
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kunserve.server.start.flags.option import ByteSize
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.environment import environment, version
from kunserve_lab.bench.metrics import RunMetrics, client_lag_s, compute_metrics
from kunserve_lab.bench.output import report
from kunserve_lab.bench.output.progress import ProgressLine
from kunserve_lab.bench.prompts import TokenIdPrompts
from kunserve_lab.bench.runfile import Run
from kunserve_lab.bench.server_process import running_server
from kunserve_lab.bench.session import ServerUnreachable, Target, find_model, measure
from kunserve_lab.bench.timeline import whole_bubbles
from kunserve_lab.compare.experiment import Place, World
from kunserve_lab.compare.others import OtherServers, running_others
from kunserve_lab.compare.results import Outcome, result_of
from kunserve_lab.compare.settings import RealSetup
from kunserve_lab.compare.systems import System, check_parts, serve_flags
from kunserve_lab.workload.workload import Workload

MODEL_S = 30.0
"""How long a server that answers may take to list its model."""
FORM_S = 60.0
"""How long pipelines may take to form."""
FORM_POLL_S = 0.1
_SEED_BITS = 48


@dataclass(frozen=True, slots=True)
class RealJob:
    """One run to come."""

    place: Place
    system: System | OtherServers
    workload: Workload
    digest: str
    trace_to: Path | None = None
    """Where the server writes its steps."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """What a server and its client leave."""

    run: Run
    metrics: RunMetrics
    log: tuple[str, ...]
    """The server's own lines on its drops and restores."""
    load_average: tuple[float, float]
    """Of the machine over a minute, at the run's start and end."""


def run_jobs(
    jobs: Sequence[RealJob],
    setup: RealSetup,
    say: Callable[[str], None],
) -> Iterator[Outcome]:
    """One job after the other, each with a server of its own."""
    began_s = time.monotonic()
    for number, job in enumerate(jobs):
        place = job.place
        took_s = time.monotonic() - began_s
        left = (
            f", about {took_s / number * (len(jobs) - number) / 60:.0f} min left" if number else ""
        )
        say(
            f"run {number + 1} of {len(jobs)}{left}: {place.system}, load {place.load:g}, "
            f"seed {place.seed}, round {place.round + 1}"
        )
        if isinstance(job.system, OtherServers):
            done = run_others(
                place.system, job.system, setup, job.workload, seed=place.seed, say=say
            )
        else:
            done = run_system(
                job.system, setup, job.workload, seed=place.seed, trace_to=job.trace_to, say=say
            )
        yield _outcome(job, done)


def run_system(
    system: System,
    setup: RealSetup,
    workload: Workload,
    *,
    seed: int = 0,
    trace_to: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> RealRun:
    """Start the system afresh, replay the requests, stop it."""
    flags = serve_arguments(system, setup, trace_to)
    say(f"  kunserve serve {' '.join(flags)}")
    of_code = version()
    with running_server(flags) as server:
        say(f"  live: {server.url}/dashboard")
        if system.pipeline_stages > 1:
            await_pipelines(server.url, system.pipeline_stages)
        called = " ".join(flags)
        done = _measured(system.name, called, (server.url,), setup, workload, seed, say)
        conditions = dict(done.run.environment) | of_code
        run = replace(done.run, environment=tuple(conditions.items()))
        return replace(done, run=run, log=tuple(server.transitions()))


def run_others(
    name: str,
    other: OtherServers,
    setup: RealSetup,
    workload: Workload,
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> RealRun:
    """Start the replicas afresh, if they are not there, replay the requests in turn, stop them.

    Those that are there get prompts that no run before has had. They keep their prefix caches from
    run to run, and would else be timed with the prompts of the round before in them.
    """
    if other.command:
        say(f"  {other.replicas} x {other.command}")
        say(f"  waiting until they are ready, {other.ready_s:g} s at most")
    else:
        say(f"  {', '.join(other.urls)}")
        seed = secrets.randbits(_SEED_BITS)
    with running_others(name, other) as urls:
        return _measured(name, other.command, urls, setup, workload, seed, say)


def _measured(
    name: str,
    called: str,
    urls: tuple[str, ...],
    setup: RealSetup,
    workload: Workload,
    seed: int,
    say: Callable[[str], None],
) -> RealRun:
    say(f"  {len(workload)} requests over {workload.duration_s:.0f} s")
    at_start = os.getloadavg()[0]
    run = asyncio.run(_replay(name, called, urls, setup, workload, seed))
    at_end = os.getloadavg()[0]
    metrics = compute_metrics(run.records, run.duration_s)
    return RealRun(run, metrics, (), (round(at_start, 2), round(at_end, 2)))


def serve_arguments(system: System, setup: RealSetup, trace_to: Path | None) -> tuple[str, ...]:
    """What ``kunserve serve`` is called with."""
    check_parts(system, setup.num_instances)
    joined = system.joined_instances
    flags = [
        setup.model,
        *("--num-instances", str(setup.num_instances // joined)),
        *("--instance-memory", _times(setup.instance_memory, system.memory_factor * joined)),
        *("--max-num-batched-tokens", str(setup.max_num_batched_tokens)),
        *("--num-threads", str(setup.num_threads * joined)),
        # The figures that we have kept, and the simulator's models, are of plain weights.
        *("--quantization", "none"),
        # Instances stand for machines, or GPUs, with memories of their own; but for the system that
        # shows what one machine could do instead.
        *("--weights", "shared" if system.shares_weights else "private"),
        *serve_flags(system),
    ]
    if setup.profile is not None:
        flags += ["--profile", str(setup.profile)]
    if trace_to is not None:
        flags += ["--trace-out", str(trace_to)]
    return (*flags, *setup.serve_flags)


def await_pipelines(url: str, num_stages: int) -> None:
    """Wait until all instances of the server stand in groups of ``num_stages``."""
    deadline_s = time.monotonic() + FORM_S
    while True:
        stages = sorted({len(group["stages"]) for group in _state(url)["groups"]})
        if stages == [num_stages]:
            return
        if time.monotonic() > deadline_s:
            raise ServerUnreachable(f"{url}: groups of {stages} stages stand, not of {num_stages}")
        time.sleep(FORM_POLL_S)


def _state(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/kunserve/state", timeout=FORM_S) as answer:
            values: dict[str, Any] = json.load(answer)
            return values
    except OSError as error:
        raise ServerUnreachable(f"{url}: {error}") from None


def _times(size: str, factor: float) -> str:
    """A size as a flag has it, multiplied."""
    return size if factor == 1.0 else str(int(ByteSize().convert(size, None, None) * factor))


async def _replay(
    name: str,
    called: str,
    urls: tuple[str, ...],
    setup: RealSetup,
    workload: Workload,
    seed: int,
) -> Run:
    model = await find_model(urls, None, None, MODEL_S)
    settings = CallSettings(
        model=model,
        endpoint="/v1/completions",
        chat=False,
        ignore_eos=True,
        timeout_s=setup.timeout_s,
    )
    metrics = tuple(f"{url}/metrics" for url in urls)
    target = Target(urls, settings, metrics, num_warmups=setup.num_warmups * len(urls))
    with ProgressLine(len(workload)) as progress:
        outcome = await measure(target, workload, TokenIdPrompts(seed), progress)
    return Run(
        label=name,
        provenance=workload.provenance,
        duration_s=outcome.duration_s,
        records=outcome.records,
        samples=outcome.samples,
        config=(("serve", called), ("prompt_seed", seed), ("ignore_eos", True)),
        environment=tuple(environment().items()),
    )


def _outcome(job: RealJob, done: RealRun) -> Outcome:
    run = done.run
    lags = sorted(client_lag_s(record) for record in run.records)
    result = result_of(
        World.REAL,
        job.place,
        job.digest,
        run,
        done.metrics,
        num_preemptions=_grown(run, "num_preemptions"),
        num_drops=_grown(run, "num_drops"),
        num_restores=_grown(run, "num_restores"),
        bubble_ratio=whole_bubbles(run.samples),
        client_lag_s=round(lags[int(0.99 * (len(lags) - 1))], 4) if lags else None,
        load_average=done.load_average,
        cautions=tuple(report.cautions(run.records, ignore_eos=True)),
        environment=dict(run.environment),
    )
    return Outcome(result, run, done.log)


def _grown(run: Run, field: str) -> int:
    """How far a counter of the server rose over the run."""
    values = [v for v in (getattr(sample, field) for sample in run.samples) if v is not None]
    return int(values[-1] - values[0]) if values else 0
