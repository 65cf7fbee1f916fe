"""The map as a picture: colours are the fluid model, dots are given or simulated bursts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from kunserve_lab.compare.simulated.burst_map import BurstMap, Mark
from kunserve_lab.compare.simulated.projection import HELPS

matplotlib.use("Agg")

_MOST = 20.0
_COLORS = "YlGnBu"
_KEY = (
    f"dashed: inside it endless memory lowers P99 TTFT {HELPS:g}x or more; "
    "red line: above it prompts alone take all compute"
)
_TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class Panel:
    """One map of the picture."""

    title: str
    drawn: BurstMap
    marks: tuple[Mark, ...] = ()


def plot_maps(panels: Sequence[Sequence[Panel]], path: Path, note: str) -> None:
    """`draw_maps` as a file."""
    draw_maps(panels, note).savefig(path)


def draw_maps(panels: Sequence[Sequence[Panel]], note: str) -> Figure:
    """A picture of rows of maps with one scale of colours."""
    num_rows, num_columns = len(panels), len(panels[0])
    size = (3.0 + 3.0 * num_columns, 1.4 + 2.9 * num_rows)
    figure = Figure(figsize=size, layout="constrained", dpi=110)
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True)
    norm = LogNorm(1.0, _MOST)
    for row, line in zip(axes, panels, strict=True):
        for axis, panel in zip(row, line, strict=True):
            _draw(axis, panel, norm)
    for axis in axes[:, 0]:
        axis.set_ylabel("height of the burst, X")
    for axis in axes[-1]:
        axis.set_xlabel("length of the burst (s)")
    bar = figure.colorbar(
        ScalarMappable(norm, _COLORS), ax=axes, shrink=0.8, ticks=_TICKS, extend="max"
    )
    bar.ax.set_yticklabels([f"{tick:g}x" for tick in _TICKS])
    bar.ax.minorticks_off()
    bar.set_label("P99 TTFT: times lower with drops")
    figure.supxlabel(f"{_KEY}\n{note}", fontsize=7, color="#555555")
    return figure


def _draw(axis: Axes, panel: Panel, norm: LogNorm) -> None:
    drawn = panel.drawn
    where = np.array(drawn.lengths_s), np.array(drawn.heights)
    shown = np.clip(drawn.by_drop, 1.0, _MOST)
    axis.pcolormesh(*where, shown, norm=norm, cmap=_COLORS, shading="gouraud")
    if drawn.by_endless.min() < HELPS < drawn.by_endless.max():
        axis.contour(*where, drawn.by_endless, [HELPS], colors="#444444", linestyles="--")
    top = drawn.heights[-1]
    if drawn.compute_height < top:
        axis.axhline(drawn.compute_height, color="#c53030", linewidth=1)
    for mark in panel.marks:
        _mark(axis, drawn, mark, norm)
    axis.set_xscale("log")
    axis.set_xlim(drawn.lengths_s[0], drawn.lengths_s[-1])
    axis.set_ylim(drawn.heights[0], top)
    axis.xaxis.set_major_locator(FixedLocator([5, 10, 20, 30, 60, 120]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_title(panel.title, fontsize=9)


def _mark(axis: Axes, drawn: BurstMap, mark: Mark, norm: LogNorm) -> None:
    """At the border where it lies outside."""
    x = min(max(mark.length_s, drawn.lengths_s[0]), drawn.lengths_s[-1])
    y = min(max(mark.height, drawn.heights[0]), drawn.heights[-1])
    if mark.by_drop is None:
        axis.plot(x, y, "x", color="#c53030", markersize=9, markeredgewidth=2, clip_on=False)
        axis.annotate(mark.name, (x, y), (6, 4), textcoords="offset points", fontsize=8)
        return
    value = min(max(mark.by_drop, 1.0), _MOST)
    axis.scatter([x], [y], c=[value], norm=norm, cmap=_COLORS, edgecolors="black", s=46, zorder=3)
