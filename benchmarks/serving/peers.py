"""Our engine beside vLLM's CPU build, its extra for AMD, OpenVINO GenAI and llama.cpp's server.

    python -m benchmarks.serving.peers --peers DIR [--threads 2] [--rounds 3] [--systems NAME ...]

The same model, threads and client; ``peer_servers`` says what DIR holds. A peer that is missing is
left out and said so. All servers run at once and take turns within every round, so that what else
the machine does hits them alike. Figures are medians over rounds, their ranges, and our ratio to
vLLM (with its better build) and to the best of all. ``benchmarks/results/peers.jsonl`` keeps runs
of several kinds of processors; ``docs/results.md`` has a table of each.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from benchmarks.report import Report
from benchmarks.serving.peer_servers import Server, installed, ours, running, say, until_ready
from kunserve.engine.cpu.kernels.levels import asked_level, fitting_levels, processor_name
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.metrics import compute_metrics
from kunserve_lab.bench.prompts import TokenIdPrompts
from kunserve_lab.bench.session import Target, find_model, measure
from kunserve_lab.workload.arrivals import immediate_arrivals
from kunserve_lab.workload.lengths import random_lengths
from kunserve_lab.workload.workload import Workload

READY_S = 240.0
TRIES = 4
Rates: TypeAlias = dict[tuple[str, str], list[float]]
"""Tokens per second of every round, by case and server."""


@dataclass(frozen=True)
class Case:
    """One measurement: ``streams`` requests at once, or one after the other for prefill."""

    name: str
    streams: int
    requests: int
    input_tokens: int
    output_tokens: int
    per_input: bool
    target: float
    """Our ratio to vLLM that the project aims at."""


CASES = (
    Case("prefill, prompt 512", 1, 6, 512, 1, True, 1.3),
    Case("decode, 1 stream", 1, 2, 128, 64, False, 1.9),
    Case("decode, 8 streams", 8, 16, 128, 64, False, 2.0),
    Case("decode, 32 streams", 32, 64, 128, 64, False, 1.8),
)


WARM_UP_TOKENS = 8
"""Of each answer in the first round: a slow peer's would take minutes."""


def warm_up(case: Case) -> Case:
    """The same shapes, over soon."""
    fewer = min(case.output_tokens, WARM_UP_TOKENS)
    return replace(case, requests=case.streams, output_tokens=fewer)


async def one(server: Server, case: Case, seed: int) -> float:
    """Tokens per second of one case: prompt tokens over TTFT, or output tokens over time."""
    model = await find_model([server.url], None, None, READY_S)
    settings = CallSettings(
        model=model, endpoint="/v1/completions", chat=False, ignore_eos=True, timeout_s=300
    )
    lengths = random_lengths(case.requests, case.input_tokens, case.output_tokens, 0.0, seed)
    workload = Workload(immediate_arrivals(case.requests), lengths, "all at once")
    target = Target((server.url,), settings, (), max_concurrency=case.streams)
    for _ in range(TRIES):  # llama.cpp's server closes connections that a client may use again
        outcome = await measure(target, workload, TokenIdPrompts(seed))
        metrics = compute_metrics(outcome.records, outcome.duration_s)
        if not metrics.num_failed:
            break
        say(f"{server.name}: {metrics.num_failed} of {case.requests} failed in {case.name}")
    if case.per_input:
        return case.input_tokens / metrics.ttft.median_s
    return metrics.output_throughput


def in_turns(servers: Sequence[Server], rounds: int) -> Rates:
    """Start all; in every round each case is computed by server after server.

    A run that is broken off gives its whole rounds; each cell is said when it is known.
    """
    whole: list[dict[tuple[str, str], float]] = []

    def told(case: Case, server: Server, number: int) -> float:
        found = asyncio.run(one(server, case if number else warm_up(case), number))
        say(f"round {number} of {rounds}, {case.name}, {server.name}: {found:,.0f} tokens/s")
        return found

    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        say(f"starting {', '.join(s.name for s in servers)} (vLLM takes minutes at first) ...")
        processes = [stack.enter_context(running(server, Path(logs))) for server in servers]
        for server, process in zip(servers, processes, strict=True):
            say(f"{server.name} ready in {until_ready(server, process, Path(logs)):.0f} s")
        try:
            for number in range(rounds + 1):  # the first round warms up
                turns = itertools.product(CASES, servers)
                whole.append({(c.name, s.name): told(c, s, number) for c, s in turns})
        except (KeyboardInterrupt, SystemExit):
            if len(whole) < 2:
                raise
            say("broken off: the whole rounds follow")
    return {key: [found[key] for found in whole[1:]] for key in whole[0]}


def main() -> None:
    """Start all, measure in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with the peers' installs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="*", help="of the installed ones; all by default")
    options = parser.parse_args()
    servers = [ours(options.threads)]
    if options.peers is not None:
        found, missing = installed(options.peers, options.threads)
        servers += [one for one in found if not options.systems or one.name in options.systems]
        if missing:
            say(f"left out, not installed under {options.peers}: {', '.join(missing)}")
    rates = in_turns(servers, options.rounds)
    level = asked_level() or next(iter(fitting_levels()), None)
    with Report(
        "peers",
        model="SmolLM2-135M",
        threads=options.threads,
        rounds=len(next(iter(rates.values()))),
        processor=processor_name(),
        kernels="none" if level is None else level.name,
    ) as report:
        show(report, servers, rates)


def show(report: Report, servers: list[Server], rates: Rates) -> None:
    """Medians and ranges over the rounds, and our ratios."""
    for case in CASES:
        medians = {one.name: statistics.median(rates[case.name, one.name]) for one in servers}
        for server in servers:
            values = rates[case.name, server.name]
            of = {"case": case.name, "weights": server.weights}
            report.add(server.name, medians[server.name], "tokens/s", **of)
            report.add(f"{server.name}, least", min(values), "tokens/s", **of)
            report.add(f"{server.name}, most", max(values), "tokens/s", **of)
        mine = medians.pop("kunserve")
        both = [value for name, value in medians.items() if name.startswith("vllm")]
        if both:
            report.add("ours / vllm", mine / max(both), "x", case=case.name)
            report.add("target of that", case.target, "x", case=case.name)
        if medians:
            report.add("ours / best peer", mine / max(medians.values()), "x", case=case.name)


if __name__ == "__main__":
    main()
