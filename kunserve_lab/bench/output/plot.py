"""Figures of runs: one run's timeline, and several runs on the same axes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kunserve.core.errors import ConfigError
from kunserve_lab.bench import timeline as tl
from kunserve_lab.bench.runfile import Run

matplotlib.use("Agg")

_STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 130,
}
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2b6cb0", "#dd8a1b", "#2f855a", "#c53030", "#9aa5b1"
_RUN_COLORS = (_RED, _BLUE, _ORANGE, _GREEN, "#6b46c1", "#319795")
_RUN_LINES = ("-", "-", "--", "-.", ":", "-")


def plot_timeline(run: Run, path: Path) -> None:
    """Arrivals, TTFT, TPOT, KV use, bubbles and queue of one run over time, to an image file.

    What the server did not report is not drawn.
    """
    with matplotlib.rc_context(_STYLE):
        has_kv = tl.sampled(run.samples, "kv_usage") is not None
        has_pipelines = tl.bubbles(run.samples) is not None
        panels = [
            _draw_arrivals,
            _draw_ttft,
            _draw_tpot,
            *([_draw_kv] if has_kv else []),
            *([_draw_bubbles] if has_pipelines else []),
            _draw_queue,
        ]
        figure, axes = _panels(len(panels), 1, height=1.55, width=9.0)
        for draw, axis in zip(panels, axes[:, 0], strict=True):
            draw(axis, run)
        axes[-1, 0].set_xlabel("time since start (s)")
        axes[-1, 0].set_xlim(0, _end_s([run]))
        _save(figure, path, f"{run.label}: {_counts(run)}", [run])


def plot_comparison(runs: Sequence[Run], path: Path, mark: str = "") -> None:
    """Several runs of one workload on the same axes, shaped as the paper's end-to-end figure.

    Top: memory demanded against capacity, a panel per run. Below: mean TTFT over time, then
    throughput, all runs together. A PNG has the ``mark`` among its bytes, as plain text.
    """
    assert runs, "nothing to compare"
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(max(9.0, 3.4 * len(runs)), 6.6), layout="constrained")
        grid = figure.add_gridspec(3, len(runs), height_ratios=(1.0, 1.15, 0.9))
        end_s = _end_s(runs)
        first: Axes | None = None
        for column, run in enumerate(runs):
            axis = figure.add_subplot(grid[0, column], sharey=first)
            first = first or axis
            _draw_memory(axis, run, _RUN_COLORS[column % len(_RUN_COLORS)])
            axis.set_xlim(0, end_s)
            if column:
                axis.tick_params(labelleft=False)
            else:
                axis.set_ylabel("KV memory\n(% of capacity at start)")
        ttft = figure.add_subplot(grid[1, :])
        rate = figure.add_subplot(grid[2, :], sharex=ttft)
        _compare_ttft(ttft, runs)
        _compare_throughput(rate, runs)
        ttft.set_xlim(0, end_s)
        ttft.tick_params(labelbottom=False)
        rate.set_xlabel("time since start (s)")
        _save(figure, path, "", runs, mark)


def _draw_arrivals(axis: Axes, run: Run) -> None:
    bin_s = tl.bin_width_s(_end_s([run]))
    planned = tl.rate_per_bin([record.planned_s for record in run.records], _end_s([run]), bin_s)
    axis.fill_between(
        planned.times_s, planned.values, step="post", color=_BLUE, alpha=0.85, linewidth=0
    )
    failed = [record.planned_s for record in run.records if not record.succeeded]
    if failed:
        rate = tl.rate_per_bin(failed, _end_s([run]), bin_s)
        axis.fill_between(
            rate.times_s, rate.values, step="post", color=_RED, linewidth=0, label="that failed"
        )
        _legend(axis)
    axis.set_title(f"Arrivals (per {bin_s:g} s bin)")
    axis.set_ylabel("req/s")
    axis.set_ylim(bottom=0)


def _draw_ttft(axis: Axes, run: Run) -> None:
    _draw_latency(axis, run, tl.ttft_points(run.records))
    axis.set_title("Time to first token, by moment of sending")


def _draw_tpot(axis: Axes, run: Run) -> None:
    _draw_latency(axis, run, tl.tpot_points(run.records))
    axis.set_title("Time per output token, by moment of sending")


def _draw_latency(axis: Axes, run: Run, points: tuple[tl.Array, tl.Array]) -> None:
    in_ms = bool(points[1].max(initial=0.0) < 1.0)
    times_s, values = points[0], points[1] * (1e3 if in_ms else 1.0)
    axis.set_ylabel("ms" if in_ms else "s")
    if not len(times_s):
        axis.text(0.5, 0.5, "no token arrived", transform=axis.transAxes, ha="center")
        return
    bins = tl.binned(times_s, values, _end_s([run]), 2 * tl.bin_width_s(_end_s([run])))
    axis.scatter(times_s, values, s=5, color=_GREY, alpha=0.5, linewidth=0, label="a request")
    axis.plot(bins.centers_s, bins.p99, color=_RED, linewidth=1.2, marker=".", markersize=3,
              label="P99")  # fmt: skip
    axis.plot(bins.centers_s, bins.p50, color=_BLUE, linewidth=1.4, marker=".", markersize=3,
              label="P50")  # fmt: skip
    axis.set_ylim(bottom=0)
    _legend(axis)


def _draw_kv(axis: Axes, run: Run) -> None:
    _draw_memory(axis, run, _GREEN)
    axis.set_title("KV memory")
    axis.set_ylabel("% of capacity\nat start")


def _draw_bubbles(axis: Axes, run: Run) -> None:
    series = tl.bubbles(run.samples)
    assert series is not None, "no pipeline worked"
    shares = series.values * 100
    # A value is of the window before it.
    axis.step(series.times_s, shares, where="pre", color=_RED, linewidth=1.2)
    axis.fill_between(series.times_s, shares, step="pre", color=_RED, alpha=0.25, linewidth=0)
    axis.set_title("Bubbles: stages idle while their pipeline has work")
    axis.set_ylabel("% of stage time")
    axis.set_ylim(0, max(30.0, float(np.nanmax(shares)) * 1.12))


def _draw_memory(axis: Axes, run: Run, color: str) -> None:
    """Used and capacity as a percentage of the capacity at the run's start."""
    axis.set_title(run.label)
    used = tl.sampled(run.samples, "kv_used_blocks")
    capacity = tl.sampled(run.samples, "kv_capacity_blocks")
    usage = tl.sampled(run.samples, "kv_usage")
    top = 100.0
    if used is not None and capacity is not None and capacity.values[0] > 0:
        unit = 100.0 / capacity.values[0]
        axis.fill_between(used.times_s, used.values * unit, color=color, alpha=0.35, linewidth=0)
        axis.plot(used.times_s, used.values * unit, color=color, linewidth=1.2, label="used")
        axis.step(capacity.times_s, capacity.values * unit, where="post", color="#333333",
                  linewidth=1.2, linestyle="--", label="capacity")  # fmt: skip
        top = float(max(capacity.values.max(), used.values.max()) * unit)
    elif usage is not None:
        axis.fill_between(usage.times_s, usage.values * 100, color=color, alpha=0.35, linewidth=0)
        axis.plot(usage.times_s, usage.values * 100, color=color, linewidth=1.2, label="used")
        axis.axhline(100, color="#333333", linewidth=1.2, linestyle="--", label="capacity")
        top = max(100.0, float(usage.values.max()) * 100)
    else:
        axis.text(0.5, 0.5, "the server does not report its KV use", transform=axis.transAxes,
                  ha="center", color="#777777")  # fmt: skip
        return
    demand = tl.sampled(run.samples, "kv_demand_blocks")
    if demand is not None and capacity is not None and capacity.values[0] > 0:
        level = demand.values * 100.0 / capacity.values[0]
        axis.plot(demand.times_s, level, color=_ORANGE, linewidth=1.0, label="demand")
        top = max(top, float(level.max()))
    _mark(axis, tl.increments(run.samples, "num_drops"), _BLUE, "drop")
    _mark(axis, tl.increments(run.samples, "num_restores"), _GREEN, "restore")
    axis.set_ylim(0, max(axis.get_ylim()[1], top * 1.12))
    _legend(axis)


