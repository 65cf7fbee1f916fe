"""What a comparison found, in words: how the systems differ, and why they do not."""

from collections.abc import Sequence

from kunserve_lab.compare.experiment import Experiment, World
from kunserve_lab.compare.groups import AtLoad
from kunserve_lab.compare.output.table import CLEARLY, Pick, cell, tail, tail_gain
from kunserve_lab.compare.results import FULL, RunResult
from kunserve_lab.compare.slo import FACTOR

HELPS = 1.5
"""Times lower that the tail TTFT must be for the answer yes; above ``CLEARLY`` it is "a little"."""
LONG_WAIT_S = 1.0
"""A tail TTFT above this, and above 5x the P50, means that requests queue."""


def verdict(experiment: Experiment, groups: Sequence[AtLoad]) -> list[str]:
    """A few sentences that a reader who skips the tables needs."""
    lines = []
    if len(groups) == 1:
        lines += [line for name in experiment.systems[1:] for line in _against(groups[0], name)]
    else:
        lines += [_over_loads(groups, name) for name in experiment.systems[1:]]
    drops = any(experiment.system(name).drops for name in experiment.systems)
    lines += [line for group in groups for line in _memory(group, experiment.world, drops)]
    return lines


def _against(group: AtLoad, name: str) -> list[str]:
    """One system against the first, at one load: the answer, then the numbers."""
    first = next(iter(group.by_system))
    word, pick_tail = tail(group, "ttft")
    numbers: list[tuple[str, Pick]] = [
        ("TTFT P50", lambda r: r.percentile_s("ttft", 50.0)),
        ("P90", lambda r: r.percentile_s("ttft", 90.0)),
        (word.removeprefix("TTFT "), pick_tail),
        ("TPOT P50", lambda r: r.percentile_s("tpot", 50.0)),
    ]
    parts = []
    for label, pick in numbers:
        theirs, ours = cell(group.by_system[first], pick), cell(group.by_system[name], pick)
        if theirs is not None and ours is not None and ours.median > 0 and theirs.median > 0:
            ratio = theirs.median / ours.median
            parts.append(f"{label} {_times(ratio)}{_by_run(group, first, name, pick, ratio)}")
    if not parts:
        return []
    return [_answer(group, first, name), f"{name} against {first}: {', '.join(parts)}."]


def _answer(group: AtLoad, first: str, name: str) -> str:
    """Yes or no, by the tail TTFT; what it costs follows, because the table hides it."""
    word, pick = tail(group, "ttft")
    before, after = (cell(group.by_system[system], pick) for system in (first, name))
    gain = tail_gain(group, first, name) or 1.0
    answer = "yes" if gain >= HELPS else "a little" if gain >= CLEARLY else "no"
    text = f"Does {name} help here? {answer.capitalize()}: {word} is {_times(gain)}"
    if before is not None and after is not None:
        text += f" ({_seconds(after.median)} instead of {_seconds(before.median)})"
    costs = [
        f"{label} {_seconds(theirs.median)} instead of {_seconds(ours.median)}"
        for label, of in _COSTS
        for ours, theirs in [(cell(group.by_system[first], of), cell(group.by_system[name], of))]
        if ours is not None and theirs is not None and theirs.median > 1.05 * ours.median
    ]
    return f"{text}. It costs: {', '.join(costs)}." if costs else f"{text}."


_COSTS: tuple[tuple[str, Pick], ...] = (
    ("TPOT P50", lambda r: r.percentile_s("tpot", 50.0)),
    ("longest pause", lambda r: r.longest_pause_s),
)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _times(ratio: float) -> str:
    """``1.9x lower``; a difference of less than 5 % is none."""
    if 1 / 1.05 < ratio < 1.05:
        return "the same"
    return f"{ratio:.1f}x lower" if ratio > 1 else f"{1 / ratio:.1f}x higher"


def _by_run(group: AtLoad, first: str, name: str, pick: Pick, ratio: float) -> str:
    """The range over pairs of runs of the same seed and round, the way round that is above 1."""
    theirs = {(r.seed, r.round): pick(r) for r in group.by_system[first]}
    ratios = [
        before / after if ratio > 1 else after / before
        for run in group.by_system[name]
        for before, after in [(theirs.get((run.seed, run.round)), pick(run))]
        if before and after
    ]
    return f" ({min(ratios):.1f}-{max(ratios):.1f}x by run)" if len(ratios) > 1 else ""


def _over_loads(groups: Sequence[AtLoad], name: str) -> str:
    first = next(iter(groups[0].by_system))
    gains = [
        (gain, group.load)
        for group in groups
        for gain in [tail_gain(group, first, name)]
        if gain is not None
    ]
    word = tail(groups[0], "ttft")[0]
    best, where = max(gains, default=(1.0, groups[0].load))
    if best < CLEARLY:
        return f"{name} against {first}: {word} is at no load {CLEARLY}x lower."
    return f"{name} against {first}: {word} up to {best:.1f}x lower, at load {where:g}."


def _memory(group: AtLoad, world: World, drops: bool) -> list[str]:
    """Whether memory ran out under the first system, and what to change if it did not."""
    runs = next(iter(group.by_system.values()))
    at = f"load {group.load:g}: "
    peaks = [run.peak_kv_usage for run in runs if run.peak_kv_usage is not None]
    full = [run.kv_full_s for run in runs if run.kv_full_s is not None]
    if full:
        return [f"{at}the KV memory is full after {min(full):.0f} s under {runs[0].system}."]
    if not peaks or any(run.num_preemptions for run in runs):
        return []
    peak = max(peaks)
    gain = "dropping has nothing to gain" if drops else "the systems hardly differ"
    if any(_queues(run, group) for run in runs):
        what = "device" if world is World.SIMULATED else "machine"
        return [
            f"{at}requests wait, yet memory never fills (peak KV use {peak:.0%}): compute runs out "
            f"first, and {gain}. Longer prompts, less memory or a faster {what} would change that."
        ]
    factor = FULL / max(peak, 0.001)
    more = f"about {factor:.1f}x" if factor < 20 else "many times"
    return [
        f"{at}memory never fills at this rate (peak KV use {peak:.0%}): {gain}. Raise the rate "
        f"{more} (--request-rate, --scale or the file's loads), or take longer requests."
    ]


def _queues(run: RunResult, group: AtLoad) -> bool:
    tail_s = tail(group, "ttft")[1](run) or 0.0
    return tail_s > max(LONG_WAIT_S, FACTOR * run.percentile_s("ttft", 50.0))
