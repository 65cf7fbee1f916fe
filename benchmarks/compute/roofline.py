"""Draws kernels under the roofs of their machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.compute.machine_limits import Limits

matplotlib.use("Agg")

COLORS = ("#2b6cb0", "#dd8a1b", "#2f855a", "#c53030", "#6b46c1", "#319795", "#9aa5b1", "#333333")
MARKS = {"linear": "o", "attention": "s", "quantised": "^"}
STYLE = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}


class Point(NamedTuple):
    """A kernel at one shape."""

    kind: str
    kernel: str
    label: str
    threads: int
    flops_per_byte: float
    flops_per_s: float
    dtype: str


def draw(points: Sequence[Point], limits: dict[int, Limits], path: Path) -> None:
    """One panel for each number of threads."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(6.2 * len(limits), 5.2), layout="constrained", dpi=130)
        panels = figure.subplots(1, len(limits), squeeze=False, sharey=True)[0]
        for axis, (threads, found) in zip(panels, limits.items(), strict=True):
            _panel(axis, [p for p in points if p.threads == threads], found)
            axis.set_title(f"{threads} thread{'s' if threads > 1 else ''}", loc="left")
        panels[0].set_ylabel("GFLOP/s")
        figure.savefig(path)


def _panel(axis: Axes, points: Sequence[Point], limits: Limits) -> None:
    x = np.geomspace(0.8, 6000, 200)
    for dtype, line in (("bfloat16", "-"), ("int8", "--")):
        roof = [min(limits.flops[dtype], limits.bytes_per_s * at) / 1e9 for at in x]
        name = f"{limits.bytes_per_s / 1e9:.0f} GB/s, {limits.flops[dtype] / 1e9:.0f} G/s {dtype}"
        axis.plot(x, roof, line, color="#555555", linewidth=1.2, label=name)
    kernels = list(dict.fromkeys((point.kind, point.kernel) for point in points))
    for number, (kind, kernel) in enumerate(kernels):
        some = [point for point in points if (point.kind, point.kernel) == (kind, kernel)]
        axis.plot(
            [point.flops_per_byte for point in some],
            [point.flops_per_s / 1e9 for point in some],
            MARKS[kind],
            color=COLORS[number % len(COLORS)],
            markersize=4.5,
            label=kernel if kind == "attention" else f"{kernel} ({kind})",
        )
        for point in some:
            axis.annotate(
                point.label,
                (point.flops_per_byte, point.flops_per_s / 1e9),
                fontsize=5,
                color="#777777",
                xytext=(3, -5),
                textcoords="offset points",
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP for each byte read from memory")
    axis.grid(color="#e4e4e4", linewidth=0.6)
    axis.legend(frameon=False, fontsize=6.5, loc="lower right")
