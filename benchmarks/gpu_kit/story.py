"""The report of a day: what was seen, in a few lines, in charts and in all figures.

It is a function of the phases' JSON alone. A phase that is not there is said to be missing.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, tables_of

Found = dict[str, dict[str, Any]]
"""Phase -> what it has found."""
Pick = Callable[[Sequence[float]], float]
REPORT = "report.md"
DONE = "done"


@dataclass(frozen=True, slots=True)
class Headline:
    """One sentence, from the figures of one name."""

    phase: str
    figure: str
    text: str
    """With ``{}`` where the value stands."""
    pick: Pick = max
    where: tuple[tuple[str, object], ...] = ()
    """Settings that a figure must have."""
    beside: "Headline | None" = None
    """Whose value stands at a second ``{}``; without it nothing is said."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars or lines over one setting, for the combinations of all others that vary."""

    phase: str
    title: str
    figures: tuple[str, ...]
    over: str
    """The setting along the axis; ``name`` is the figure's own name."""
    is_line: bool = False
    is_log: bool = False
    by: tuple[str, ...] = ()
    """Settings that tell bars or lines apart. Of figures that agree in them the median counts."""
    where: tuple[tuple[str, tuple[object, ...]], ...] = ()
    """Settings, and which values of them are drawn; all of the others."""
    ceiling: str | None = None
    """A figure of P0 that nothing can exceed."""


_ONE_STREAM: tuple[tuple[str, object], ...] = (
    ("streams", 1), ("sampling", "greedy"), ("async_scheduling", True),
)  # fmt: skip
_A_TOKEN = (("model", "qwen2.5-7b"), ("batch", 1))
HEADLINES = (
    Headline("P0", "copy, read and written", "The device copies at {} GB/s, read and written."),
    Headline("P0", "bfloat16 product", "It multiplies at {} TFLOP/s in bfloat16."),
    Headline("P0", "to host memory", "KV goes to pinned host memory at {} GB/s at least.",
             pick=min, where=(("by", "pinned"),)),
    Headline("P1", "commit a drop", "The commit of a drop takes {} ms at most."),
    Headline("P1", "prepare a drop", "What is mapped before it takes {} ms at most."),
    Headline("P1", "wrong values of attention",
             "Beside drops and restores, {} values of attention were wrong."),
    Headline("P1", "queue of attention, alone", "A queue of attention takes {} ms alone,"),
    Headline("P1", "queue of attention, beside a drop and a restore",
             "and {} ms beside a drop and a restore."),
    Headline("P4", "prepare a drop, most", "With graphs alive, preparing a drop takes {} ms,"),
    Headline("P4", "commit a drop, most", "its commit {} ms,"),
    Headline("P4", "unmap after a drop, all, most", "and unmapping what was left {} ms, at most."),
    Headline("P2", "attention", "The largest error of attention in float32 is {}.",
             where=(("dtype", "float32"),)),
    Headline("P3", "answers equal to those of transformers",
             "In float32, {} answers through a drop and a restore equal those of transformers."),
    Headline("P3", "largest margin of those",
             "In bfloat16, tokens differ only where the reference prefers another one by {} at "
             "most (log-probability)."),
    Headline("P3b", "answers equal to those of transformers",
             "With two ranks, {} answers through a drop and a restore equal transformers'."),
    Headline("P4", "recorded again", "After drops and restores, {} graphs were recorded again."),
    Headline("P5", "step by one graph", "By one graph a 7B token takes {} ms,", where=_A_TOKEN),
    Headline("P5", "its layers on the device", "of it its layers {} ms.", where=_A_TOKEN),
    Headline("P5", "prompt speed", "Prompts reach {} TFLOP/s."),
    Headline("P5", "step reads", "Steps that decode read {} GB/s at best."),
    Headline("P5b", "attention reads", "Our attention of single tokens reads {} GB/s at best.",
             where=(("by", "triton"),)),
    Headline("P5b", "attention reads", "FlashInfer's reads {} GB/s at best.",
             where=(("by", "flashinfer"),)),
    Headline("P6", "commit gap", "A transition under load holds steps up for {} ms at most."),
    Headline("P6", "longest pause of a stream", "The longest pause that a stream sees is {} ms."),
    Headline("P6", "exchange", "The exchange moves {} GB/s at best."),
    Headline("P7", "TTFT P99, recompute / drop",
             "In a burst, recomputing makes the slowest first tokens {} times as slow as dropping.",
             where=(("world", "real"),)),
    Headline("P7", "TTFT P99, recompute / drop", "The simulator says {} times.",
             where=(("world", "simulated"),)),
    Headline("P12", "TPOT P50", "A single stream's TPOT is {} ms.", where=_ONE_STREAM),
    Headline("P12", "TPOT P50", "Of a TPOT of {} ms the step is {} ms.", where=_ONE_STREAM,
             beside=Headline("P5", "step by one graph", "", where=_A_TOKEN)),
    Headline("P12", "ITL P50", "Of the {} ms between tokens of 32 streams the step is {} ms.",
             where=(("streams", 32), *_ONE_STREAM[1:]),
             beside=Headline("P5", "step by one graph", "", where=(_A_TOKEN[0], ("batch", 32)))),
    Headline("P12", "TPOT P50", "Without async scheduling a single stream's TPOT is {} ms.",
             where=(*_ONE_STREAM[:2], ("async_scheduling", False))),
    Headline("P12", "TPOT P50", "Drawn as Qwen asks, a single stream's TPOT is {} ms.",
             where=(("streams", 1), ("sampling", "Qwen's own"))),
    Headline("P12", "output", "One instance gives {} tokens/s at best."),
    Headline("P8", "held-out error", "The cost model is wrong by {} % on the mean.",
             where=(("of", "kunserve"), ("batches", "all"))),
    Headline("P9", "output", "Offline, one instance gives {} tokens/s.",
             where=(("server", "kunserve"),)),
    Headline("P9", "output", "transformers' continuous batching gives {} tokens/s.",
             where=(("server", "transformers"),)),
)  # fmt: skip