def _legend(axis: Axes) -> None:
    """Above the plot, at the right: it never hides data."""
    axis.legend(
        loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=6, handlelength=1.4,
        columnspacing=1.1, borderaxespad=0.1, markerscale=2.0,
    )  # fmt: skip


def _mark(axis: Axes, moments_s: tl.Array, color: str, label: str) -> None:
    for place, moment_s in enumerate(moments_s):
        name = label if place == 0 else None
        axis.axvline(moment_s, color=color, linewidth=1.0, linestyle=":", label=name)


def _draw_queue(axis: Axes, run: Run) -> None:
    running = tl.sampled(run.samples, "num_running")
    queued = tl.sampled(run.samples, "num_waiting")
    source = "the server's count"
    if running is None or queued is None:
        running, queued = tl.in_flight(run.records), tl.waiting(run.records)
        source = "the client's view"
        labels = ("in flight", "without a token yet")
    else:
        labels = ("running", "waiting")
    axis.step(running.times_s, running.values, where="post", color=_BLUE, label=labels[0])
    axis.fill_between(
        queued.times_s, queued.values, step="post", color=_ORANGE, alpha=0.7, linewidth=0,
        label=labels[1],
    )  # fmt: skip
    preempted = tl.sampled(run.samples, "num_preemptions")
    if preempted is not None and preempted.values[-1] > preempted.values[0]:
        count = preempted.values[-1] - preempted.values[0]
        source += f", {count:.0f} preemptions"
    axis.set_title(f"Requests ({source})")
    axis.set_ylabel("requests")
    axis.set_ylim(bottom=0)
    _legend(axis)


