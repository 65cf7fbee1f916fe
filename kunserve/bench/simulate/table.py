"""Results side by side, as text and as rows for other formats."""

from collections.abc import Sequence

from kunserve.bench.metrics import PERCENTILES, slo_violations_by_factor
from kunserve.bench.simulate.run import SimResult

FULL = 0.97
"""Use of the KV memory from which on no request of common size is admitted."""
CLEARLY = 1.1
"""Times lower that a P99 must be for its load to count as inside the window."""
SLO_FACTORS = tuple(float(factor) for factor in range(1, 11))


def violations(results: Sequence[SimResult]) -> list[list[float]]:
    """Per system the share of requests that miss either objective, at each of `SLO_FACTORS`.

    The base is the best P50 among the systems, as in the paper.
    """
    ttft_s = min(result.metrics.ttft.median_s for result in results)
    tpot_s = min(result.metrics.tpot.median_s for result in results)
    return [
        [
            shares.either
            for _, shares in slo_violations_by_factor(
                result.run.records, ttft_s, tpot_s, SLO_FACTORS
            )
        ]
        for result in results
    ]


def rows(results: Sequence[SimResult]) -> list[tuple[str, ...]]:
    """The whole table, head first."""
    lines = [("", *(result.run.label for result in results))]
    for name in ("ttft", "tpot"):
        for percentile in PERCENTILES:
            values = [getattr(r.metrics, name).percentile_s(percentile) * 1e3 for r in results]
            lines.append((f"{name.upper()} P{percentile:g} (ms)", *(f"{v:,.0f}" for v in values)))
    for place, factor in enumerate(SLO_FACTORS):
        shares = [by_factor[place] for by_factor in violations(results)]
        lines.append((f"SLO violations {factor:g}x", *(f"{share:.1%}" for share in shares)))
    lines.append(("requests/s", *(f"{r.metrics.request_throughput:.2f}" for r in results)))
    lines.append(("output tokens/s", *(f"{r.metrics.output_throughput:,.0f}" for r in results)))
    lines.append(
        (
            "completed / failed",
            *(f"{r.metrics.num_completed} / {r.metrics.num_failed}" for r in results),
        )
    )
    lines.append(("mean KV use", *(f"{mean_kv_use(r):.0%}" for r in results)))
    full = [kv_full_s(r) for r in results]
    lines.append(("KV memory full after (s)", *("-" if s is None else f"{s:.0f}" for s in full)))
    lines.append(("preemptions", *(str(r.num_preemptions) for r in results)))
    lines.append(("recomputed tokens", *(f"{r.lost_tokens:,}" for r in results)))
    if any(r.swapped_out_bytes for r in results):
        swapped = [f"{r.swapped_out_bytes / 1e9:,.1f}" for r in results]
        lines.append(("swapped out (GB)", *swapped))
    lines.append(("drops / restores", *(f"{r.num_drops} / {r.num_restores}" for r in results)))
    lines.append(("migrations", *(str(r.num_migrations) for r in results)))
    lines.append(
        (
            "instances started / given back",
            *(f"{r.num_ordered} / {r.num_given_back}" for r in results),
        )
    )
    lines.append(
        (
            "bubble ratio",
            *("-" if r.bubble_ratio is None else f"{r.bubble_ratio:.1%}" for r in results),
        )
    )
    lines.append(("GPU-hours", *(f"{r.gpu_hours:.2f}" for r in results)))
    return lines


def windows(by_scale: Sequence[tuple[float, Sequence[SimResult]]]) -> list[tuple[str, ...]]:
    """Over several loads: where each system's P99 TTFT beats the first one's, and by how much."""
    first, *others = by_scale[0][1]
    head = f"P99 TTFT against {first.run.label}"
    lines: list[tuple[str, ...]] = [(head, "at most", "at load", f"{CLEARLY}x or more at")]
    for place, other in enumerate(others, start=1):
        gains = [
            (results[0].metrics.ttft.percentile_s(99.0) / p99_s if p99_s else 1.0, scale, results)
            for scale, results in by_scale
            for p99_s in [results[place].metrics.ttft.percentile_s(99.0)]
        ]
        best, where, _ = max(gains, key=lambda gain: gain[0])
        inside = [
            f"{scale:g} ({mean_kv_use(results[0]):.0%} KV)"
            for gain, scale, results in gains
            if gain >= CLEARLY
        ]
        lines.append(
            (other.run.label, f"{best:.2f}x", f"{where:g}", ", ".join(inside) or "no load")
        )
    return lines


def mean_kv_use(result: SimResult) -> float:
    """Mean share of the KV memory in use, over samples of the run."""
    shares = [s.kv_usage for s in result.run.samples if s.kv_usage is not None]
    return sum(shares) / max(1, len(shares))


def kv_full_s(result: SimResult) -> float | None:
    """When the KV memory of all instances together was first full; None if it never was."""
    times = (s.time_s for s in result.run.samples if s.kv_usage is not None and s.kv_usage >= FULL)
    return next(times, None)


def as_text(lines: Sequence[tuple[str, ...]]) -> str:
    """Aligned columns."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = []
    for first, *rest in lines:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        shown.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(shown)


def summary(result: SimResult, scale: float) -> dict[str, object]:
    """One line of a results file: everything a curve or a claim needs."""
    metrics = result.metrics
    values: dict[str, object] = {
        "system": result.run.label,
        "scale": scale,
        "provenance": result.run.provenance,
        "num_requests": len(result.run.records),
        "num_failed": metrics.num_failed,
        "duration_s": round(metrics.duration_s, 3),
        "request_throughput": round(metrics.request_throughput, 4),
        "output_throughput": round(metrics.output_throughput, 2),
        "mean_kv_usage": round(mean_kv_use(result), 4),
        "kv_full_s": kv_full_s(result),
        "num_preemptions": result.num_preemptions,
        "lost_tokens": result.lost_tokens,
        "num_drops": result.num_drops,
        "num_restores": result.num_restores,
        "num_migrations": result.num_migrations,
        "num_ordered": result.num_ordered,
        "num_given_back": result.num_given_back,
        "bubble_ratio": None if result.bubble_ratio is None else round(result.bubble_ratio, 4),
        "gpu_hours": round(result.gpu_hours, 4),
        "moved_gb": round(result.bulk_bytes / 1e9, 3),
        "swapped_out_gb": round(result.swapped_out_bytes / 1e9, 3),
        "swapped_back_gb": round(result.swapped_back_bytes / 1e9, 3),
    }
    for name in ("ttft", "tpot"):
        stats = getattr(metrics, name)
        for percentile in PERCENTILES:
            values[f"{name}_p{percentile:g}_s"] = round(stats.percentile_s(percentile), 5)
    return values
