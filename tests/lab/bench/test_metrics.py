"""The definitions of docs/metrics.md on records small enough to check by hand."""

import pytest

from kunserve_lab.bench.metrics import (
    Slo,
    compute_metrics,
    e2el_s,
    is_good,
    itls_s,
    latency_stats,
    output_tokens_per_bin,
    peak_concurrency,
    slo_violations,
    tpot_s,
    ttft_s,
)
from kunserve_lab.bench.records import RequestRecord


def record(
    sent_s: float = 0.0,
    times_s: tuple[float, ...] = (1.0, 1.5, 3.0),
    output_tokens: int | None = None,
    error: str | None = None,
    number: int = 0,
) -> RequestRecord:
    last_s = times_s[-1] if times_s else None
    return RequestRecord(
        number=number,
        server="http://x",
        planned_s=sent_s,
        sent_s=sent_s,
        token_times_s=times_s,
        last_token_s=last_s,
        finish_s=last_s if last_s is not None else sent_s,
        input_tokens=10,
        asked_output_tokens=3,
        output_tokens=len(times_s) if output_tokens is None else output_tokens,
        finish_reason=None if error else "length",
        error=error,
    )


def test_latencies_of_one_request() -> None:
    one = record(sent_s=0.5)
    assert ttft_s(one) == 0.5
    assert e2el_s(one) == 2.5
    assert tpot_s(one) == pytest.approx((3.0 - 1.0) / 2)
    assert itls_s(one) == (0.5, 1.5)


def test_several_tokens_in_a_chunk_count_by_usage() -> None:
    one = record(output_tokens=9)
    assert tpot_s(one) == pytest.approx(2.0 / 8)
    assert len(itls_s(one)) == 2


def test_what_is_undefined_is_none() -> None:
    nothing = record(times_s=())
    assert (ttft_s(nothing), tpot_s(nothing), e2el_s(nothing)) == (None, None, None)
    assert tpot_s(record(times_s=(1.0,))) is None


def test_percentiles_interpolate_and_std_is_of_the_population() -> None:
    stats = latency_stats([1.0, 2.0, 3.0, 4.0], (50.0, 90.0))
    assert (stats.mean_s, stats.median_s, stats.count) == (2.5, 2.5, 4)
    assert stats.std_s == pytest.approx(1.118, abs=1e-3)
    assert stats.percentile_s(90.0) == pytest.approx(3.7)
    assert latency_stats([]).mean_s == 0.0


def test_totals_count_completed_requests_only() -> None:
    records = [record(), record(error="HTTP 503", times_s=(0.1,))]
    metrics = compute_metrics(records, duration_s=4.0)
    assert (metrics.num_completed, metrics.num_failed) == (1, 1)
    assert metrics.request_throughput == 0.25
    assert metrics.output_throughput == 0.75
    assert metrics.total_token_throughput == pytest.approx(13 / 4)
    assert metrics.ttft.count == 1 and metrics.itl.count == 2
    assert metrics.request_goodput is None
    assert metrics.peak_output_tokens_per_s == 2.0


def test_no_request_at_all() -> None:
    metrics = compute_metrics([], duration_s=0.0, slo=Slo(ttft_s=1.0))
    assert (metrics.num_completed, metrics.request_goodput) == (0, 0.0)
    assert metrics.peak_concurrent_requests == 0


def test_goodput_needs_every_objective() -> None:
    assert is_good(record(), Slo(ttft_s=1.0, tpot_s=1.0, e2el_s=3.0))
    assert not is_good(record(), Slo(ttft_s=0.9))
    assert not is_good(record(), Slo(tpot_s=0.9))
    assert not is_good(record(error="x"), Slo())
    assert is_good(record(times_s=(1.0,)), Slo(tpot_s=0.001))
    records = [record(), record(times_s=(5.0, 5.1))]
    assert compute_metrics(records, 2.0, slo=Slo(ttft_s=2.0)).request_goodput == 0.5


def test_slo_violations_count_failures() -> None:
    records = [record(), record(times_s=(9.0, 9.1)), record(error="x", times_s=()), record()]
    found = slo_violations(records, ttft_slo_s=2.0, tpot_slo_s=0.5)
    assert (found.ttft, found.tpot, found.either) == (0.5, 0.75, 1.0)
    assert slo_violations([], 1.0, 1.0).either == 0.0


def test_a_larger_factor_never_violates_more() -> None:
    records = [record(times_s=(delay, delay + 1.0)) for delay in (1.0, 2.0, 4.0, 8.0)]
    found = [slo_violations(records, factor, factor).ttft for factor in (1.0, 2.0, 4.0, 8.0)]
    assert found == [0.75, 0.5, 0.25, 0.0]


def test_tokens_are_spread_over_chunks_and_bins() -> None:
    rate = output_tokens_per_bin([record(output_tokens=6)], 1.0)
    assert rate.tolist() == [0.0, 4.0, 0.0, 2.0]
    assert output_tokens_per_bin([], 1.0).tolist() == []


def test_concurrency_counts_overlap_only() -> None:
    one, two = record(sent_s=0.0, times_s=(1.0,)), record(sent_s=1.0, times_s=(2.0,))
    assert peak_concurrency([one, two]) == 1
    assert peak_concurrency([one, record(sent_s=0.5, times_s=(2.0,)), two]) == 2
