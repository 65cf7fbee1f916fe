"""The ablation within the burst alone: requests that arrive while it lasts, and no others.

    python -m benchmarks.paper.inside_burst >> benchmarks/results/inside_burst.jsonl
    python -m benchmarks.paper.inside_burst --table

The paper's Figure 14 looks at its burst; our other figures are of all requests of the window. The
burst is the span in which most more arrives than the cluster sustains, as `kunserve simulate --map`
finds it. A run that the results have is not run again, but with `--again` if it is of other code.
Five draws of both ablations take a quarter of an hour of one core.
"""

import argparse
import statistics
from collections.abc import Iterator

import numpy as np

from benchmarks.markdown import Row, markdown
from benchmarks.paper.kept_results import ranged, runs_of
from benchmarks.paper.points import ROOT, Named, Point, RunKey, kept, run_missing
from kunserve_lab.bench.metrics import ttft_s
from kunserve_lab.compare.experiment import Experiment
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.simulated.projection import capacity, outlook
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.workload.burst import Burst

BENCHMARK = "inside_burst"
ABLATIONS = {"LongBench": "ablation", "heavy weights": "ablation_heavy"}
"""What a row is called -> its experiment. Their variants are the same."""
SYSTEMS = ("recompute", "drop-basic", "drop-no-lookahead", "drop", "endless")
SEEDS = range(5)
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


def points() -> Iterator[Point]:
    """The load of each ablation, lengths capped as there."""
    for name, experiment in ABLATIONS.items():
        known = _experiment(experiment)
        yield Point(name, experiment, max(known.loads), known.workload.max_total_tokens)


def figures(system: str, scenario: Scenario) -> Iterator[Named]:
    """The burst, and percentiles of TTFT over the requests that arrive in it."""
    burst = burst_of(scenario)
    result = simulate(_experiment("ablation").system(system), scenario)
    times = sorted(
        ttft_s(one) or float("inf")
        for one in result.run.records
        if burst.start_s <= one.sent_s <= burst.start_s + burst.length_s
    )
    yield "burst begin", burst.start_s, "s"
    yield "burst length", burst.length_s, "s"
    yield "requests", len(times), ""
    for percentile in PERCENTILES:
        yield f"P{percentile:g} TTFT", float(np.percentile(times, percentile)), "s"


def burst_of(scenario: Scenario) -> Burst:
    """The greatest one of the scenario's requests."""
    expected = outlook(scenario, capacity(scenario))
    assert expected is not None, scenario.workload
    return expected.burst


def _experiment(name: str) -> Experiment:
    return read_experiment(ROOT / "experiments" / f"{name}.toml")


def table() -> list[Row]:
    """How many times lower TTFT is than under `recompute` within the burst, and in all requests."""
    rows: list[Row] = [
        ("requests", "length (s)", "system", *(f"P{p:g}" for p in PERCENTILES), "P99 of all")
    ]
    runs = kept(BENCHMARK)
    for name, experiment in ABLATIONS.items():
        lengths = (runs[RunKey(name, seed, "drop")].figures["burst length"] for seed in SEEDS)
        first = name, f"{statistics.median(lengths):.0f}"
        for system in SYSTEMS[1:]:
            cells = (ranged(lower(name, system, p), "x") for p in PERCENTILES)
            whole = runs_of(experiment)
            of_all = (
                ranged(whole.gains("recompute", "ttft_p99_s", system), "x")
                if whole.has(system)
                else "-"
            )
            rows.append((*first, f"`{system}`", *cells, of_all))
    return rows


def lower(name: str, system: str, percentile: float) -> list[float]:
    """How many times lower the system has it within the burst than `recompute`, draw by draw."""
    runs = kept(BENCHMARK)
    figure = f"P{percentile:g} TTFT"
    return [
        runs[RunKey(name, seed, "recompute")].figures[figure]
        / runs[RunKey(name, seed, system)].figures[figure]
        for seed in SEEDS
    ]


def main() -> None:
    """Every run that is missing, or the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="also what is kept of other code")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is kept")
    options = parser.parse_args()
    if options.table:
        print(markdown(table()))
        return
    wanted = ((point, seed, system) for point in points() for seed in SEEDS for system in SYSTEMS)
    run_missing(BENCHMARK, wanted, kept(BENCHMARK), again=options.again, run=figures)


if __name__ == "__main__":
    main()
