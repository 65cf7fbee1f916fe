"""Figures of comparisons beside those that every run has. Pure functions of the results."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kunserve_lab.compare.groups import AtLoad
from kunserve_lab.compare.output.table import Pick, cell, tail
from kunserve_lab.compare.results import RunResult
from kunserve_lab.compare.slo import FACTOR, FACTORS, SloBase, one_base, violations

matplotlib.use("Agg")

_COLORS = ("#c53030", "#2b6cb0", "#dd8a1b", "#2f855a", "#6b46c1", "#319795", "#9aa5b1")


def plot_violations(group: AtLoad, path: Path) -> None:
    """SLO violations over the scale factor, a line per system: the median over its runs."""
    figure = Figure(figsize=(5.2, 3.2), layout="constrained", dpi=130)
    axis = figure.subplots()
    base = one_base(group)
    for place, (name, runs) in enumerate(group.by_system.items()):
        shares = [cell(runs, _violating(base, factor)) for factor in FACTORS]
        axis.plot(
            FACTORS,
            [float("nan") if share is None else share.median * 100 for share in shares],
            color=_COLORS[place % len(_COLORS)],
            marker=".",
            label=name,
        )
    axis.set_xlabel(
        f"SLO scale (times the P50 of {base.ttft_of} at load {base.load:g})", fontsize=8
    )
    axis.set_ylabel("requests that miss TTFT or TPOT (%)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    _source(figure, group)
    figure.savefig(path)


def plot_loads(groups: Sequence[AtLoad], path: Path) -> None:
    """Tail TTFT, P50 TPOT, throughput and SLO violations over the load.

    A band spans the runs of a system where there are several.
    """
    panels: list[tuple[str, Callable[[AtLoad], Pick]]] = [
        (f"{tail(groups[0], 'ttft')[0]} (s), lower is better", lambda g: tail(g, "ttft")[1]),
        ("TPOT P50 (ms), lower is better", lambda g: lambda r: r.percentile_s("tpot", 50.0) * 1e3),
        ("output tokens/s, higher is better", lambda g: lambda r: r.output_throughput),
        (
            f"SLO violations {FACTOR:g}x (%), lower is better",
            _slo_percent,
        ),
    ]
    figure = Figure(figsize=(14.0, 3.4), layout="constrained", dpi=130)
    axes = figure.subplots(1, len(panels))
    for axis, (title, pick) in zip(axes, panels, strict=True):
        _draw_curves(axis, groups, pick)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("load (times the workload's rate)", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    _source(figure, groups[0])
    figure.savefig(path)


def _draw_curves(
    axis: Axes,
    groups: Sequence[AtLoad],
    pick: Callable[[AtLoad], Pick],
) -> None:
    names = list(dict.fromkeys(name for group in groups for name in group.by_system))
    for place, name in enumerate(names):
        found = [
            (group.load, one)
            for group in sorted(groups, key=lambda group: group.load)
            for one in [cell(group.by_system.get(name, ()), pick(group))]
            if one is not None
        ]
        loads = [at for at, _ in found]
        color = _COLORS[place % len(_COLORS)]
        axis.plot(loads, [c.median for _, c in found], color=color, marker=".", label=name)
        if any(one.num_runs > 1 for _, one in found):
            least, most = [c.least for _, c in found], [c.most for _, c in found]
            axis.fill_between(loads, least, most, color=color, alpha=0.18, linewidth=0)


def _slo_percent(group: AtLoad) -> Pick:
    violating = _violating(one_base(group), FACTOR)

    def pick(result: RunResult) -> float | None:
        share = violating(result)
        return None if share is None else share * 100

    return pick


def _violating(base: SloBase, factor: float) -> Pick:
    def pick(result: RunResult) -> float | None:
        found = violations(result, base, factor)
        return None if found is None else found[0]

    return pick


def _source(figure: Figure, group: AtLoad) -> None:
    text = group.runs[0].provenance
    lines = [text[at : at + 110] for at in range(0, len(text), 110)]
    world = group.runs[0].world
    figure.supxlabel(f"{world}; " + "\n".join(lines), fontsize=6, color="#666666")
