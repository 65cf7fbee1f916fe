"""Figures of simulated comparisons beside those that every run has."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from kunserve.bench.simulate.run import SimResult
from kunserve.bench.simulate.table import SLO_FACTORS, violations

matplotlib.use("Agg")

_COLORS = ("#c53030", "#2b6cb0", "#dd8a1b", "#2f855a", "#6b46c1", "#319795", "#9aa5b1")


def plot_violations(results: Sequence[SimResult], path: Path) -> None:
    """SLO violations over the scale factor, a line per system."""
    figure = Figure(figsize=(5.2, 3.2), layout="constrained", dpi=130)
    axis = figure.subplots()
    for place, (result, shares) in enumerate(zip(results, violations(results), strict=True)):
        axis.plot(
            SLO_FACTORS,
            [share * 100 for share in shares],
            color=_COLORS[place % len(_COLORS)],
            marker=".",
            label=result.run.label,
        )
    axis.set_xlabel("SLO scale (times the best P50)")
    axis.set_ylabel("requests that miss TTFT or TPOT (%)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    _source(figure, results)
    figure.savefig(path)


def plot_loads(by_scale: Sequence[tuple[float, Sequence[SimResult]]], path: Path) -> None:
    """P99 TTFT, P50 TPOT and use of memory over the load: where dropping helps, and how widely."""
    figure = Figure(figsize=(11.0, 3.4), layout="constrained", dpi=130)
    panels = figure.subplots(1, 3)
    labels = [result.run.label for result in by_scale[0][1]]
    scales = [scale for scale, _ in by_scale]
    for place, label in enumerate(labels):
        color = _COLORS[place % len(_COLORS)]
        column = [results[place] for _, results in by_scale]
        curves = (
            [r.metrics.ttft.percentile_s(99.0) for r in column],
            [r.metrics.tpot.median_s * 1e3 for r in column],
            [r.metrics.output_throughput for r in column],
        )
        for axis, values in zip(panels, curves, strict=True):
            axis.plot(scales, values, color=color, marker=".", label=label)
    titles = ("P99 TTFT (s)", "P50 TPOT (ms)", "output tokens/s")
    for axis, title in zip(panels, titles, strict=True):
        axis.set_title(title, fontsize=9.5)
        axis.set_xlabel("load (times the trace's rate)")
        axis.grid(alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].legend(frameon=False, fontsize=8)
    _source(figure, by_scale[0][1])
    figure.savefig(path)


def _source(figure: Figure, results: Sequence[SimResult]) -> None:
    text = results[0].run.provenance
    lines = [text[at : at + 110] for at in range(0, len(text), 110)]
    figure.supxlabel("simulated; " + "\n".join(lines), fontsize=6, color="#666666")