CHARTS = (
    Chart("P1", "Half of a model's layers: what takes how long", (
        "prepare a drop", "commit a drop", "unmap after a drop, all", "prepare a restore",
        "commit a restore", "unmap after a restore, all"), "name", is_log=True,
        by=("granule_kib", "kernels", "graphs")),
    Chart("P4", "A step with and without graphs", ("step",), "batch", is_line=True, by=("graphs",)),
    Chart("P5", "Prompts", ("prompt speed",), "prompt_tokens", is_line=True,
          by=("ops", "block_size"), ceiling="bfloat16 product"),
    Chart("P5", "Steps that decode: bytes read", ("step reads",), "batch", is_line=True,
          by=("ops", "block_size"), ceiling="copy, read and written"),
    Chart("P5", "Attention alone: bytes read", ("attention alone reads",), "batch", is_line=True,
          by=("ops", "block_size"), ceiling="copy, read and written"),
    Chart("P5", "One step: in all, and while the host asks", ("step", "of it the host asks"),
          "batch", is_line=True, by=("ops",)),
    Chart("P5b", "Attention of single tokens: bytes read", ("attention reads",), "batch",
          by=("by", "block_size"), where=(("tiles", ("served", "its own")),),
          ceiling="copy, read and written"),
    Chart("P5b", "Other tiles, blocks of 64", ("attention reads",), "batch", by=("tiles",),
          where=(("by", ("triton",)), ("block_size", (64,)))),
    Chart("P6", "A drop and a restore under load", (
        "remap", "commit gap", "longest stall", "longest pause of a stream"), "name",
        is_log=True, by=("model", "transition")),
    Chart("P7", "First tokens in a burst", ("TTFT P50", "TTFT P99"), "name",
          by=("world", "system")),
    Chart("P7", "Time per token in a burst", ("TPOT P50", "TPOT P99"), "name",
          by=("world", "system")),
    Chart("P8", "Predicted step times: mean error", ("error",), "batches", by=("of",)),
    Chart("P12", "Time per token of one instance", ("TPOT P50",), "streams", is_line=True,
          by=("sampling", "async_scheduling")),
    Chart("P9", "All prompts at once", ("output", "prompts and output"), "name", by=("server",)),
)  # fmt: skip


def write_report(out: Path, phases: dict[str, str], found: Found) -> Path:
    """What all phases so far have found, as Markdown and images. ``phases``: name -> module."""
    lines = ["# A day on a GPU", "", "| phase | what | outcome | seconds |", "|---|---|---|---|"]
    for name, module in phases.items():
        one = found.get(name)
        outcome, seconds = (one["outcome"], one["seconds"]) if one else ("not run", "")
        lines.append(f"| {name} | {module} | {outcome} | {seconds} |")
    lines += ["", "## In short", "", *in_short(found, list(phases))]
    drawn = [(chart, _draw(chart, found, out)) for chart in CHARTS]
    for name, module in phases.items():
        if name in found:
            pictures = [image for chart, image in drawn if image and chart.phase == name]
            lines += ["", *_part(name, module, found[name], pictures)]
    path = out / REPORT
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def in_short(found: Found, phases: Sequence[str]) -> list[str]:
    """A line for each headline, and for each phase or part that did not work."""
    lines = []
    if any(one["device"] == "fake" for one in found.values()):
        lines += ["A rehearsal on a CPU: these figures say nothing about a GPU.", ""]
    for name in phases:
        if name not in found:
            lines.append(f"* {name}: not run.")
            continue
        if found[name]["outcome"] != DONE:
            lines.append(f"* {name}: {found[name]['outcome']}.")
        for part, one in found[name].get("parts", {}).items():
            if one["is"] != DONE:
                why = str(one.get("why", "it did not end")).splitlines()[0]
                lines.append(f"* {name}, {part}: {one['is']}: {why[:300]}")
        for headline in (one for one in HEADLINES if one.phase == name):
            asked = [one for one in (headline, headline.beside) if one is not None]
            values = [value for one in asked if (value := _value(one, found)) is not None]
            if len(values) == len(asked):
                said = headline.text.format(*(f"{float(f'{value:.4g}'):,g}" for value in values))
                lines.append(f"* {name}: {said}")
    return lines