def _compare_ttft(axis: Axes, runs: Sequence[Run]) -> None:
    bin_s = 2 * tl.bin_width_s(_end_s(runs))
    for place, run in enumerate(runs):
        times_s, values = tl.ttft_points(run.records)
        if not len(times_s):
            continue
        bins = tl.binned(times_s, values, _end_s(runs), bin_s)
        p50, p99 = np.percentile(values, (50, 99))
        axis.plot(
            bins.centers_s, bins.mean, color=_RUN_COLORS[place % len(_RUN_COLORS)],
            linestyle=_RUN_LINES[place % len(_RUN_LINES)], linewidth=1.5,
            label=f"{run.label} (P50 {_seconds(p50)}, P99 {_seconds(p99)})",
        )  # fmt: skip
    axis.set_title(f"Mean TTFT by moment of sending ({bin_s:g} s bins)")
    axis.set_ylabel("s")
    axis.set_ylim(bottom=0)
    axis.legend(loc="best", frameon=True, facecolor="white", edgecolor="none", framealpha=0.85)


def _compare_throughput(axis: Axes, runs: Sequence[Run]) -> None:
    bin_s = 2 * tl.bin_width_s(_end_s(runs))
    for place, run in enumerate(runs):
        rate = tl.output_rate(run.records, _end_s(runs), bin_s)
        axis.plot(
            rate.times_s + bin_s / 2, rate.values, color=_RUN_COLORS[place % len(_RUN_COLORS)],
            linestyle=_RUN_LINES[place % len(_RUN_LINES)], linewidth=1.5, label=run.label,
        )  # fmt: skip
    axis.set_title("Throughput")
    axis.set_ylabel("output tokens/s")
    axis.set_ylim(bottom=0)


def _panels(
    rows: int, columns: int, height: float, width: float
) -> tuple[Figure, npt.NDArray[Any]]:
    figure = Figure(figsize=(width, height * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
    return figure, axes


def _save(figure: Figure, path: Path, title: str, runs: Sequence[Run], mark: str = "") -> None:
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    sources = list(dict.fromkeys(run.provenance for run in runs))
    figure.supxlabel("\n".join(_wrapped(line) for line in sources), fontsize=7, color="#666666",
                     x=0.01, ha="left")  # fmt: skip
    try:
        figure.savefig(path, metadata={"Description": mark} if mark else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the figure {path}: {error}") from None


def _wrapped(text: str, width: int = 150) -> str:
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) >= width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def _end_s(runs: Sequence[Run]) -> float:
    return max(max(run.duration_s for run in runs), 1e-3)


def _counts(run: Run) -> str:
    done = sum(record.succeeded for record in run.records)
    failed = len(run.records) - done
    return f"{done} requests completed" + (f", {failed} failed" if failed else "")


def _seconds(value_s: float) -> str:
    return f"{value_s * 1e3:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"
