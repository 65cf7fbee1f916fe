"""How much drops help where weights fill the memory, but a token uses few of them.

    python -m benchmarks.paper.sparse_models > benchmarks/results/sparse_models.jsonl
    python -m benchmarks.paper.sparse_models --figure

For the models of `experiments/sparse_*.toml`, two dense and two sparse: what a cluster sustains
when its memory is full, what a drop adds, where the time of a step goes, and how high the bursts of
the experiments are: those of a trace, and those that are drawn at heights in X. By step times and
sizes alone, in seconds; `python -m benchmarks.paper.reproduction sparse_qwen3_235b` runs an
experiment.
``--figure`` draws docs/figures/sparse-models.png from the kept results of both.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.kept_results import RESULTS, figures_of
from benchmarks.report import Report
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve_lab.compare.experiment import Experiment
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.groups import by_load
from kunserve_lab.compare.results import RunResult, load
from kunserve_lab.compare.settings import SimulatedSetup, workload_of
from kunserve_lab.compare.simulated.full_rate import full_capacity, with_full_rate
from kunserve_lab.compare.simulated.projection import capacity, expect, outlook
from kunserve_lab.compare.simulated.scenario import build_scenario
from kunserve_lab.sim.fluid import Capacity
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.workload.burst import Burst

matplotlib.use("Agg")

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs" / "figures" / "sparse-models.png"
BENCHMARK = "sparse_models"
NAMES = {
    "sparse_72b": "Qwen2.5-72B, dense",
    "sparse_405b": "Llama-3.1-405B, dense",
    "sparse_qwen3_235b": "Qwen3-235B-A22B",
    "sparse_deepseek_v3": "DeepSeek-V3",
}
"""Experiments, and what their models are called in tables."""
RIDGES = {
    name.replace("sparse_", "sparse_ridge_"): title
    for name, title in NAMES.items()
    if name in ("sparse_72b", "sparse_qwen3_235b")
}
"""Models under drawn bursts: those whose memory fills in one of 45 s at all."""
RIDGE, RIDGE_S, RIDGE_BASE = (1.1, 1.3, 1.5), 45.0, 0.6
"""Heights in X where drops gain most, the bursts' length, and the rate before and after them."""
SYSTEMS = ("recompute-rr", "recompute", "drop", "endless")


def experiment_of(name: str) -> tuple[Experiment, SimulatedSetup]:
    """The experiment and its cluster."""
    experiment = read_experiment(ROOT / "experiments" / f"{name}.toml")
    assert isinstance(experiment.setup, SimulatedSetup), name
    return experiment, experiment.setup


def throughput(able: Capacity, level: int) -> float:
    """Requests per second of an instance whose memory is full, at this depth of drops."""
    mix, table = able.mix, able.table
    each = mix.mean_input_tokens / mix.mean_output_tokens
    num = float(able.pools_tokens[level] - able.unused_tokens) / mix.context_tokens
    num = min(num, table.max_seqs, table.max_tokens / (1 + each))
    step_s = table.seconds(np.array([level]), np.array([num]), np.array([num * each]))[0]
    return float(num / (mix.mean_output_tokens * step_s))


def parts_of_a_step(profile: InstanceProfile, able: Capacity) -> dict[str, float]:
    """Shares of a step of decodes alone, with full memory: what adds up to all of it."""
    num, context = round(able.num_full), int(able.mix.context_tokens)
    layers, times = profile.spec.num_layers, profile.times

    def step_s(num_decodes: int, num_context: int) -> float:
        chunks = [Chunk(RequestId(""), num_context, 1, True)] * num_decodes
        return times.stage_s(chunks, layers, True)

    whole_s, empty_s = step_s(num, context), step_s(num, 0)
    matmul_s = layers * times.matmul_s(num)  # type: ignore[attr-defined]
    return {
        "weights": matmul_s / whole_s,
        "KV": (whole_s - empty_s) / whole_s,
        "the rest": (empty_s - matmul_s) / whole_s,
    }


def describe(report: Report, name: str) -> None:
    """One experiment's cluster and bursts."""
    experiment, setup = experiment_of(name)
    first = build_scenario(setup, workload_of(experiment.workload, experiment.loads[0], 0))
    able, profile = capacity(first), first.profile
    spec, num = profile.spec, setup.num_instances
    weights = spec.num_layers * spec.layer_bytes
    report.add("weights", 100 * weights / spec.memory_bytes, "% of memory", model=name)
    report.add("KV", profile.pool_tokens, "tokens", model=name)
    report.add("requests that fill it", able.num_full, "", model=name)
    report.add("X", able.full_rate * num, "requests/s", model=name)
    report.add("stay", able.residence_s, "s", model=name)
    report.add("compute alone", able.compute_rate / able.full_rate, "X", model=name)
    for part, share in parts_of_a_step(profile, able).items():
        report.add(f"decode step: {part}", 100 * share, "%", model=name)
    for level in range(1, len(able.pools_tokens)):
        gained = able.pools_tokens[level] / able.pools_tokens[0] - 1
        more = throughput(able, level) / throughput(able, 0) - 1
        report.add("KV gained", 100 * gained, "%", model=name, stages=2**level)
        report.add("throughput gained", 100 * more, "%", model=name, stages=2**level)
    for height in RIDGE:
        rates = height * able.full_rate * num, RIDGE_BASE * able.full_rate * num
        one = expect(able, Burst(0.0, RIDGE_S, *rates), able.full_rate * num)
        report.add("on the ridge, as modelled", one.by_drop, "x", model=name, load=height)
    for at in experiment.loads:
        describe_bursts(report, name, at, able)


