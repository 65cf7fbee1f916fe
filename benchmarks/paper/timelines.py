"""A run over time, of each workload: memory, TTFT and throughput (the paper's figures 2b and 12).

    python -m benchmarks.paper.timelines [NAME ...]
    python -m benchmarks.paper.timelines --figure timelines.png

The first draw of each workload of the claims, at their load. A line of
benchmarks/results/timelines.jsonl per workload and system, in up to a hundred parts of the run: KV
that is wanted, in use and to be had, as multiples of the undropped memory; the mean TTFT of the
requests sent in that part; output tokens per second. ``--figure`` draws what is kept. Five
workloads take about ten minutes of one core.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.kept_results import FIXED, RESULTS
from benchmarks.paper.reproduction import experiments
from benchmarks.paper.simulated_code import code
from kunserve_lab.bench.runfile import Run
from kunserve_lab.bench.timeline import Array, bin_width_s, binned, output_rate, ttft_points
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.settings import SimulatedSetup, workload_of
from kunserve_lab.compare.simulated.scenario import build_scenario
from kunserve_lab.compare.simulated.simulation import simulate

matplotlib.use("Agg")
SYSTEMS = ("recompute", "drop", "endless")
DRAWN = ("recompute", "drop")
PARTS = 100
"""Of a run, at most."""
COLORS = {"recompute": "#c53030", "drop": "#2b6cb0", "endless": "#9aa5b1"}


def kept_path() -> Path:
    """Where the lines are."""
    return RESULTS / "timelines.jsonl"


def kept() -> list[dict[str, Any]]:
    """Every line; of one workload and system the latest."""
    path = kept_path()
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return list({(line["workload"], line["system"]): line for line in lines}.values())


def timelines(name: str) -> Iterator[dict[str, Any]]:
    """A workload of ``FIXED`` under every system."""
    experiment = read_experiment(experiments()[FIXED[name]])
    setup, at = experiment.setup, max(experiment.loads)
    assert isinstance(setup, SimulatedSetup), name
    scenario = build_scenario(setup, workload_of(experiment.workload, at, 0))
    profile = scenario.profile
    blocks = scenario.num_instances * profile.spec.kv_units // profile.spec.num_layers
    for system in SYSTEMS:
        run = simulate(experiment.system(system), scenario).run
        yield {
            "workload": name,
            "experiment": FIXED[name],
            "system": system,
            "load": at,
            "seed": 0,
            "code": code(),
            **series(run, blocks),
        }


def series(run: Run, blocks: int) -> dict[str, Any]:
    """What is kept of a run in a cluster of so many blocks: all of one length."""
    width_s = bin_width_s(run.duration_s, PARTS)
    times_s, seconds = ttft_points(run.records)
    samples = [one for one in run.samples if one.time_s <= run.duration_s]
    moments = np.array([one.time_s for one in samples])

    def of(field: str) -> list[float | None]:
        values = np.array([getattr(one, field) for one in samples], dtype=np.float64)
        return _rounded(binned(moments, values / blocks, run.duration_s, width_s).mean, 3)

    return {
        "part_s": width_s,
        "wanted": of("kv_demand_blocks"),
        "used": of("kv_used_blocks"),
        "capacity": of("kv_capacity_blocks"),
        "ttft_s": _rounded(binned(times_s, seconds, run.duration_s, width_s).mean, 2),
        "tokens_per_s": _rounded(output_rate(run.records, run.duration_s, width_s).values, 0),
    }


def _rounded(values: Array, digits: int) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), digits) for value in values]


def draw(lines: Sequence[dict[str, Any]]) -> Figure:
    """A row for each workload: memory, mean TTFT, throughput."""
    names = list(dict.fromkeys(line["workload"] for line in lines))
    figure = Figure(figsize=(11.0, 2.0 * len(names)), layout="constrained", dpi=90)
    rows = figure.subplots(len(names), 3, squeeze=False)
    for name, (memory, ttft, tokens) in zip(names, rows, strict=True):
        for line in (one for one in lines if one["workload"] == name):
            system = line["system"]
            if system in DRAWN:
                _draw_line(memory, line, "capacity", linestyle=":")
                _draw_line(memory, line, "used")
            _draw_line(ttft, line, "ttft_s", marker=".", label=system)
            _draw_line(tokens, line, "tokens_per_s")
            if system == "endless":
                _draw_line(memory, line, "wanted", linestyle="--")
        memory.set_ylabel(name)
    for axis, title in zip(
        rows[0],
        ("KV memory, of the undropped: used, had (dotted), wanted (dashed)", "mean TTFT (s)",
         "output tokens/s"),
        strict=True,
    ):  # fmt: skip
        axis.set_title(title, fontsize=8)
    rows[0][1].legend(frameon=False, fontsize=7)
    for axis in rows.ravel():
        axis.tick_params(labelsize=7)
        axis.set_ylim(bottom=0)
    figure.supxlabel("seconds", fontsize=8)
    return figure


def _draw_line(axis: Axes, line: dict[str, Any], of: str, **style: Any) -> None:
    values = [float("nan") if value is None else value for value in line[of]]
    times_s = line["part_s"] * (np.arange(len(values)) + 0.5)
    axis.plot(times_s, values, color=COLORS[line["system"]], linewidth=1.0, **style)


def main() -> None:
    """Run the workloads that are named, or all; or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIXED)}")
    parser.add_argument("--figure", type=Path, help="run nothing, draw what is kept")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(FIXED))
    if unknown:
        parser.error(f"no workload {unknown[0]!r}; there are: {', '.join(FIXED)}")
    if options.figure is not None:
        draw(kept()).savefig(options.figure)
        return
    for name in options.names or FIXED:
        made = list(timelines(name))
        others = [line for line in kept() if line["workload"] != name]
        lines = [json.dumps(line, separators=(",", ":")) for line in others + made]
        kept_path().write_text("".join(f"{line}\n" for line in lines))
        print(f"{name}: {len(made)} systems", file=sys.stderr)


if __name__ == "__main__":
    main()
