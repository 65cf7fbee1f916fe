"""Bursts of known height and length, simulated with and without drops.

    python -m benchmarks.paper.burst_map [--draws N] >> benchmarks/results/burst_map.jsonl
    python -m benchmarks.paper.burst_map --table

For four mixes of lengths and two shares of memory that weights take: one burst in Poisson arrivals
on four instances of Qwen2.5-14B on A800, under `recompute`, under `drop`, and under drops that are
made however many requests wait (`policy/drop/worth.py` says why `drop` does otherwise). A point
that the results have already is not run again. A draw of all takes a quarter of an hour of one
core. What the fluid model says of the same bursts, and the picture of both:
`benchmarks.paper.map_agreement`.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.markdown import Row, markdown
from benchmarks.paper.kept_results import figures_of
from benchmarks.paper.simulated_code import code
from benchmarks.report import Report, Setting
from kunserve_lab.compare.settings import SimulatedSetup
from kunserve_lab.compare.simulated.scenario import Scenario, build_scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.fluid import AFTER_S, BEFORE_S, Capacity, capacity_of
from kunserve_lab.sim.steady import mix_of
from kunserve_lab.workload.burst import Burst, find_burst
from kunserve_lab.workload.bursty import burst_arrivals
from kunserve_lab.workload.data.catalog import locate
from kunserve_lab.workload.lengths import burstgpt_lengths, clip_total, sample_lengths
from kunserve_lab.workload.traces import read_lengths
from kunserve_lab.workload.workload import Lengths, Workload

BENCHMARK = "burst_map"
NUM_INSTANCES = 4
MAX_SEQS = 1024
BASE = 0.5
"""Rate before and after the burst, in X."""
POINTS = ((1.5, 60.0), (2.0, 20.0), (3.0, 45.0))
"""Height in X, and length in seconds."""
SHARES = {0.9: "36 %", 0.53: "63 %"}
"""How much of the memory weights take, by how much of the GPU's memory is used."""
UTILIZATIONS = tuple(SHARES)
AT_ONCE = "drop-at-once"
"""`drop` without a bound on what waits beside what a drop frees."""
NEVER_FULL = 0.8
"""Peak KV use of `recompute` below which nothing is dropped, and `drop` need not be run."""
SYSTEMS = {name: find_system(name) for name in ("recompute", "drop")}
SYSTEMS[AT_ONCE] = replace(
    SYSTEMS["drop"],
    name=AT_ONCE,
    overload=replace(SYSTEMS["drop"].overload, max_queue_per_gain=math.inf),
)
_DROPPING = AT_ONCE, "drop"
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
    draw: int = 0
    """Of arrivals and lengths."""


