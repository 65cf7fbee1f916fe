"""A run's numbers in vLLM's words: the JSON keys and the console block. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kunserve_lab.bench.metrics import LatencyStats, RunMetrics, client_lag_s, itls_s, ttft_s
from kunserve_lab.bench.records import RequestRecord

LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_WIDTH = 50
_LAG_S = 0.1


class Presentation(NamedTuple):
    """What the user asked to see."""

    latencies: tuple[str, ...] = ("ttft", "tpot", "itl")
    request_rate: float | None = None
    """As configured; None for traces and for all at once."""
    max_concurrency: int | None = None


def _of(metrics: RunMetrics, name: str) -> LatencyStats:
    return {
        "ttft": metrics.ttft,
        "tpot": metrics.tpot,
        "itl": metrics.itl,
        "e2el": metrics.e2el,
    }[name]


def percentile_word(percentile: float) -> str:
    """``99`` for 99.0, ``99.9`` for 99.9."""
    return f"{percentile:g}"


def result_json(metrics: RunMetrics) -> dict[str, object]:
    """The run under vLLM's keys: every latency, times in milliseconds."""
    result: dict[str, object] = {
        "duration": metrics.duration_s,
        "completed": metrics.num_completed,
        "failed": metrics.num_failed,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.peak_output_tokens_per_s,
        "max_concurrent_requests": metrics.peak_concurrent_requests,
    }
    for name in LATENCIES:
        stats = _of(metrics, name)
        result[f"mean_{name}_ms"] = stats.mean_s * 1e3
        result[f"median_{name}_ms"] = stats.median_s * 1e3
        result[f"std_{name}_ms"] = stats.std_s * 1e3
        for percentile, value_s in stats.percentiles_s:
            result[f"p{percentile_word(percentile)}_{name}_ms"] = value_s * 1e3
    return result


def detailed_json(records: Sequence[RequestRecord]) -> dict[str, object]:
    """vLLM's per-request arrays (``--save-detailed``), in seconds."""
    return {
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.sent_s for record in records],
        "ttfts": [ttft_s(record) or 0.0 for record in records],
        "itls": [list(itls_s(record)) for record in records],
        "errors": [record.error or "" for record in records],
    }


def console_block(metrics: RunMetrics, shown: Presentation) -> str:
    """vLLM's ``Serving Benchmark Result`` block."""
    lines = [_title(" Serving Benchmark Result ", "=")]

    def row(label: str, value: float | int) -> None:
        text = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
        lines.append(f"{label:<40} {text}")

    row("Successful requests:", metrics.num_completed)
    row("Failed requests:", metrics.num_failed)
    if shown.max_concurrency is not None:
        row("Maximum request concurrency:", shown.max_concurrency)
    if shown.request_rate is not None:
        row("Request rate configured (RPS):", float(shown.request_rate))
    row("Benchmark duration (s):", metrics.duration_s)
    row("Total input tokens:", metrics.total_input_tokens)
    row("Total generated tokens:", metrics.total_output_tokens)
    row("Request throughput (req/s):", metrics.request_throughput)
    if metrics.request_goodput is not None:
        row("Request goodput (req/s):", metrics.request_goodput)
    row("Output token throughput (tok/s):", metrics.output_throughput)
    row("Peak output token throughput (tok/s):", metrics.peak_output_tokens_per_s)
    row("Peak concurrent requests:", float(metrics.peak_concurrent_requests))
    row("Total token throughput (tok/s):", metrics.total_token_throughput)
    for name in shown.latencies:
        short, header = LATENCIES[name]
        stats = _of(metrics, name)
        lines.append(_title(header, "-"))
        row(f"Mean {short} (ms):", stats.mean_s * 1e3)
        row(f"Median {short} (ms):", stats.median_s * 1e3)
        for percentile, value_s in stats.percentiles_s:
            row(f"P{percentile_word(percentile)} {short} (ms):", value_s * 1e3)
    lines.append("=" * _WIDTH)
    return "\n".join(line.rstrip() for line in lines)


def failure_lines(records: Sequence[RequestRecord], most: int = 5) -> list[str]:
    """The commonest reasons for failure, with how often; the number of others last."""
    reasons = Counter(record.error for record in records if record.error is not None)
    common = reasons.most_common(most)
    lines = [f"{count:>6} x {reason}" for reason, count in common]
    rest = sum(reasons.values()) - sum(count for _, count in common)
    return [*lines, f"{rest:>6} x other reasons"] if rest else lines


def cautions(records: Sequence[RequestRecord], ignore_eos: bool) -> list[str]:
    """What a careful reader of the numbers must know."""
    notes = []
    late = sorted(client_lag_s(record) for record in records)
    if late and late[int(0.99 * (len(late) - 1))] > _LAG_S:
        notes.append(
            f"1 % of the requests left over {late[int(0.99 * (len(late) - 1))]:.2f} s late: "
            "the client, or its --max-concurrency, could not keep up with the workload."
        )
    done = [record for record in records if record.succeeded]
    asked = sum(record.asked_output_tokens for record in done)
    if done and not ignore_eos and sum(record.output_tokens for record in done) < 0.9 * asked:
        notes.append(
            "Outputs are shorter than the workload asks for: pass --ignore-eos to replay its "
            "lengths (the server must support it)."
        )
    return notes


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{_WIDTH}}"
