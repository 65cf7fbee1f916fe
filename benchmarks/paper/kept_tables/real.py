"""The tables of real runs: of README and docs/results.md, from benchmarks/results/overload-*."""

import functools
import re

from benchmarks.markdown import Row
from benchmarks.paper.kept_results import RESULTS, figures_of, ranged
from kunserve_lab.compare.groups import AtLoad, by_load
from kunserve_lab.compare.output.table import Cell, Pick, cell
from kunserve_lab.compare.results import RunResult, load
from kunserve_lab.compare.slo import FACTOR, SloBase, one_base, paper_base, violations

ROUNDS, RIVALS, ABOVE = (f"overload-{name}" for name in ("rounds", "every-rival", "above-park"))
FIRST, SECOND = "overload-first", "overload-second-burst"
"""Both bursts on requests that every system holds. On the second no rule was tuned."""
SLOW_FIRST, SLOW_SECOND = "overload-avx2-first", "overload-avx2-second"
"""The bursts alone, on a processor without AVX-512."""
VLLM_CLASSES = "overload-avx2-vllm-body"
"""The second one there, by vLLM's model classes and by our engine, in float32."""
LATE, P99 = "over the objective", "P99 TTFT (s)"
PAPERS = "over the paper's objective"
LOWER = "P99 TTFT lower, by draw"
SHOWN = ("recompute", "static-pp", "drop", "endless")
FEW = ("recompute", "drop", "endless")
"""In README, and of several draws."""
_WINDOW = re.compile(r"window ([\d.]+) s to ([\d.]+) s")


@functools.cache
def groups(folder: str) -> dict[float, AtLoad]:
    """A folder's runs by load, on equal requests."""
    return {group.load: group for group in by_load(load(RESULTS / folder))}


def _seconds(field: str) -> Pick:
    def pick(run: RunResult) -> float | None:
        value: float | None = getattr(run, field)
        return value

    return pick


def _ms(field: str) -> Pick:
    seconds = _seconds(field)
    return lambda run: 1e3 * (seconds(run) or 0.0)


def _late(base: SloBase) -> Pick:
    def pick(run: RunResult) -> float | None:
        found = violations(run, base, FACTOR)
        return None if found is None else found[0]

    return pick


def figures(group: AtLoad) -> dict[str, tuple[Pick, str]]:
    """What is told of a run, by the row's name: how it is read and how it is written."""
    return {
        "P50 TTFT (s)": (_seconds("ttft_p50_s"), ".2f"),
        P99: (_seconds("ttft_p99_s"), ".1f"),
        "P50 TPOT (ms)": (_ms("tpot_p50_s"), ".0f"),
        "P90 TPOT (ms)": (_ms("tpot_p90_s"), ".0f"),
        "longest pause (s)": (_seconds("longest_pause_s"), ".1f"),
        LATE: (_late(one_base(group)), ".0%"),
        PAPERS: (_late(paper_base(group)), ".0%"),
    }


def rate(group: AtLoad) -> str:
    """How many requests came per second; of several draws from the least to the most."""
    told = sorted({f"{_rate(run):.2f}" for run in group.runs})
    return f"{'-'.join(dict.fromkeys((told[0], told[-1])))} req/s"


def _rate(run: RunResult) -> float:
    found = _WINDOW.search(run.provenance)
    assert found is not None, run.provenance
    return run.num_requests / (float(found[2]) - float(found[1]))


def _cell(group: AtLoad, system: str, name: str) -> Cell | None:
    return cell(group.by_system.get(system, ()), figures(group)[name][0])


def one_result() -> list[Row]:
    """README's: the second burst, and P99 of the first one, which is higher; medians."""
    second, first = groups(SECOND)[0.06], groups(FIRST)[0.075]
    rows: list[Row] = [("", *(f"`{system}`" for system in FEW))]
    names = [name for name in figures(second) if name != PAPERS]
    rows += [(name, *(_one(second, system, name) for system in FEW)) for name in names]
    rows.append((f"{P99}, {rate(first)}", *(_one(first, system, P99) for system in FEW)))
    return rows


