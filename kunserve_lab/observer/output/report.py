"""A report of what was watched, in one file that any browser opens: episodes, plots, conditions."""

import base64
import html
import io
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kunserve_lab.compare.output.report_page import STYLE, html_table
from kunserve_lab.observer.episodes.story import Cause, cause_of, comparison, sentence
from kunserve_lab.observer.episodes.what_if import Judged
from kunserve_lab.observer.output.show import HEADS, amount, cells, fleet_line
from kunserve_lab.observer.session import Point

matplotlib.use("Agg")

_COLORS = {Cause.MEMORY: "#c53030", Cause.TOO_MUCH: "#dd8a1b", Cause.DISPATCH: "#6b46c1",
           Cause.COMPUTE: "#2b6cb0", Cause.UNKNOWN: "#9aa5b1"}  # fmt: skip

REFRESH_S = 10
"""After which a browser asks for a live page again."""


def write_report(
    path: Path,
    points: Sequence[Point],
    judged: Sequence[Judged],
    conditions: Sequence[tuple[str, str]],
) -> None:
    """Everything inline: no file beside it is needed."""
    path.write_text(report_html(points, judged, conditions), encoding="utf-8")


def report_html(
    points: Sequence[Point],
    judged: Sequence[Judged],
    conditions: Sequence[tuple[str, str]],
    errors: Mapping[str, str] | None = None,
    most: int | None = None,
) -> str:
    """The page. With ``errors``, of servers that do not answer, it shows the fleet now too; with
    ``most``, so many of the newest episodes.
    """
    title = "What drops would have done here"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{STYLE}</style><h1>{title}</h1>",
        f"<p>{html.escape(summary(points, judged))}</p>",
    ]
    if errors is not None:
        parts += _now(points, errors)
    if points:
        parts.append(_image("The fleet over time", _plot_fleet(points, judged)))
    older = 0 if most is None else max(0, len(judged) - most)
    if older:
        parts.append(f"<p>Episodes 1 to {older} are in the report of the end.</p>")
    for number, one in enumerate(judged[older:], start=older + 1):
        parts.append(f"<h2>Episode {number}</h2><p>{html.escape(sentence(one))}.</p>")
        parts += [f"<p class=note>{html.escape(line)}</p>" for line in comparison(one)]
        if one.outcomes:
            parts.append(html_table(_rows(one)))
            parts.append(_image(f"Episode {number}, P99 TTFT by way", _plot_ways(one)))
    parts.append(f"<h2>Conditions</h2>{html_table([('what', 'value'), *conditions])}")
    return "\n".join(parts)


def _now(points: Sequence[Point], errors: Mapping[str, str]) -> list[str]:
    parts = [f"<meta http-equiv=refresh content={REFRESH_S}><h2>Now</h2>"]
    if points:
        view = points[-1].view
        parts.append(f"<p>{html.escape(fleet_line(view))}</p>")
        parts.append(html_table([HEADS, *(cells(one) for one in view.replicas)]))
        parts += [f"<p>{html.escape(text)}</p>" for text in view.texts]
    return parts + [f"<p class=note>{html.escape(text)}</p>" for text in errors.values()]


def summary(points: Sequence[Point], judged: Sequence[Judged]) -> str:
    """The whole time in a sentence or two."""
    if not points:
        return "Nothing was read."
    begin_s, end_s = points[0].view.time_s, points[-1].view.time_s
    num = {cause: sum(cause_of(one) is cause for one in judged) for cause in Cause}
    told = {
        Cause.MEMORY: "short of memory, and a drop would have helped",
        Cause.TOO_MUCH: "short of memory beyond what a drop frees",
        Cause.DISPATCH: "of an uneven load",
        Cause.COMPUTE: "short of compute: more replicas, not drops",
        Cause.UNKNOWN: "not simulated",
    }
    causes = "; ".join(f"{num[cause]} {text}" for cause, text in told.items() if num[cause])
    drops, number = points[-1].view.drops, len(judged) or "no"
    was = f"{number} burst{' was' if number == 1 else 's were'} too much for a replica"
    made = amount(drops.num_drops, "drop")
    return (
        f"{_day(begin_s)} to {_day(end_s)}: {was}{': ' + causes if causes else ''}. The controller "
        f"would have made {made}, and saved {drops.wait_s:.0f} s of waiting "
        "over all requests."
    )


