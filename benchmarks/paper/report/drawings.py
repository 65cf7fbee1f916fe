"""The report's pictures: what each is drawn of, from kept results, and how."""

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper import timelines
from benchmarks.paper.kept_results import (
    BURSTGPT,
    FIXED,
    HEAVY,
    LONGBENCH,
    LONGBENCH_72B,
    SHAREGPT,
    Runs,
    runs_of,
)
from benchmarks.paper.kept_tables.real import P99, rate
from benchmarks.paper.map_agreement import DRAWN_BASE, dots, panel
from benchmarks.paper.report import real_bursts
from kunserve_lab.compare.output.map_figure import Panel, draw_maps
from kunserve_lab.compare.simulated.burst_map import (
    FINE_HEIGHTS,
    FINE_LENGTHS_S,
    Mark,
    make_map,
)
from kunserve_lab.compare.slo import FACTORS

matplotlib.use("Agg")

Spread: TypeAlias = tuple[float, float, float]
"""Median, least and most."""
Lines: TypeAlias = dict[str, dict[str, dict[float, Spread]]]
"""Panel -> line -> where on the axis -> what."""
DPI = 140
KEPT = "Kept"
"""Under which a picture's file keeps the digest of what it is drawn of."""
_COLORS = {
    "recompute": "#c53030",
    "recompute-rr": "#9aa5b1",
    "recompute-least": "#6b7280",
    "recompute-chunk": "#f687b3",
    "static-pp": "#6b46c1",
    "tp-pairs": "#111827",
    "drop": "#2b6cb0",
    "drop-deep": "#319795",
    "drop-basic": "#dd8a1b",
    "drop-no-lookahead": "#b7791f",
    "drop-no-priority": "#4299e1",
    "park": "#d53f8c",
    "swap": "#b7791f",
    "migrate": "#dd8a1b",
    "endless": "#2f855a",
}
_LOADS = {
    "LongBench": (LONGBENCH, "LongBench"),
    "ShareGPT": (SHAREGPT, "ShareGPT"),
    "BurstGPT-like": (BURSTGPT, "BurstGPT-like"),
    "heavy weights": (HEAVY, "heavy weights"),
    "72B": (LONGBENCH_72B, "72B"),
}
"""Panel -> the experiment over loads, and that of the claims."""
_ABLATED = ("drop-basic", "drop-no-lookahead", "drop-no-priority", "drop")
_MIX = "LongBench"
_ON_MAP = {"light": (_MIX, 0.9), "heavy": (_MIX, 0.53)}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture, what it is drawn of, and what is said below it."""

    caption: str
    points: Callable[[], Any]
    """From kept results: nothing else is drawn."""
    draw: Callable[[Any], Figure]

    def save(self, path: Path) -> None:
        """As a file that says of which points it is."""
        points = self.points()
        metadata = {KEPT: digest_of(points), "Software": None}
        self.draw(points).savefig(path, dpi=DPI, metadata=metadata)


def digest_of(points: Any) -> str:
    """What a picture's file says of its points."""
    return hashlib.sha256(repr(points).encode()).hexdigest()[:12]


def _spread(values: Sequence[float]) -> Spread:
    return statistics.median(values), min(values), max(values)


def over_loads() -> Lines:
    """P99 TTFT of every system that ran: all draws at both loads of its claims, else one draw."""
    found: Lines = {}
    for name, (swept, fixed) in _LOADS.items():
        lines = found.setdefault(name, {})
        for system, at in _places(runs_of(swept)):
            value = runs_of(swept).run(system, at).ttft_p99_s
            lines.setdefault(system, {})[at] = (value, value, value)
        claims = runs_of(FIXED[fixed])
        for system, at in _places(claims):
            draws = claims.draws(system, at).values()
            spread = _spread([run.ttft_p99_s for run in draws])
            lines.setdefault(system, {})[at] = spread
    return found


def _places(runs: Runs) -> list[tuple[str, float]]:
    return [(system, at) for system in _COLORS for at in runs.loads if runs.ran(system, at)]


def late_shares() -> Lines:
    """Shares of late requests over the objective's scale: medians of the draws."""
    found: Lines = {}
    for name, experiment in FIXED.items():
        runs = runs_of(experiment)
        for system in ("recompute", "drop", "endless"):
            shares = (100 * runs.violations(system, runs.fixed, factor) for factor in FACTORS)
            line = {at: (s, s, s) for at, s in zip(FACTORS, shares, strict=True)}
            found.setdefault(name, {})[system] = line
    return found


def ablated() -> dict[str, dict[str, Spread]]:
    """How many times lower P99 TTFT is than under `recompute`, technique by technique."""
    found: dict[str, dict[str, Spread]] = {}
    for title, name in (("LongBench", "ablation"), ("heavy weights", "ablation_heavy")):
        runs = runs_of(name)
        found[title] = {
            system: _spread(runs.gains("recompute", "ttft_p99_s", system)) for system in _ABLATED
        }
    return found