def _value(headline: Headline, found: Found) -> float | None:
    """Its figure; None where its phase has found none."""
    values = [
        figure["value"]
        for figure in found.get(headline.phase, {}).get("figures", ())
        if figure["name"] == headline.figure
        and figure["value"] is not None
        and all(figure["settings"].get(key) == value for key, value in headline.where)
    ]
    return headline.pick(values) if values else None


def _part(name: str, module: str, found: dict[str, Any], images: Sequence[str]) -> list[str]:
    """One phase: its charts, its figures, and the end of its log if it failed."""
    lines = [f"## {name}: {module} ({found['device']})", ""]
    for image in images:
        lines += [f"![{image.removesuffix('.png')}]({image})", ""]
    figures = [
        Figure(
            one["name"],
            one["value"],
            one["unit"],
            {key: value for key, value in one["settings"].items() if key != "device"},
        )
        for one in found["figures"]
    ]
    if figures:
        lines += ["```text", "\n\n".join(tables_of(figures)), "```"]
    if found["log"]:
        lines += ["", "The end of its log:", "", "```text", *found["log"], "```"]
    return lines


def _draw(chart: Chart, found: Found, out: Path) -> str | None:
    """Write the chart's image; its name, or None without figures for it, or without matplotlib."""
    if chart.phase not in found:
        return None
    series, unit = _series(chart, found[chart.phase]["figures"])
    if not series:
        return None
    try:
        from matplotlib.figure import Figure as Image
    except ImportError:
        return None
    image = Image(figsize=(8.0, 3.6), layout="constrained")
    axes = image.add_subplot()
    places = list(dict.fromkeys(place for points in series.values() for place in points))
    for number, (label, points) in enumerate(series.items()):
        if chart.is_line:
            xs = sorted(points)
            axes.plot(xs, [points[x] for x in xs], marker="o", markersize=3, label=label)
        else:
            width = 0.8 / len(series)
            xs = [at + (number - (len(series) - 1) / 2) * width for at in range(len(places))]
            axes.bar(xs, [points.get(place, 0.0) for place in places], width, label=label)
    if chart.is_line:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(places), [str(place) for place in sorted(places)])
        axes.set_xlabel(chart.over.replace("_", " "))
    else:
        axes.set_xticks(range(len(places)), [str(place).replace(", ", ",\n") for place in places])
        axes.tick_params("x", labelsize=7)
    if chart.is_log:
        axes.set_yscale("log")
    _draw_ceiling(chart, found, axes)
    axes.set_title(chart.title, loc="left", fontsize=10)
    axes.set_ylabel(unit)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7, frameon=False)
    words = re.findall(r"[a-z0-9]+", chart.title.lower())
    name = f"{chart.phase}-{'-'.join(words)}.png"
    image.savefig(out / name, dpi=130)
    return name


def _draw_ceiling(chart: Chart, found: Found, axes: Any) -> None:
    if chart.ceiling is None or "P0" not in found:
        return
    values = [f["value"] for f in found["P0"]["figures"] if f["name"] == chart.ceiling]
    if values and values[0] is not None:
        axes.axhline(values[0], color="#888888", linestyle=":", label=f"P0: {chart.ceiling}")


def _series(
    chart: Chart, figures: Sequence[dict[str, Any]]
) -> tuple[dict[str, dict[Any, float]], str]:
    """Label -> place -> value; and the unit."""
    groups: dict[str, dict[Any, list[float]]] = {}
    unit = ""
    for figure in figures:
        settings = figure["settings"]
        if figure["name"] not in chart.figures or figure["value"] is None:
            continue
        if any(settings.get(key) not in values for key, values in chart.where):
            continue
        if chart.over == "name":
            place, names = figure["name"], []
        elif chart.over in settings:
            place = settings[chart.over]
            names = [figure["name"]] if len(chart.figures) > 1 else []
        else:
            continue
        names += [_label(key, settings[key]) for key in chart.by if key in settings]
        unit = figure["unit"]
        groups.setdefault(", ".join(names), {}).setdefault(place, []).append(figure["value"])
    return {
        label: {place: sorted(values)[len(values) // 2] for place, values in points.items()}
        for label, points in groups.items()
    }, unit


def _label(setting: str, value: object) -> str:
    """A word speaks for itself, a number does not."""
    return value if isinstance(value, str) else f"{setting.replace('_', ' ')} {value}"
