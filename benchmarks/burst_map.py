"""Bursts of known height and length, simulated with and without drops.

    python -m benchmarks.burst_map >> benchmarks/results/burst_map.jsonl

For four mixes of lengths and two shares of memory that weights take: one burst in Poisson arrivals
on four instances of Qwen2.5-14B on A800, under `recompute` and `drop`. A point that the results
have already is not run again. All of them take ten minutes of one core. What the fluid model says
of the same bursts, and the picture of both: `benchmarks.map_agreement`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.kept_results import figures_of
from benchmarks.report import Report, Setting
from kunserve.bench.compare.settings import SimulatedSetup
from kunserve.bench.compare.simulated.scenario import Scenario, build_scenario
from kunserve.bench.compare.simulated.simulation import SimResult, simulate
from kunserve.bench.compare.systems import find_system
from kunserve.sim.fluid import AFTER_S, BEFORE_S, Capacity, capacity_of
from kunserve.sim.steady import mix_of
from kunserve.workload.burst import Burst, find_burst
from kunserve.workload.bursty import burst_arrivals
from kunserve.workload.data.catalog import locate
from kunserve.workload.lengths import burstgpt_lengths, clip_total, sample_lengths
from kunserve.workload.traces import read_lengths
from kunserve.workload.workload import Lengths, Workload

BENCHMARK = "burst_map"
NUM_INSTANCES = 4
MAX_SEQS = 1024
BASE = 0.5
"""Rate before and after the burst, in X."""
POINTS = ((1.5, 60.0), (2.0, 20.0), (3.0, 45.0))
"""Height in X, and length in seconds."""
UTILIZATIONS = (0.9, 0.53)
"""Of the GPU's memory: weights take 36 and 63 % of it."""
NEVER_FULL = 0.8
"""Peak KV use of `recompute` below which nothing is dropped, and `drop` need not be run."""
_POOL = 20_000
"""Pairs of lengths where they are drawn from a distribution."""


def _chat() -> Lengths:
    """BurstGPT's shape, with outputs of 1,000 tokens on average."""
    drawn = burstgpt_lengths(_POOL, seed=0)
    longer = tuple(round(tokens * 1000 / 262) for tokens in drawn.output_tokens)
    return replace(drawn, output_tokens=longer, source=f"{drawn.source}, outputs x3.8")


def mixes() -> dict[str, Lengths]:
    """The mixes of lengths, by name."""
    return {
        "LongBench": clip_total(read_lengths(locate(Path("longbench"))), 16_384),
        "ShareGPT": clip_total(read_lengths(locate(Path("sharegpt"))), 4096),
        "BurstGPT": burstgpt_lengths(_POOL, seed=0),
        "chat": _chat(),
    }


@dataclass(frozen=True, slots=True)
class Point:
    """One burst on one cluster."""

    mix: str
    utilization: float
    height: float
    length_s: float


def points() -> Iterator[Point]:
    """One of each panel after the other, so that a run that is broken off has some of all."""
    for height, length_s in POINTS:
        for utilization in UTILIZATIONS:
            for mix in mixes():
                yield Point(mix, utilization, height, length_s)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A point, the burst that is found in its requests, and what drops did."""

    point: Point
    burst: Burst
    by_drop: float
    """Times lower that P99 TTFT is under `drop`."""


def kept() -> list[Simulated]:
    """The points that the results have."""
    values: dict[Point, dict[str, float]] = {}
    for line in figures_of(BENCHMARK):
        values.setdefault(Point(**line["settings"]), {})[line["name"]] = line["value"]
    return [
        Simulated(
            point,
            Burst(BEFORE_S, one["burst length"], one["burst rate"], one["base rate"]),
            one["recompute P99 TTFT"] / one["drop P99 TTFT"],
        )
        for point, one in values.items()
    ]


def setup_of(utilization: float) -> SimulatedSetup:
    """The cluster of one share of weights."""
    return SimulatedSetup(
        num_instances=NUM_INSTANCES, memory_utilization=utilization, max_num_seqs=MAX_SEQS
    )


def capacity(utilization: float, lengths: Lengths) -> Capacity:
    """What an instance can do for these lengths."""
    some = Workload((0.0,), lengths.take(1), "one")
    scenario = build_scenario(setup_of(utilization), some)
    return capacity_of(
        scenario.profile,
        mix_of(lengths),
        num_instances=NUM_INSTANCES,
        max_tokens=scenario.scheduler.max_num_batched_tokens,
        max_seqs=MAX_SEQS,
    )


def scenario_of(point: Point, full_rate: float) -> Scenario:
    """The point's requests: a draw of arrivals and lengths."""
    rates = BASE * full_rate, point.height * full_rate
    arrivals = burst_arrivals(*rates, BEFORE_S, point.length_s, AFTER_S, seed=0)
    lengths = sample_lengths(mixes()[point.mix], len(arrivals), seed=0)
    return build_scenario(setup_of(point.utilization), Workload(arrivals, lengths, "one burst"))


def measure(report: Report, point: Point) -> None:
    """The point's burst as it can be found, and P99 TTFT with and without drops."""
    full_rate = capacity(point.utilization, mixes()[point.mix]).full_rate * NUM_INSTANCES
    scenario = scenario_of(point, full_rate)
    settings: dict[str, Setting] = {
        "mix": point.mix,
        "utilization": point.utilization,
        "height": point.height,
        "length_s": point.length_s,
    }
    burst = find_burst(scenario.workload, full_rate)
    assert burst is not None, point
    report.add("burst rate", burst.rate, "requests/s", **settings)
    report.add("burst length", burst.length_s, "s", **settings)
    report.add("base rate", burst.base_rate, "requests/s", **settings)
    recompute = simulate(find_system("recompute"), scenario)
    is_full = _peak_use(recompute) >= NEVER_FULL
    drop = simulate(find_system("drop"), scenario) if is_full else recompute
    report.add("recompute P99 TTFT", _p99_s(recompute), "s", **settings)
    report.add("drop P99 TTFT", _p99_s(drop), "s", **settings)
    report.add("drops", drop.num_drops, "", **settings)


def _peak_use(result: SimResult) -> float:
    return max(sample.kv_usage or 0.0 for sample in result.run.samples)


def _p99_s(result: SimResult) -> float:
    return result.metrics.ttft.percentile_s(99.0)


def main() -> None:
    """Every point that is missing."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    known = {one.point for one in kept()}
    with Report(BENCHMARK) as report:
        for point in points():
            if point not in known:
                measure(report, point)


if __name__ == "__main__":
    main()