def describe_bursts(report: Report, name: str, at: float, able: Capacity) -> None:
    """The bursts of one load: the mean over its draws."""
    experiment, setup = experiment_of(name)
    found = []
    for seed in experiment.seeds:
        requests = workload_of(experiment.workload, at, seed)
        one = outlook(build_scenario(setup, requests), able)
        assert one is not None, (name, at, seed)
        found.append(one)
    for what, values, unit in (
        ("height", [one.height for one in found], "X"),
        ("length", [one.burst.length_s for one in found], "s"),
        ("by drop, as modelled", [one.by_drop for one in found], "x"),
        ("by endless memory, as modelled", [one.by_endless for one in found], "x"),
    ):
        report.add(what, statistics.mean(values), unit, model=name, load=at)


def describe_ridge(report: Report, name: str) -> None:
    """The drawn bursts of one experiment, as they were asked for."""
    experiment, setup = experiment_of(name)
    able = full_capacity(setup, experiment.workload)
    asked = with_full_rate(setup, experiment.workload)
    assert asked.burst_s is not None, name
    report.add("X", asked.rate, "requests/s", model=name)
    report.add("before", asked.before_s, "s", model=name)
    report.add("length", asked.burst_s, "s", model=name)
    for height in experiment.loads:
        rates = height * asked.rate, asked.base * asked.rate
        one = expect(able, Burst(asked.before_s, asked.burst_s, *rates), asked.rate)
        for what, value, unit in (
            ("height", height, "X"),
            ("length", asked.burst_s, "s"),
            ("by drop, as modelled", one.by_drop, "x"),
            ("by endless memory, as modelled", one.by_endless, "x"),
        ):
            report.add(what, value, unit, model=name, load=height)


def kept() -> dict[tuple[str, float | None, str], float]:
    """(experiment, load, name) -> figure; stages are part of the name."""
    found = {}
    for line in figures_of(BENCHMARK):
        settings = line["settings"]
        stages = f", {settings['stages']}" if "stages" in settings else ""
        found[settings["model"], settings.get("load"), line["name"] + stages] = line["value"]
    return found


def p99_s(runs: Sequence[RunResult]) -> dict[int, float]:
    """By seed."""
    return {run.seed: run.ttft_p99_s for run in runs}


def draw() -> None:
    """P99 TTFT of every burst, a panel for each model: medians, and the span of the draws.

    Above those of the trace, below those that were drawn.
    """
    figures = kept()
    figure = Figure(figsize=(13, 6.4), layout="constrained", dpi=120)
    axes = figure.subplots(2, len(NAMES), sharey=True)
    for axis, (name, title) in zip(axes[0], NAMES.items(), strict=True):
        share, gained = figures[name, None, "weights"], figures[name, None, "KV gained, 2"]
        axis.set_title(f"{title}\nweights {share:.0f} % of memory, a pair +{gained:.0f} % KV",
                       loc="left", fontsize=9)  # fmt: skip
    for row, names, what in zip(axes, (NAMES, RIDGES), ("a trace's", "drawn"), strict=True):
        by_title = {title: name for name, title in names.items()}
        for axis, title in zip(row, NAMES.values(), strict=True):
            axis.set_yscale("log")
            axis.grid(axis="y", alpha=0.3)
            axis.set_visible(title in by_title)
            if title in by_title:
                _draw_bursts(axis, by_title[title], figures)
        row[0].set_ylabel(f"{what} bursts: P99 TTFT (s)", fontsize=9)
    axes[0][-1].legend(frameon=False, fontsize=8)
    note = (
        "bursts: height in what full memory sustains (X), and length; medians and span of the "
        "draws; lower is better; simulated"
    )
    figure.supxlabel(note, fontsize=8, color="#666666")
    figure.savefig(FIGURE)


_COLORS = dict(zip(SYSTEMS, ("#9aa5b1", "#c53030", "#2b6cb0", "#2f855a"), strict=True))


def _draw_bursts(
    axis: Axes, name: str, figures: dict[tuple[str, float | None, str], float]
) -> None:
    groups = by_load(load(RESULTS / "simulated" / f"{name}.jsonl"))
    places = np.arange(len(groups))
    for number, system in enumerate(SYSTEMS):
        values = [sorted(p99_s(group.by_system[system]).values()) for group in groups]
        middle = np.array([statistics.median(one) for one in values])
        span = [middle - [one[0] for one in values], [one[-1] for one in values] - middle]
        axis.bar(
            places + (number - 1.5) * 0.2,
            middle,
            0.18,
            yerr=span,
            label=system,
            color=_COLORS[system],
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )
    axis.set_xticks(
        places,
        [
            f"{figures[name, group.load, 'height']:.1f} X, "
            f"{figures[name, group.load, 'length']:.0f} s"
            for group in groups
        ],
        fontsize=8,
    )
    axis.set_xlim(-0.6, max(1.0, len(groups) - 0.4))


def main() -> None:
    """Figures as lines, or the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", action="store_true", help="draw what the results have")
    if parser.parse_args().figure:
        draw()
        return
    with Report(BENCHMARK) as report:
        for name in NAMES:
            describe(report, name)
        for name in RIDGES:
            describe_ridge(report, name)


if __name__ == "__main__":
    main()
