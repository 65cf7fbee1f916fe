"""Results side by side, as text and as rows for other formats."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kunserve_lab.bench.environment import by_code
from kunserve_lab.bench.readers import READER_RATES
from kunserve_lab.compare.experiment import World
from kunserve_lab.compare.groups import AtLoad, by_load
from kunserve_lab.compare.results import RunResult
from kunserve_lab.compare.slo import (
    FACTOR,
    SloBase,
    goodput,
    one_base,
    paper_base,
    violations,
)

CLEARLY = 1.1
"""Times lower that a P99 must be for its load to count as one at which the system helps."""
SHOWN_FACTORS = (2.0, FACTOR, 10.0)
MIN_FOR_P99, MIN_FOR_P999 = 100, 1000
"""Completed requests below which a percentile is the slowest request under another name."""
Row = tuple[str, ...]
"""A label, which direction is better, and a cell per system."""
Pick = Callable[[RunResult], float | None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of one system: the median over its runs, and the range."""

    median: float
    least: float
    most: float
    num_runs: int

    def shown(self, form: str) -> str:
        """``12 (10-15)``; the range is left out where all runs show the same."""
        least, median, most = (format(v, form) for v in (self.least, self.median, self.most))
        return median if least == most else f"{median} ({least}-{most})"


def cell(runs: Sequence[RunResult], pick: Pick) -> Cell | None:
    """The number that ``pick`` reads, over the runs that have it; None if none has."""
    values = [value for value in map(pick, runs) if value is not None]
    if not values:
        return None
    return Cell(statistics.median(values), min(values), max(values), len(values))


def cells(group: AtLoad, pick: Pick) -> list[Cell | None]:
    """One cell per system, in the group's order."""
    return [cell(runs, pick) for runs in group.by_system.values()]


def table(results: Sequence[RunResult]) -> str:
    """Everything as text: a table per load, then at which loads each system helps."""
    groups = by_load(results)
    parts = [load_text(group) for group in groups]
    summary = windows(groups)
    if summary:
        parts.append(as_text(summary))
    return "\n\n".join(parts)


def load_text(group: AtLoad) -> str:
    """One load's heading, table and notes."""
    lines = [heading(group), as_text(rows(group)), *notes(group)]
    return "\n".join(lines)


def heading(group: AtLoad) -> str:
    """Which load it is, of what, and what a cell means."""
    first = group.runs[0]
    text = f"load {group.load:g} ({first.world} world): {first.provenance}"
    if group.num_each > 1:
        text += f"\n{group.num_each} runs of each system: median (least-most)"
    return text


def rows(group: AtLoad) -> list[Row]:
    """The table of one load, head first."""
    lines: list[Row] = [("", "better", *group.by_system)]

    def add(label: str, better: str, pick: Pick, form: str = ",.0f") -> None:
        found = cells(group, pick)
        if any(one is not None for one in found):
            shown = ["-" if one is None else one.shown(form) for one in found]
            lines.append((label, better, *shown))

    for name in ("ttft", "tpot"):
        for label, pick in _latency_rows(group, name):
            add(label, "lower", pick)
    add("pause P99 (ms)", "lower", lambda r: r.pause_p99_s and r.pause_p99_s * 1e3)
    add("longest pause (ms)", "lower", lambda r: r.longest_pause_s and r.longest_pause_s * 1e3)
    for rate in READER_RATES:
        add(f"visible stall P99 at {rate:g}/s (ms)", "lower", _seen(rate, "stall_p99_s", 1e3))
        add(f"late tokens at {rate:g}/s", "lower", _seen(rate, "late_share"), ".1%")
    for label, pick in _slo_rows(group):
        add(label, "lower", pick, ".1%")
    add("requests/s", "higher", lambda r: r.request_throughput, ".2f")
    add("output tokens/s", "higher", lambda r: r.output_throughput)
    add("completed", "higher", lambda r: r.num_completed)
    add("failed", "lower", lambda r: r.num_failed)
    if any(run.num_shed for run in group.runs):
        base = one_base(group)
        add("refused (503)", "lower", lambda r: r.num_shed or 0)
        add(f"requests/s within {FACTOR:g}x", "higher", lambda r: goodput(r, base, FACTOR), ".2f")
    add("mean KV use", "", lambda r: r.mean_kv_usage, ".0%")
    add("peak KV use", "", lambda r: r.peak_kv_usage, ".0%")
    add("KV memory full after (s)", "later", lambda r: r.kv_full_s)
    add("preemptions", "lower", lambda r: r.num_preemptions)
    add("recomputed tokens", "lower", lambda r: r.lost_tokens)
    add("prefix cache hit rate", "higher", lambda r: r.prefix_hit_rate, ".1%")
    add("swapped out (GB)", "", lambda r: r.swapped_out_gb or None, ",.1f")
    add("drops", "", lambda r: r.num_drops)
    add("restores", "", lambda r: r.num_restores)
    add("migrations", "", lambda r: r.num_migrations or None)
    add("instances started", "", lambda r: r.num_ordered or None)
    add("instances given back", "", lambda r: r.num_given_back or None)
    add("bubble ratio", "lower", lambda r: r.bubble_ratio, ".1%")
    add("GPU-hours", "lower", lambda r: r.gpu_hours, ".2f")
    add("client lag P99 (ms)", "", lambda r: r.client_lag_s and r.client_lag_s * 1e3)
    add("load average at start", "", lambda r: r.load_average and r.load_average[0], ".1f")
    add("load average at end", "", lambda r: r.load_average and r.load_average[1], ".1f")
    return lines