def _rows(one: Judged) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("way", "P50 TTFT (s)", "P99 TTFT (s)", "P50 TPOT (ms)", "preemptions", "failed")
    ]
    measured = one.measured
    rows.append(("measured", _cell(measured.ttft_p50_s), _cell(measured.ttft_p99_s),
                 _cell(measured.tpot_p50_s, 1e3), "", ""))  # fmt: skip
    for way, found in one.outcomes.items():
        rows.append((way, _cell(found.ttft_p50_s), _cell(found.ttft_p99_s),
                     _cell(found.tpot_p50_s, 1e3), str(found.num_preemptions),
                     str(found.num_failed)))  # fmt: skip
    return rows


def _cell(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.3g}"


def _plot_fleet(points: Sequence[Point], judged: Sequence[Judged]) -> Figure:
    moments = [datetime.fromtimestamp(point.view.time_s) for point in points]
    figure = Figure(figsize=(11.0, 8.5), layout="constrained", dpi=110)
    memory, requests, rate, ttft = figure.subplots(4, 1, sharex=True)
    present = [point.view.present for point in points]
    _band(memory, moments, [[one.kv_usage * 100 for one in row] for row in present], "KV in use")
    _band(memory, moments, [[min(300.0, one.demand * 100) for one in row] for row in present],
          "demand", "#c53030")  # fmt: skip
    memory.axhline(100, color="#666666", linewidth=0.6)
    memory.set_ylabel("KV memory (%)\nmean, least to most")
    running = [sum(one.num_running for one in row) for row in present]
    waiting = [sum(one.num_waiting for one in row) for row in present]
    requests.plot(moments, running, label="running", color="#2f855a", linewidth=0.9)
    requests.plot(moments, waiting, label="waiting", color="#c53030", linewidth=0.9)
    requests.set_ylabel("requests")
    rate.plot(moments, [sum(one.arrivals_per_s for one in row) for row in present],
              color="#2b6cb0", linewidth=0.9)  # fmt: skip
    rate.set_ylabel("arrivals per second")
    seen = [float("nan") if p.ttft_p99_s is None else p.ttft_p99_s for p in points]
    ttft.plot(moments, seen, color="#6b46c1", linewidth=0.9)
    ttft.set_ylabel("P99 TTFT (s)\nmeasured, last 30 s")
    for axis in (memory, requests, rate, ttft):
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        for one in judged:
            begin, end = (datetime.fromtimestamp(s) for s in
                          (one.episode.begin_s, one.episode.end_s))  # fmt: skip
            axis.axvspan(begin, end, color=_COLORS[cause_of(one)], alpha=0.15, linewidth=0)
    memory.legend(frameon=False, fontsize=8)
    requests.legend(frameon=False, fontsize=8)
    figure.autofmt_xdate()
    return figure


def _band(
    axis: Axes,
    moments: Sequence[datetime],
    rows: Sequence[Sequence[float]],
    label: str,
    color: str = "#2b6cb0",
) -> None:
    """The mean over replicas, and from the least to the most."""
    nan = float("nan")
    mean = [float(np.mean(row)) if row else nan for row in rows]
    axis.plot(moments, mean, label=label, color=color, linewidth=0.9)  # type: ignore[arg-type]
    axis.fill_between(
        moments,  # type: ignore[arg-type]
        [min(row, default=nan) for row in rows],
        [max(row, default=nan) for row in rows],
        color=color,
        alpha=0.15,
        linewidth=0,
    )


def _plot_ways(one: Judged) -> Figure:
    figure = Figure(figsize=(7.0, 2.6), layout="constrained", dpi=110)
    axis = figure.subplots()
    bars = {way: found.ttft_p99_s for way, found in one.outcomes.items()}
    if one.measured.ttft_p99_s is not None:
        bars = {"measured": one.measured.ttft_p99_s} | bars
    colors = ["#9aa5b1" if way == "measured" else "#2b6cb0" for way in bars]
    axis.barh(list(bars), list(bars.values()), color=colors)
    axis.invert_yaxis()
    axis.set_xlabel("P99 TTFT (s), lower is better")
    axis.grid(alpha=0.3, axis="x")
    return figure


def _image(name: str, figure: Figure) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    encoded = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{encoded}">'


def _day(moment_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment_s))