def real() -> dict[str, dict[str, Spread]]:
    """P99 TTFT of each kept load of both real bursts."""
    found: dict[str, dict[str, Spread]] = {}
    for folder, group in real_bursts.bursts():
        cells = {system: real_bursts.told(group, system, P99) for system in group.by_system}
        found[f"{real_bursts.WORDS[folder]}, {rate(group)}"] = {
            system: (one.median, one.least, one.most)
            for system, one in cells.items()
            if one is not None
        }
    return found


def marks() -> dict[str, tuple[Mark, ...]]:
    """Simulated bursts on both maps of GPUs, real ones on that of CPUs."""
    found = {name: dots(*where) for name, where in _ON_MAP.items()}
    found["real"] = tuple(
        Mark(
            "",
            round(one.expected.height, 3),
            round(one.expected.burst.length_s, 2),
            round(one.real, 3),
        )
        for one in real_bursts.placed()
    )
    return found


def draw_map(found: Mapping[str, tuple[Mark, ...]]) -> Figure:
    """Three maps on one scale of colours."""
    able = real_bursts.placed()[0].able
    title = (
        f"SmolLM2 on CPUs, real runs\nX = {able.full_rate:.2g}/s per instance, a request stays "
        f"{able.residence_s:.0f} s"
    )
    drawn = make_map(able, DRAWN_BASE, FINE_HEIGHTS, FINE_LENGTHS_S)
    panels = [*(panel(*where) for where in _ON_MAP.values()), Panel(title, drawn, found["real"])]
    note = f"colours: fluid model, bursts after {DRAWN_BASE:g} X; dots: simulated, right: measured"
    return draw_maps([panels], note)


def draw_lines(
    found: Lines, across: str, up: str, *, is_log: bool = False, width: float = 2.7
) -> Figure:
    """A panel for each entry, side by side, with ranges as bars; ``width`` is of one, in inches."""
    figure = Figure(figsize=(width * len(found), 2.9), layout="constrained")
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (title, lines) in zip(axes, found.items(), strict=True):
        for system, points in lines.items():
            _line(axis, system, points)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(across, fontsize=8)
        axis.tick_params(which="both", labelsize=7)
        axis.grid(alpha=0.3)
        if is_log:
            axis.set_yscale("log")
    axes[0].set_ylabel(up, fontsize=8)
    _legend(figure, axes)
    return figure


def _line(axis: Axes, system: str, points: Mapping[float, Spread]) -> None:
    places = sorted(points)
    middle = [points[at][0] for at in places]
    below = [points[at][0] - points[at][1] for at in places]
    above = [points[at][2] - points[at][0] for at in places]
    axis.errorbar(
        places,
        middle,
        yerr=(below, above),
        color=_COLORS[system],
        marker=".",
        linewidth=1.1,
        capsize=2,
        label=system,
    )


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        handles=list(found.values()),
        labels=list(found),
        loc="outside lower center",
        ncols=min(len(found), 8),
        frameon=False,
        fontsize=8,
    )


def draw_bars(found: Mapping[str, Mapping[str, Spread]], up: str) -> Figure:
    """A group of bars for each entry, with ranges."""
    figure = Figure(figsize=(1.6 + 2.4 * len(found), 2.7), layout="constrained")
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (title, bars) in zip(axes, found.items(), strict=True):
        for place, (system, (middle, least, most)) in enumerate(bars.items()):
            error = ([middle - least], [most - middle])
            color = _COLORS.get(system, "#444444")
            axis.bar(place, middle, yerr=error, color=color, capsize=3, width=0.7)
        axis.set_xticks(range(len(bars)), list(bars), fontsize=7, rotation=20)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_title(title, fontsize=9)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel(up, fontsize=8)
    return figure


DRAWINGS = {
    "map": Drawing(
        "Where drops help: the fluid model's map, simulated bursts on it (left, middle), and the "
        "real bursts on that of the CPU cluster (right).",
        marks,
        draw_map,
    ),
    "p99-over-load": Drawing(
        "P99 TTFT over the load, simulated. Bars: all draws at the loads of the claims and of the "
        "objective; elsewhere one draw.",
        over_loads,
        lambda found: draw_lines(found, "load", "P99 TTFT (s)", is_log=True),
    ),
    "late": Drawing(
        "Requests over the objective by its scale, at the load of the claims: medians of draws.",
        late_shares,
        lambda found: draw_lines(found, "times the base", "late requests (%)", width=2.0),
    ),
    "real-bursts": Drawing(
        "The real bursts on equal requests: median and range of the rounds.",
        real,
        lambda found: draw_bars(found, P99),
    ),
    "timelines": Drawing(
        "One draw of each workload at the load of the claims, simulated. Memory: in use, to be had "
        "(dotted), and wanted (dashed, with endless memory), as multiples of what is undropped.",
        timelines.kept,
        timelines.draw,
    ),
    "ablation": Drawing(
        "How many times lower P99 TTFT is than under `recompute`: medians and ranges of the draws.",
        ablated,
        lambda found: draw_bars(found, "times lower"),
    ),
}
