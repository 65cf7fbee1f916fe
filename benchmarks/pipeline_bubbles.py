"""Lookahead off and on, on a real pipeline over a real queue: bubbles, latency, throughput.

    python -m benchmarks.pipeline_bubbles [--num-long 24] [--num-chat 160] [--rounds 1]

Two instances of SmolLM2 with one thread each become a pipeline of two stages by a forced drop, and
stay one. All requests of a queue are sent at once, first LongBench's lengths, then ShareGPT's, to
a server with lookahead and to one with `--no-lookahead`. Bubbles are the stages' own account
(`docs/metrics.md`). Each stage needs a core to itself: where two share one, waiting for it counts
as busy. `benchmarks.lookahead` asks the same of simulated pipelines.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report, Setting
from kunserve_lab.bench.timeline import whole_bubbles
from kunserve_lab.compare.real import RealRun, run_system
from kunserve_lab.compare.settings import RealSetup
from kunserve_lab.compare.systems import find_system
from kunserve_lab.workload.data.catalog import locate
from kunserve_lab.workload.lengths import clip_total, sample_lengths
from kunserve_lab.workload.traces import read_lengths
from kunserve_lab.workload.workload import Lengths, Workload

_PAIRS = find_system("static-pp")
SYSTEMS = (replace(_PAIRS, name="static-pp-lookahead", lookahead=True), _PAIRS)


def queue_of(name: str, count: int, options: argparse.Namespace) -> Workload:
    """So many requests of a data set, all at time 0, none longer than ``--max-total-tokens``."""
    drawn = sample_lengths(read_lengths(locate(name)), count, options.seed)
    most_output = options.max_total_tokens // 2
    outputs = tuple(min(tokens, most_output) for tokens in drawn.output_tokens)
    lengths = Lengths(drawn.input_tokens, outputs, f"{drawn.source}, outputs to {most_output}")
    return Workload((0.0,) * count, clip_total(lengths, options.max_total_tokens), "all at once")


def queued_bubbles(result: RealRun) -> float | None:
    """Bubbles until the last request was admitted: while there was a queue to look ahead over."""
    samples = result.run.samples
    queued = [index for index, sample in enumerate(samples) if sample.num_waiting]
    return whole_bubbles(samples[: queued[-1] + 1]) if queued else None


def describe(report: Report, result: RealRun, queue: str, round_number: int) -> None:
    """What one system did with one queue."""
    metrics = result.metrics
    case: dict[str, Setting] = {"queue": queue, "system": result.run.label, "round": round_number}
    for name, share in (
        ("bubbles while queued", queued_bubbles(result)),
        ("bubbles", whole_bubbles(result.run.samples)),
    ):
        report.add(name, None if share is None else 100 * share, "%", **case)
    report.add("throughput", metrics.total_token_throughput, "tokens/s", **case)
    report.add("failed", metrics.num_failed, "", **case)
    for name, stats in (("TTFT", metrics.ttft), ("TPOT", metrics.tpot)):
        for percentile in (50.0, 90.0, 99.0):
            value_ms = stats.percentile_s(percentile) * 1e3
            report.add(f"{name} P{percentile:g}", value_ms, "ms", **case)


def main() -> None:
    """Both queues, both systems; a round more of each with ``--rounds``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-long", type=int, default=24, help="0 leaves the queue out")
    parser.add_argument("--num-chat", type=int, default=160, help="0 leaves the queue out")
    parser.add_argument("--max-total-tokens", type=int, default=4096, help="of one request")
    parser.add_argument("--instance-memory", default="420MiB")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--profile", type=Path, help="of `kunserve profile`; else serve's choice")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = {"longbench": options.num_long, "sharegpt": options.num_chat}
    queues = {name: queue_of(name, count, options) for name, count in counts.items() if count}
    setup = RealSetup(
        instance_memory=options.instance_memory,
        max_num_batched_tokens=options.max_num_batched_tokens,
        profile=options.profile,
    )
    with Report(
        "pipeline_bubbles", model=setup.model, budget=setup.max_num_batched_tokens
    ) as report:
        for number in range(options.rounds):
            for name, queue in queues.items():
                for system in SYSTEMS:
                    found = run_system(system, setup, queue, seed=options.seed, say=say)
                    describe(report, found, name, number)


def say(text: str) -> None:
    """Progress, beside the figures."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
