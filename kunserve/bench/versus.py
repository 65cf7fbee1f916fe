"""Several systems under one workload, one after the other, in one run and one table."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kunserve.bench.client import CallSettings
from kunserve.bench.environment import environment
from kunserve.bench.metrics import (
    PERCENTILES,
    RunMetrics,
    SloViolations,
    compute_metrics,
    slo_violations,
)
from kunserve.bench.progress import ProgressLine
from kunserve.bench.prompts import TokenIdPrompts
from kunserve.bench.runfile import Run
from kunserve.bench.server_process import running_server
from kunserve.bench.session import Target, find_model, measure
from kunserve.bench.timeline import whole_bubbles
from kunserve.workload.workload import Workload

SLO_FACTOR = 5.0
"""The objective is this many times the better system's P50 (the paper's)."""


@dataclass(frozen=True, slots=True)
class System:
    """A server to start: its name in the table, and ``kunserve serve``'s arguments."""

    label: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One system's run."""

    run: Run
    metrics: RunMetrics
    num_preemptions: int
    num_drops: int
    num_restores: int
    transitions: tuple[str, ...]
    """The server's own log lines."""


def run_systems(
    systems: Sequence[System],
    workload: Workload,
    *,
    seed: int = 0,
    timeout_s: float = 3600.0,
    say: Callable[[str], None] = lambda text: None,
    prepare: Callable[[str], None] = lambda url: None,
) -> list[Result]:
    """Start each system afresh, replay the same requests, stop it.

    ``prepare`` is given the address of each server before its first request.
    """
    results = []
    for system in systems:
        say(f"{system.label}: starting kunserve serve {' '.join(system.flags)}")
        with running_server(system.flags) as server:
            prepare(server.url)
            say(f"{system.label}: {len(workload)} requests over {workload.duration_s:.0f} s")
            run = asyncio.run(_replay(system, server.url, workload, seed, timeout_s))
            transitions = tuple(server.transitions())
        metrics = compute_metrics(run.records, run.duration_s)
        results.append(
            Result(
                run=run,
                metrics=metrics,
                num_preemptions=_last(run, "num_preemptions"),
                num_drops=_last(run, "num_drops"),
                num_restores=_last(run, "num_restores"),
                transitions=transitions,
            )
        )
    return results


async def _replay(system: System, url: str, workload: Workload, seed: int, timeout_s: float) -> Run:
    model = await find_model([url], None, None, 30.0)
    settings = CallSettings(
        model=model, endpoint="/v1/completions", chat=False, ignore_eos=True, timeout_s=timeout_s
    )
    target = Target((url,), settings, (f"{url}/metrics",), num_warmups=2)
    with ProgressLine(len(workload)) as progress:
        outcome = await measure(target, workload, TokenIdPrompts(seed), progress)
    return Run(
        label=system.label,
        provenance=workload.provenance,
        duration_s=outcome.duration_s,
        records=outcome.records,
        samples=outcome.samples,
        config=(("serve", " ".join(system.flags)), ("seed", seed)),
        environment=tuple(environment().items()),
    )


def _last(run: Run, field: str) -> int:
    values = [v for v in (getattr(sample, field) for sample in run.samples) if v is not None]
    return int(values[-1]) if values else 0


def violations(results: Sequence[Result], factor: float = SLO_FACTOR) -> list[SloViolations]:
    """Each system against ``factor`` times the better system's P50 TTFT and TPOT."""
    ttft_s = factor * min(r.metrics.ttft.median_s for r in results)
    tpot_s = factor * min(r.metrics.tpot.median_s for r in results)
    return [slo_violations(r.run.records, ttft_s, tpot_s) for r in results]


def table(results: Sequence[Result]) -> str:
    """All systems side by side, and the ratios of the first to each other one."""
    rows: list[tuple[str, list[str]]] = []
    for name, pick in (("TTFT", "ttft"), ("TPOT", "tpot")):
        for percentile in PERCENTILES:
            values = [getattr(r.metrics, pick).percentile_s(percentile) * 1e3 for r in results]
            cells = [f"{value:,.0f}" for value in values]
            rows.append((f"{name} P{percentile:g} (ms)", [*cells, *_ratios(values)]))
    for title, shares in (
        ("SLO violations (5x P50)", [v.either for v in violations(results)]),
        ("  by TTFT", [v.ttft for v in violations(results)]),
    ):
        rows.append((title, [f"{share:.1%}" for share in shares]))
    rates = [r.metrics.output_throughput for r in results]
    rows.append(("output tokens/s", [*[f"{rate:,.1f}" for rate in rates], *_ratios(rates)]))
    rows.append(
        (
            "completed / failed",
            [f"{r.metrics.num_completed} / {r.metrics.num_failed}" for r in results],
        )
    )
    rows.append(("preemptions", [str(r.num_preemptions) for r in results]))
    rows.append(("drops / restores", [f"{r.num_drops} / {r.num_restores}" for r in results]))
    idle = [whole_bubbles(r.run.samples) for r in results]
    if any(share is not None for share in idle):
        cells = ["-" if share is None else f"{share:.1%}" for share in idle]
        rows.append(("bubbles while pipelined", cells))
    labels = [r.run.label for r in results]
    head = ["", *labels, *[f"{labels[0]} / {label}" for label in labels[1:]]]
    return _aligned(head, rows)


def _ratios(values: Sequence[float]) -> list[str]:
    return [f"{values[0] / value:.2f}x" if value else "-" for value in values[1:]]


def _aligned(head: list[str], rows: list[tuple[str, list[str]]]) -> str:
    lines = [head, *[[name, *cells] for name, cells in rows]]
    widths = [max(len(line[i]) if i < len(line) else 0 for line in lines) for i in range(len(head))]
    shown = []
    for line in lines:
        first, *rest = line
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=False)]
        shown.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(shown)