def _latency_rows(group: AtLoad, name: str) -> list[tuple[str, Pick]]:
    """P50 and P90 always; a tail only where there are requests enough to have one."""
    fewest = min((run.num_completed for run in group.runs), default=0)
    word = name.upper()
    found: list[tuple[str, Pick]] = [
        (f"{word} P50 (ms)", lambda r: r.percentile_s(name, 50.0) * 1e3),
        (f"{word} P90 (ms)", lambda r: r.percentile_s(name, 90.0) * 1e3),
    ]
    label, pick = tail(group, name)
    found.append((f"{label} (ms)", lambda r: (pick(r) or 0.0) * 1e3))
    if fewest >= MIN_FOR_P999:
        found.append((f"{word} P99.9 (ms)", lambda r: r.percentile_s(name, 99.9) * 1e3))
    return found


def _seen(tokens_per_s: float, what: str, factor: float = 1.0) -> Pick:
    """What readers of that rate see."""

    def pick(result: RunResult) -> float | None:
        found = [one for one in result.readers if one.tokens_per_s == tokens_per_s]
        return getattr(found[0], what) * factor if found else None

    return pick


def tail(group: AtLoad, name: str) -> tuple[str, Pick]:
    """The P99 of a latency, or the slowest request where fewer than 100 completed."""
    if min((run.num_completed for run in group.runs), default=0) >= MIN_FOR_P99:
        return f"{name.upper()} P99", lambda r: r.percentile_s(name, 99.0)
    return f"{name.upper()} slowest", lambda r: r.slowest_s(name) or r.percentile_s(name, 99.0)


def _slo_rows(group: AtLoad) -> list[tuple[str, Pick]]:
    def share(base: SloBase, factor: float, place: int) -> Pick:
        def pick(result: RunResult) -> float | None:
            found = violations(result, base, factor)
            return None if found is None else found[place]

        return pick

    base, paper = one_base(group), paper_base(group)
    found = [(f"SLO violations {factor:g}x", share(base, factor, 0)) for factor in SHOWN_FACTORS]
    found.append((f"  by TTFT alone, {FACTOR:g}x", share(base, FACTOR, 1)))
    if paper != base:
        found.append((f"  {FACTOR:g}x the paper's base", share(paper, FACTOR, 0)))
    return found


def notes(group: AtLoad) -> list[str]:
    """What a careful reader of the table must know."""
    found = []
    if group.runs[0].ttft_ms:
        base, paper = one_base(group), paper_base(group)
        found.append(f"SLO base: P50 at the lowest load, {base.load:g}: {_told(base)}")
        if paper != base:
            found.append(f"The paper's base: the best baseline's P50 at this load: {_told(paper)}")
    found += _left_out(group)
    shed = [name for name, runs in group.by_system.items() if any(run.num_shed for run in runs)]
    found += [f"{name}: its latencies are of the requests that it served" for name in shed]
    if group.runs[0].world is World.REAL and group.num_each == 1:
        found.append(
            "One run of each system: another may differ by a factor of 3 on a busy machine"
        )
    codes = by_code([run.environment for run in group.runs])
    if len(codes) > 1:
        told_of = "; ".join(f"{count} of {name}" for name, count in codes.items())
        found.append(f"Runs of different code: {told_of}")
    for name, runs in group.by_system.items():
        told = dict.fromkeys(caution for run in runs for caution in run.cautions)
        found += [f"{name}: {caution}" for caution in told]
    return found


def _told(base: SloBase) -> str:
    return (
        f"TTFT {base.ttft_s * 1e3:,.0f} ms ({base.ttft_of}) and TPOT {base.tpot_s * 1e3:,.0f} ms "
        f"({base.tpot_of})"
    )


def _left_out(group: AtLoad) -> list[str]:
    """Whose requests are in no percentile."""
    counts = {
        name: max(len(run.left_out) for run in runs) for name, runs in group.by_system.items()
    }
    told = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
    if not told:
        return []
    return [f"Percentiles are over the requests that all systems completed. Left out: {told}"]


def windows(groups: Sequence[AtLoad]) -> list[Row]:
    """Over several loads: where each system's tail TTFT beats the first one's, and by how much."""
    if len(groups) < 2 or len(groups[0].by_system) < 2:
        return []
    first, *others = groups[0].by_system
    lines: list[Row] = [
        (f"P99 TTFT against {first}", "at most", "at load", f"{CLEARLY}x or more at")
    ]
    for name in others:
        gains = [
            (gain, group)
            for group in groups
            for gain in [tail_gain(group, first, name)]
            if gain is not None
        ]
        if not gains:
            continue
        best, where = max(gains, key=lambda pair: pair[0])
        inside = [
            f"{group.load:g}{_kv_use(group, first)}" for gain, group in gains if gain >= CLEARLY
        ]
        lines.append((name, f"{best:.2f}x", f"{where.load:g}", ", ".join(inside) or "no load"))
    return lines


def tail_gain(group: AtLoad, first: str, other: str) -> float | None:
    """How many times lower the other system's tail TTFT is; None where one did not run."""
    if first not in group.by_system or other not in group.by_system:
        return None
    _, pick = tail(group, "ttft")
    ours, theirs = (cell(group.by_system[name], pick) for name in (first, other))
    if ours is None or theirs is None:
        return None
    return ours.median / theirs.median if theirs.median else 1.0


def _kv_use(group: AtLoad, name: str) -> str:
    used = cell(group.by_system[name], lambda r: r.mean_kv_usage)
    return "" if used is None else f" ({used.median:.0%} KV)"


def as_text(lines: Sequence[Row]) -> str:
    """Aligned columns."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = []
    for first, *rest in lines:
        aligned = [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        shown.append("  ".join([first.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(shown)