def points(num_draws: int) -> Iterator[Point]:
    """One of each panel after the other, so that a run that is broken off has some of all."""
    for draw in range(num_draws):
        for height, length_s in POINTS:
            for utilization in UTILIZATIONS:
                for mix in mixes():
                    yield Point(mix, utilization, height, length_s, draw)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A point, the burst that is found in its requests, and what drops did."""

    point: Point
    burst: Burst
    p99_s: dict[str, float]
    """P99 TTFT by system."""
    output: dict[str, float]
    """Output tokens per second by system."""
    num_drops: dict[str, float]
    """Of the systems that drop."""

    def times_lower(self, system: str = "drop") -> float:
        """P99 TTFT of `recompute` over that of the system."""
        return self.p99_s["recompute"] / self.p99_s[system]

    def throughput(self, system: str = "drop") -> float:
        """Output tokens per second of the system over those of `recompute`."""
        return self.output[system] / self.output["recompute"]


def kept() -> list[Simulated]:
    """The points that the results have whole; a run that was broken off left a part of one."""
    values: dict[Point, dict[str, float]] = {}
    for line in figures_of(BENCHMARK):
        values.setdefault(Point(**line["settings"]), {})[line["name"]] = line["value"]
    return [
        Simulated(
            point,
            Burst(BEFORE_S, one["burst length"], one["burst rate"], one["base rate"]),
            {name: one[f"{name} P99 TTFT"] for name in SYSTEMS},
            {name: one[f"{name} output"] for name in SYSTEMS},
            {name: one[f"{name} drops"] for name in _DROPPING},
        )
        for point, one in values.items()
        if f"{_DROPPING[-1]} drops" in one
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
    seed = point.draw
    arrivals = burst_arrivals(*rates, BEFORE_S, point.length_s, AFTER_S, seed=seed)
    lengths = sample_lengths(mixes()[point.mix], len(arrivals), seed=seed)
    return build_scenario(setup_of(point.utilization), Workload(arrivals, lengths, "one burst"))


def measure(report: Report, point: Point) -> None:
    """The point's burst as it can be found, and what each system made of it."""
    full_rate = capacity(point.utilization, mixes()[point.mix]).full_rate * NUM_INSTANCES
    scenario = scenario_of(point, full_rate)
    settings: dict[str, Setting] = {
        "mix": point.mix,
        "utilization": point.utilization,
        "height": point.height,
        "length_s": point.length_s,
        "draw": point.draw,
    }
    burst = find_burst(scenario.workload, full_rate)
    assert burst is not None, point
    report.add("burst rate", burst.rate, "requests/s", **settings)
    report.add("burst length", burst.length_s, "s", **settings)
    report.add("base rate", burst.base_rate, "requests/s", **settings)
    recompute = simulate(SYSTEMS["recompute"], scenario)
    is_full = _peak_use(recompute) >= NEVER_FULL
    for name, system in SYSTEMS.items():
        result = simulate(system, scenario) if is_full and system.drops else recompute
        report.add(f"{name} P99 TTFT", result.metrics.ttft.percentile_s(99.0), "s", **settings)
        report.add(f"{name} output", result.metrics.output_throughput, "tokens/s", **settings)
        if system.drops:
            report.add(f"{name} drops", result.num_drops, "", **settings)


def _peak_use(result: SimResult) -> float:
    return max(sample.kv_usage or 0.0 for sample in result.run.samples)


def table() -> list[Row]:
    """A row for each kind of burst in which a drop was made, and below them the least of all."""
    known = kept()
    kinds: dict[str, list[Simulated]] = {}
    for one in known:
        if any(one.num_drops[name] for name in _DROPPING):
            kinds.setdefault(_kind(one.point), []).append(one)
    figures = [(name, figure) for figure in ("P99 TTFT", "output") for name in _DROPPING]
    rows: list[Row] = [("weights, burst", *(f"{figure}, `{name}`" for name, figure in figures))]
    for kind, some in sorted(kinds.items()):
        rows.append((kind, *(_spread(_ratios(some, *column)) for column in figures)))
    least = (f"{min(_ratios(known, *column)):.2f}x" for column in figures)
    return [*rows, (f"**least of all {len(known)}**", *least)]


def _kind(point: Point) -> str:
    """Bursts that differ in their lengths and draws only."""
    return f"{SHARES[point.utilization]}, {point.height:g} X for {point.length_s:g} s"


def _ratios(some: Sequence[Simulated], name: str, figure: str) -> list[float]:
    """Times that P99 TTFT is lower than under `recompute`, or its share of the throughput."""
    is_p99 = figure == "P99 TTFT"
    return [one.times_lower(name) if is_p99 else one.throughput(name) for one in some]


def _spread(ratios: Sequence[float]) -> str:
    """The median, and least to most."""
    middle = statistics.median(ratios)
    return f"{middle:.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    """Every point that is missing, or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1, help="of each point")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is kept")
    options = parser.parse_args()
    if options.table:
        print(markdown(table()))
        return
    known = {one.point for one in kept()}
    with Report(BENCHMARK, code()) as report:
        for point in points(options.draws):
            if point not in known:
                measure(report, point)


if __name__ == "__main__":
    main()
