"""Does the simulator predict the real cluster? Real runs replayed in it, side by side.

    python -m benchmarks.overload_curve --trace TRACE --loads 0.06 --out real
    kunserve profile smollm2-135m --out profile.json
    python -m benchmarks.prediction --profile profile.json real/*-0.06.jsonl

A run file holds its requests and the server's flags, so nothing else is needed. A cluster near
overload is chaotic: requests that come a millisecond later make another tail, in both worlds. So
each run is simulated many times with arrivals moved by a few milliseconds; the table shows the
median of the simulations, their range, and how far the real run is from the median.

With `overload_curve --traces` the second table shows the same with step times fitted to the steps
of that very run: what is left of an error then is the simulator's, what went is the profile's.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from benchmarks.traced_steps import fit_steps, read_steps
from kunserve.bench.compare.simulated.scenario import Scenario
from kunserve.bench.compare.simulated.simulation import simulate
from kunserve.bench.compare.systems import find_system
from kunserve.bench.metrics import RunMetrics, compute_metrics
from kunserve.bench.runfile import Run, read_run
from kunserve.core.config import KunServeConfig
from kunserve.core.cost import CostCoefficients
from kunserve.model.profile import Profile, read_profile
from kunserve.server.command import config_from_flags, serve_command
from kunserve.sim.costs import cpu_profile
from kunserve.sim.models import find_model
from kunserve.workload.workload import Lengths, Workload

Steps: TypeAlias = tuple[CostCoefficients, CostCoefficients]
"""What steps cost in company of other instances, and alone."""

ROWS: tuple[tuple[str, Callable[[RunMetrics], float]], ...] = (
    ("TTFT P50 (s)", lambda m: m.ttft.median_s),
    ("TTFT P90 (s)", lambda m: m.ttft.percentile_s(90.0)),
    ("TTFT P99 (s)", lambda m: m.ttft.percentile_s(99.0)),
    ("TPOT P50 (s)", lambda m: m.tpot.median_s),
    ("TPOT P99 (s)", lambda m: m.tpot.percentile_s(99.0)),
    ("output tokens/s", lambda m: m.output_throughput),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One number of one run, real and simulated."""

    name: str
    real: float
    simulated: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the simulations."""
        return statistics.median(self.simulated)

    @property
    def error(self) -> float:
        """Of the median, as a share of what was real."""
        return self.median / self.real - 1.0


def config_of(run: Run) -> KunServeConfig:
    """The real server's settings, from its own flags."""
    flags = str(dict(run.config)["serve"]).split()
    return config_from_flags(serve_command.make_context("serve", flags).params)


def workload_of(run: Run, generator: random.Random | None, jitter_s: float) -> Workload:
    """The requests that the real run sent; with a generator, each a little earlier or later."""
    records = sorted(run.records, key=lambda record: record.planned_s)
    moments = [record.planned_s for record in records]
    if generator is not None:
        moments = sorted(
            max(0.0, moment + generator.uniform(-jitter_s, jitter_s)) for moment in moments
        )
    lengths = Lengths(
        tuple(record.input_tokens for record in records),
        tuple(record.asked_output_tokens for record in records),
        "a real run",
    )
    return Workload(tuple(moments), lengths, run.provenance)


def predict(
    run: Run, profile: Profile, steps: Steps, num_runs: int, jitter_s: float
) -> list[Prediction]:
    """Simulate the run's cluster under its requests, with these step times."""
    config = config_of(run)
    scenario = Scenario(
        profile=cpu_profile(
            find_model(profile.subject.model),
            *steps,
            config.instance.block_size,
            config.instance.memory_bytes,
        ),
        num_instances=config.cluster.num_instances,
        workload=workload_of(run, None, 0.0),
        scheduler=replace(config.scheduler, cost=profile.coefficients),
    )
    system = find_system(config.overload.policy)
    generator = random.Random(0)
    found: list[RunMetrics] = []
    for number in range(num_runs):
        moved = workload_of(run, generator if number else None, jitter_s)
        found.append(simulate(system, replace(scenario, workload=moved)).metrics)
    real = compute_metrics(run.records, run.duration_s)
    return [Prediction(name, value(real), tuple(value(m) for m in found)) for name, value in ROWS]


def main() -> None:
    """One table per run file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="results of overload_curve (JSONL)")
    parser.add_argument("--profile", type=Path, required=True, help="of `kunserve profile`")
    parser.add_argument("--num-runs", type=int, default=15)
    parser.add_argument("--jitter-ms", type=float, default=5.0)
    options = parser.parse_args()
    profile = read_profile(options.profile)
    for path in options.runs:
        run = read_run(path)
        print(f"\n{path.stem}: {len(run.records)} requests, {dict(run.config)['serve']}")
        sources: list[tuple[str, Steps]] = [("by the profile", (profile.serving, profile.alone))]
        trace = path.with_suffix(".trace.json")
        if trace.exists():
            sources.append(("by its own steps", fit_steps(read_steps(trace))))
        for name, steps in sources:
            rows = predict(run, profile, steps, options.num_runs, options.jitter_ms / 1e3)
            show(name, rows)


def show(name: str, rows: list[Prediction]) -> None:
    """Print one table."""
    print(f"{name:18}{'real':>9}{'simulated':>11}{'range':>20}{'error':>9}")
    for row in rows:
        low, high = min(row.simulated), max(row.simulated)
        print(
            f"{row.name:18}{row.real:9.3f}{row.median:11.3f}"
            f"{f'{low:.3f} - {high:.3f}':>20}{row.error:+9.1%}"
        )


if __name__ == "__main__":
    main()
