"""How often the map says what the simulator says, and the picture of both.

    python -m benchmarks.paper.map_agreement > benchmarks/results/map_agreement.jsonl
    python -m benchmarks.paper.map_agreement --figure

Every kept run of `recompute` and `drop` under the arrivals of real services, and every drawn burst
of `benchmarks.paper.burst_map`: how many times lower P99 TTFT is with drops, as simulated and by
the fluid model of the burst that `kunserve simulate` finds. Half a minute of one core, no
simulation.
``--figure`` draws docs/figures/burst-map.png from the results.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper import burst_map
from benchmarks.paper.kept_results import (
    BOUNDS,
    BURSTGPT,
    HEAVY,
    LONGBENCH,
    LONGBENCH_72B,
    RESULTS,
    SHAREGPT,
    figures_of,
)
from benchmarks.paper.simulated_code import code
from benchmarks.report import Report
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.output.map_figure import Panel, plot_maps
from kunserve_lab.compare.results import load
from kunserve_lab.compare.settings import SimulatedSetup, workload_of
from kunserve_lab.compare.simulated.burst_map import (
    FINE_HEIGHTS,
    FINE_LENGTHS_S,
    Mark,
    make_map,
)
from kunserve_lab.compare.simulated.projection import HELPS, Projection, capacity, expect, outlook
from kunserve_lab.compare.simulated.scenario import build_scenario

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs" / "figures" / "burst-map.png"
BENCHMARK = "map_agreement"
EXPERIMENTS = (LONGBENCH, SHAREGPT, BURSTGPT, HEAVY, LONGBENCH_72B, BOUNDS, "whole_trace_14b")
DRAWN_BASE = 0.6
"""Rate before and after the bursts of the picture, in X: about that of the experiments."""
_ON_PANEL = {
    BOUNDS: ("LongBench", 0.9),
    SHAREGPT: ("ShareGPT", 0.9),
    BURSTGPT: ("BurstGPT", 0.9),
    HEAVY: ("LongBench", 0.53),
}
"""Experiments whose runs are dots of the picture: those of its lengths and memory."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One simulated burst and what the model says of it."""

    where: str
    """An experiment, or a mix and a share of the memory of `benchmarks.paper.burst_map`."""
    height: float
    length_s: float
    simulated: float
    """Times lower that P99 TTFT is with drops, as is the next."""
    modelled: float
    least: float
    """Of the model for a burst that is a tenth lower or higher, as is the next."""
    most: float

    @property
    def agrees(self) -> bool:
        """Whether both say that drops help, or both that they do not."""
        return (self.simulated >= HELPS) == (self.modelled >= HELPS)

    @property
    def is_within(self) -> bool:
        """Whether the simulated ratio is in the model's range, as both are shown."""
        return round(self.least, 1) <= round(self.simulated, 1) <= round(self.most, 1)


def compared() -> list[Compared]:
    """The kept results."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for line in figures_of(BENCHMARK):
        settings = line["settings"]
        values.setdefault((settings["where"], settings["run"]), {})[line["name"]] = line["value"]
    return [Compared(where, **one) for (where, _), one in values.items()]


def of_experiments() -> Iterator[tuple[str, str, float, Projection]]:
    """Where, which run, times lower as simulated, and by the model."""
    for name in EXPERIMENTS:
        experiment = read_experiment(ROOT / "experiments" / f"{name}.toml")
        setup = experiment.setup
        assert isinstance(setup, SimulatedSetup), name
        runs = load(RESULTS / "simulated" / f"{name}.jsonl")
        p99_s = {(run.system, run.load, run.seed): run.ttft_p99_s for run in runs}
        for system, at, seed in p99_s:
            if system != "drop" or ("recompute", at, seed) not in p99_s:
                continue
            requests = workload_of(experiment.workload, at, seed)
            scenario = build_scenario(setup, requests)
            expected = outlook(scenario, capacity(scenario))
            assert expected is not None, (name, at)
            ratio = p99_s["recompute", at, seed] / p99_s["drop", at, seed]
            yield name, f"load {at:g}, seed {seed}", ratio, expected


def of_bursts() -> Iterator[tuple[str, str, float, Projection]]:
    """The same for drawn bursts."""
    for one in burst_map.kept():
        point = one.point
        able = burst_map.capacity(point.utilization, burst_map.mixes()[point.mix])
        expected = expect(able, one.burst, able.full_rate * burst_map.NUM_INSTANCES)
        where = _place(point.mix, point.utilization)
        run = f"{point.height:g} X, {point.length_s:g} s, draw {point.draw}"
        yield where, run, one.times_lower(), expected


def _place(mix: str, utilization: float) -> str:
    return f"{mix} at {utilization:g}"


def compare_all() -> None:
    """Every run, as lines."""
    with Report(BENCHMARK, code()) as report:
        for where, run, simulated, expected in (*of_experiments(), *of_bursts()):
            for name, value in (
                ("height", expected.height),
                ("length_s", expected.burst.length_s),
                ("simulated", simulated),
                ("modelled", expected.by_drop),
                ("least", expected.doubt[0]),
                ("most", expected.doubt[1]),
            ):
                report.add(name, value, "", where=where, run=run)


def dots(mix: str, utilization: float) -> tuple[Mark, ...]:
    """The simulated bursts of a panel: drawn ones, and those of experiments of its memory."""
    wanted = _place(mix, utilization)
    return tuple(
        Mark("", one.height, one.length_s, one.simulated)
        for one in compared()
        if wanted == (_place(*_ON_PANEL[one.where]) if one.where in _ON_PANEL else one.where)
    )


def panel(mix: str, utilization: float) -> Panel:
    """The map of a mix and a share of weights, with what was simulated."""
    able = burst_map.capacity(utilization, burst_map.mixes()[mix])
    drawn = make_map(able, DRAWN_BASE, FINE_HEIGHTS, FINE_LENGTHS_S)
    title = (
        f"{mix}, weights in {burst_map.SHARES[utilization]} of memory\n"
        f"X = {able.full_rate:.2g}/s per GPU, a request stays {able.residence_s:.0f} s"
    )
    return Panel(title, drawn, dots(mix, utilization))


def draw() -> None:
    """The picture of the document: a row for each share of weights, a column for each mix."""
    panels = [
        [panel(mix, utilization) for mix in burst_map.mixes()] for utilization in burst_map.SHARES
    ]
    note = (
        f"colours: fluid model, bursts after {DRAWN_BASE:g} X; dots: simulated with the real "
        "controller, arrivals of real services or Poisson. Qwen2.5-14B, A800"
    )
    plot_maps(panels, FIGURE, note)


def main() -> None:
    """Compare, or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", action="store_true", help="draw what the results have")
    if parser.parse_args().figure:
        draw()
    else:
        compare_all()


if __name__ == "__main__":
    main()