def rounds() -> list[Row]:
    """Both bursts below each other, with ranges."""
    return _rounds(SHOWN, second=groups(SECOND)[0.06], first=groups(FIRST)[0.075])


def slow_rounds() -> list[Row]:
    """The same without AVX-512: three draws of each."""
    bursts = {"second": groups(SLOW_SECOND)[0.032], "first": groups(SLOW_FIRST)[0.024]}
    return _rounds(FEW, **bursts)


def vllm_classes() -> list[Row]:
    """vLLM, our server with its model classes, and our own engine."""
    shown = ("vllm-rr", "vllm-body", "vllm-body-drop", "recompute", "drop")
    return _rounds(shown, second=groups(VLLM_CLASSES)[0.02])


def _rounds(shown: tuple[str, ...], **bursts: AtLoad) -> list[Row]:
    rows: list[Row] = []
    for word, group in bursts.items():
        rows.append((f"{word} burst, {rate(group)}", *(f"`{system}`" for system in shown)))
        for name, (_, form) in figures(group).items():
            found = (_cell(group, system, name) for system in shown)
            rows.append((name, *("-" if c is None else spaced(c.shown(form)) for c in found)))
        if len({run.seed for run in group.runs}) > 1:
            rows.append((LOWER, *(_lower(group, system) for system in shown)))
    return rows


def _lower(group: AtLoad, system: str) -> str:
    """How many times lower P99 TTFT is than under `recompute`, draw by draw."""
    before = {(run.seed, run.round): run.ttft_p99_s for run in group.by_system["recompute"]}
    ratios = [
        before[run.seed, run.round] / run.ttft_p99_s
        for run in group.by_system.get(system, ())
        if (run.seed, run.round) in before
    ]
    return ranged(ratios, "x") if ratios and system != "recompute" else "-"


MAY_MISS = 0.3
"""Share by which a figure may be foretold wrongly."""
_FORETOLD = (("P50 TTFT", "(s)", 1.0), ("P99 TTFT", "(s)", 1.0), ("P50 TPOT", "(ms)", 1e3))


def foretold() -> list[Row]:
    """What the observer said of a burst beside what was measured; misses are bold."""
    found: dict[str, dict[str, float]] = {}
    for line in figures_of("observe_truth"):
        found.setdefault(line["settings"]["fleet"], {})[line["name"]] = line["value"]
    heads = (f"{name} {unit}" for name, unit, _ in _FORETOLD)
    rows: list[Row] = [("foretold, measured", *heads)]
    for fleet, values in found.items():
        for way, words in (("as it ran", "as they ran"), ("drop", "with drops")):
            cells = []
            for name, _, times in _FORETOLD:
                said, was = (values[f"{way}, {name}, {what}"] for what in ("foretold", "measured"))
                form = ".1f" if times == 1.0 else ".0f"
                text = f"{times * said:{form}}, {times * was:{form}}"
                cells.append(text if abs(said / was - 1) <= MAY_MISS else f"**{text}**")
            rows.append((f"{fleet}, {words}", *cells))
    return rows


def rivals() -> list[Row]:
    """Every rival at one load: a row each."""
    group = groups(RIVALS)[0.06]
    names = list(figures(group))
    rows: list[Row] = [("one run of each", *names)]
    for system in group.by_system:
        rows.append((f"`{system}`", *(_one(group, system, name) for name in names)))
    return rows


def above() -> list[Row]:
    """Loads that do not fit after the drop, with parking behind it."""
    both = [groups(ABOVE)[at] for at in (0.095, 0.125)]
    names = list(figures(both[0]))
    rows: list[Row] = [("one run of each", *names)]
    for group in both:
        for system in ("recompute", "drop", "drop-park", "endless"):
            cells = (_one(group, system, name) for name in names)
            rows.append((f"`{system}`, {rate(group)}", *cells))
    return rows


def _one(group: AtLoad, system: str, name: str) -> str:
    found = _cell(group, system, name)
    return "-" if found is None else spaced(format(found.median, figures(group)[name][1]))


def spaced(text: str) -> str:
    """As documents write percents."""
    return text.replace("%", " %")
