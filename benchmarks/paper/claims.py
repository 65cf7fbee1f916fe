"""The paper's claims, each with our figure and the reason where they differ.

A figure is picked by a rule that stands here ("the load at which P99 falls most"), not by hand.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.paper.kept_results import (
    BURSTGPT,
    HEAVY,
    LONGBENCH,
    LONGBENCH_72B,
    SHAREGPT,
    figures_of,
    ranged,
    runs_of,
    signed,
)
from kunserve_lab.compare.results import RunResult


@dataclass(frozen=True, slots=True)
class Claim:
    """One row: what the paper says, what we have, and why they differ."""

    what: str
    paper: str
    ours: Callable[[], str]
    why: str
    where: str
    """The experiment or command."""


def _p99(name: str) -> str:
    """The best P99 TTFT of `drop` against `recompute`."""
    runs = runs_of(name)
    at = runs.best()
    before_s, after_s = (runs.run(s, at).ttft_p99_s for s in ("recompute", "drop"))
    return f"**{runs.gain(at):.1f}x** ({before_s:.1f} to {after_s:.1f} s)"


def _violations(name: str) -> str:
    """Where the share of late requests falls most."""
    runs = runs_of(name)
    pairs = []
    for at in runs.loads:
        before, after = runs.violations("recompute", at), runs.violations("drop", at)
        if before is not None and after is not None:
            pairs.append((before - after, before, after))
    points, before, after = max(pairs)
    return f"{100 * points:.0f} points ({100 * before:.0f} to {100 * after:.0f} %)"


def _range(values: Sequence[float], form: str = "{:.0f}") -> str:
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"


def _tpot(name: str) -> str:
    """What `drop` adds to P50 TPOT where it helps."""
    runs = runs_of(name)
    rises = [
        100 * (runs.run("drop", at).tpot_p50_s / runs.run("recompute", at).tpot_p50_s - 1)
        for at in runs.helped
    ]
    return f"{_range(rises, '{:+.0f}')} %"


def _pipelines() -> str:
    """Output tokens/s lost by each depth of static pipelines."""
    plain, deep = runs_of(LONGBENCH), runs_of("pp_degree")
    parts = []
    for name, system, runs in (
        ("pairs", "static-pp", plain),
        ("fours", "static-pp4", deep),
        ("eights", "static-pp8", deep),
    ):
        lost = [
            100
            * (1 - runs.run(system, at).output_throughput
               / plain.run("recompute", at).output_throughput)
            for at in deep.loads
        ]  # fmt: skip
        parts.append(f"{name} {_range(lost)} %")
    return ", ".join(parts) + " lower"


ABLATION_LOAD = 0.4


def _ablated(system: str) -> dict[int, RunResult]:
    return runs_of("ablation").draws(system, ABLATION_LOAD)


def _against(system: str, other: str, *fields: str) -> str:
    """How many times lower the system's latencies are than the other's in equal draws."""
    one, two = _ablated(system), _ablated(other)
    return " / ".join(
        ranged((getattr(two[seed], field) / getattr(one[seed], field) for seed in one), "x")
        for field in fields
    )


_TAILS = ("ttft_p90_s", "ttft_p99_s", "ttft_p999_s")


def _bubbles() -> str:
    names = ("drop-basic", "drop-no-lookahead", "drop")
    basic, tokens, ours = (
        100 * statistics.median(run.bubble_ratio or 0.0 for run in _ablated(name).values())
        for name in names
    )
    return f"{tokens:.1f} % to {ours:.1f} % ({basic:.1f} % without priority on the links too)"


def _restoration(field: str) -> str:
    runs = runs_of("restoration_640s")
    (at,) = runs.loads
    kept, restored = (getattr(runs.run(s, at), field) for s in ("drop-no-restore", "drop"))
    return signed(100 * (restored / kept - 1))


BURST_BEGIN_S = 45.0


def _stands() -> str:
    runs = runs_of("extreme_burst")
    (at,) = runs.loads
    full_s = [runs.run(system, at).kv_full_s for system in ("recompute", "drop")]
    before_s, after_s = (s - BURST_BEGIN_S for s in full_s if s is not None)
    drops = runs.run("drop", at).num_drops
    return (
        f"**{after_s / before_s:.1f} times** (KV full {before_s:.0f} s after the burst's begin "
        f"under recompute, {after_s:.0f} s under drop; {drops} drops)"
    )


def _reliefs() -> str:
    runs = runs_of(LONGBENCH)
    plain = runs.run("recompute", ABLATION_LOAD)
    swap, migrate = (
        plain.ttft_p99_s / runs.run(name, ABLATION_LOAD).ttft_p99_s for name in ("swap", "migrate")
    )
    return (
        f"P99 TTFT is {plain.ttft_p99_s / plain.ttft_p50_s:.0f}x its P50; swap lowers P99 by "
        f"{swap:.2f}x, migrate by {migrate:.2f}x"
    )


def _cost_model() -> str:
    found = [
        (line["name"], line["settings"]["model"], line["value"])
        for line in figures_of("cost_model")
    ]
    mean = [value for name, model, value in found if name == "mean error" and model == "kunserve"]
    most = [value for name, model, value in found if name != "mean error" and model == "kunserve"]
    blind = [v for name, model, v in found if name == "mean error" and model != "kunserve"]
    return (
        f"{_range(mean, '{:.1f}')} % mean, at most {_range(most)} %; "
        f"without attention {_range(blind, '{:.0f}')} % mean"
    )


CLAIMS = (
    Claim(
        "P99 TTFT, 14B",
        "12.7-72.2x lower",
        lambda: (
            f"LongBench {_p99(LONGBENCH)}; whole trace {_p99('whole_trace_14b')}; "
            f"ShareGPT {_p99(SHAREGPT)}; BurstGPT-like {_p99(BURSTGPT)}"
        ),
        "Our bursts outlast the freed memory, and arithmetic ends soon after memory.",
        "`end_to_end_*`, `whole_trace_14b`",
    ),
    Claim(
        "P99 TTFT where weights take more of the memory",
        "more effective",
        lambda: _p99(HEAVY),
        "More memory is what is missing there: weights take 63 % of it.",
        "`heavy_weights_14b`",
    ),
    Claim(
        "P99 TTFT, 72B", "8.4-11.9x lower", lambda: _p99(LONGBENCH_72B), "As for 14B.",
        "`end_to_end_longbench_72b`",
    ),
    Claim(
        "requests over the SLO (5x)",
        "7.2-12.8 points fewer",
        lambda: (
            f"LongBench {_violations(LONGBENCH)}; heavy weights {_violations(HEAVY)}; "
            f"72B {_violations(LONGBENCH_72B)}"
        ),
        "Base: the best P50 of all systems, stricter than the paper's.",
        "the same",
    ),
    Claim(
        "P50 TPOT of drop",
        "+15.8 to +22.7 %",
        lambda: (
            f"LongBench {_tpot(LONGBENCH)}; ShareGPT {_tpot(SHAREGPT)}; "
            f"72B {_tpot(LONGBENCH_72B)}; heavy weights {_tpot(HEAVY)}"
        ),
        "At the loads where P99 falls by 1.1x or more.",
        "the same",
    ),
    Claim(
        "throughput of static pipelines",
        "3.3-21.8 % lower",
        _pipelines,
        "Every stage reads its weights and pays the host once per microbatch.",
        "`pp_degree`, loads 0.28-0.44",
    ),
    Claim(
        "bubbles without and with lookahead",
        "21.9 % to 8.3 %",
        _bubbles,
        "Our pipelines are mostly pairs.",
        "`ablation`, load 0.4, five draws",
    ),
    Claim(
        "drop alone: P90 / P99 / P99.9 TTFT",
        "8.8 / 11.7 / 10.3x",
        lambda: (
            f"{_against('drop-basic', 'recompute', *_TAILS)}; with all techniques "
            f"{_against('drop', 'recompute', *_TAILS)}"
        ),
        "As for P99 above.",
        "`ablation`, five draws",
    ),
    Claim(
        "coordinated exchange: P99 / P99.9 TTFT",
        "1.5 / 1.4x",
        lambda: _against("drop", "drop-no-priority", "ttft_p99_s", "ttft_p999_s"),
        "Few pieces are in flight at once: activations wait for milliseconds anyway.",
        "`ablation`, five draws",
    ),
    Claim(
        "restoration: P50 TTFT / P50 TPOT / P99 TTFT",
        "-28 % / -23 % / 6.4x lower",
        lambda: " / ".join(
            _restoration(field) for field in ("ttft_p50_s", "tpot_p50_s", "ttft_p99_s")
        ),
        "The second burst overloads arithmetic at any load that fills memory in the first.",
        "`restoration_640s`",
    ),
    Claim(
        "extreme burst, 72B: stands longer", "1.5 times", _stands, "-", "`extreme_burst`",
    ),
    Claim(
        "reliefs that drop nothing",
        "TTFT up by two orders of magnitude",
        _reliefs,
        "They make no memory, and little is preempted. [Parking](decisions/parking.md) acts before "
        "that.",
        f"`{LONGBENCH}`, load 0.4",
    ),
    Claim(
        "cost model",
        "under 5 %",
        _cost_model,
        "Against the roofline that times simulated steps; on a real CPU it is 2-4 %.",
        "`python -m benchmarks.brain.cost_model --against roofline`",
    ),
)  # fmt: skip
