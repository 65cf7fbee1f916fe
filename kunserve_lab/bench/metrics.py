"""Every number of a run, as a pure function of its records. Defined in ``docs/metrics.md``.

The definitions are those of ``vllm bench serve``. Nothing here knows where the records come
from: the client and the simulator are measured by the same code.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kunserve_lab.bench.readers import READER_RATES, ReaderStats, reader_stats
from kunserve_lab.bench.records import RequestRecord

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Summary of one latency over requests (or over gaps, for ITL). All 0 when ``count`` is."""

    count: int
    mean_s: float
    median_s: float
    std_s: float
    percentiles_s: tuple[tuple[float, float], ...]
    """(percentile, seconds), in the order asked for; linear interpolation."""

    def percentile_s(self, percentile: float) -> float:
        """One of the percentiles that were asked for."""
        return dict(self.percentiles_s)[percentile]


@dataclass(frozen=True, slots=True)
class Slo:
    """Largest latencies that are still good. None: no demand on it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None


@dataclass(frozen=True, slots=True)
class SloViolations:
    """Share of all requests, 0 to 1. A failed request violates every objective."""

    num_requests: int
    ttft: float
    tpot: float
    either: float


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The numbers of one run. Latencies and throughput count completed requests only."""

    num_completed: int
    num_failed: int
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    """Good requests per second; None without an objective."""
    peak_output_tokens_per_s: float
    peak_concurrent_requests: int
    ttft: LatencyStats
    tpot: LatencyStats
    itl: LatencyStats
    e2el: LatencyStats
    pause: LatencyStats
    """The longest gap within each response."""
    longest_pause_s: float
    readers: tuple[ReaderStats, ...]
    """For each of `READER_RATES`."""


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token: from sending to the first token; None if there was none."""
    return record.token_times_s[0] - record.sent_s if record.token_times_s else None


def e2el_s(record: RequestRecord) -> float | None:
    """End-to-end latency: from sending to the last token; None if there was none."""
    return None if record.last_token_s is None else record.last_token_s - record.sent_s


def tpot_s(record: RequestRecord) -> float | None:
    """Mean time per output token after the first; None for fewer than two tokens."""
    if not record.token_times_s or record.last_token_s is None or record.output_tokens < 2:
        return None
    return (record.last_token_s - record.token_times_s[0]) / (record.output_tokens - 1)


def itls_s(record: RequestRecord) -> tuple[float, ...]:
    """Gaps between one chunk of tokens and the next."""
    times = record.token_times_s
    return tuple(after - before for before, after in pairwise(times))


def pause_s(record: RequestRecord) -> float | None:
    """The longest gap between one chunk of tokens and the next; None for fewer than two chunks."""
    return max(itls_s(record), default=None)


def client_lag_s(record: RequestRecord) -> float:
    """How late the client sent the request: large values mean that the client was too slow."""
    return record.sent_s - record.planned_s


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Whether the request completed within every objective (one token: TPOT counts as 0)."""
    if not record.succeeded:
        return False
    pairs = (
        (ttft_s(record), slo.ttft_s),
        (tpot_s(record) or 0.0, slo.tpot_s),
        (e2el_s(record), slo.e2el_s),
    )
    return all(limit is None or (value is not None and value <= limit) for value, limit in pairs)


def slo_violations(
    records: Sequence[RequestRecord], ttft_slo_s: float, tpot_slo_s: float
) -> SloViolations:
    """Share of the requests that miss the objective for TTFT, for TPOT, and for either."""
    total = len(records)
    if not total:
        return SloViolations(0, 0.0, 0.0, 0.0)
    by_ttft = [not is_good(record, Slo(ttft_s=ttft_slo_s)) for record in records]
    by_tpot = [not is_good(record, Slo(tpot_s=tpot_slo_s)) for record in records]
    either = sum(one or other for one, other in zip(by_ttft, by_tpot, strict=True))
    return SloViolations(total, sum(by_ttft) / total, sum(by_tpot) / total, either / total)


def latency_stats(
    values_s: Sequence[float], percentiles: Sequence[float] = PERCENTILES
) -> LatencyStats:
    """Mean, median, population standard deviation and percentiles."""
    values = np.array(values_s if len(values_s) else [0.0])
    levels = np.percentile(values, list(percentiles)).tolist()
    return LatencyStats(
        count=len(values_s),
        mean_s=float(values.mean()),
        median_s=float(np.median(values)),
        std_s=float(values.std()),
        percentiles_s=tuple(zip(percentiles, levels, strict=True)),
    )


def compute_metrics(
    records: Sequence[RequestRecord],
    duration_s: float,
    percentiles: Sequence[float] = PERCENTILES,
    slo: Slo | None = None,
) -> RunMetrics:
    """The numbers of a run that took ``duration_s``, from its start to its last response."""
    done = [record for record in records if record.succeeded]
    seconds = max(duration_s, 1e-9)
    num_input = sum(record.input_tokens for record in done)
    num_output = sum(record.output_tokens for record in done)
    good = None if slo is None else sum(is_good(record, slo) for record in records) / seconds

    def stats(values: Iterable[float | None]) -> LatencyStats:
        return latency_stats([value for value in values if value is not None], percentiles)

    pauses = [pause_s(record) for record in done]
    return RunMetrics(
        num_completed=len(done),
        num_failed=len(records) - len(done),
        duration_s=duration_s,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=len(done) / seconds,
        output_throughput=num_output / seconds,
        total_token_throughput=(num_input + num_output) / seconds,
        request_goodput=good,
        peak_output_tokens_per_s=float(output_tokens_per_bin(done, 1.0).max(initial=0.0)),
        peak_concurrent_requests=peak_concurrency(done),
        ttft=stats(map(ttft_s, done)),
        tpot=stats(map(tpot_s, done)),
        itl=stats(gap for record in done for gap in itls_s(record)),
        e2el=stats(map(e2el_s, done)),
        pause=stats(pauses),
        longest_pause_s=max((pause for pause in pauses if pause is not None), default=0.0),
        readers=tuple(reader_stats(done, rate) for rate in READER_RATES),
    )


def output_tokens_per_bin(
    records: Sequence[RequestRecord], bin_s: float
) -> npt.NDArray[np.float64]:
    """Output tokens that arrived in each bin. A record's tokens are spread evenly over its chunks,
    since a chunk does not say how many it carries.
    """
    times = [time for record in records for time in record.token_times_s]
    weights = [
        record.output_tokens / len(record.token_times_s)
        for record in records
        for _ in record.token_times_s
    ]
    if not times:
        return np.zeros(0)
    bins = np.floor(np.array(times) / bin_s).astype(np.int64)
    return np.bincount(np.maximum(bins, 0), weights=np.array(weights)).astype(np.float64)


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests in flight at one moment; one that ends as another is sent does not overlap."""
    edges = sorted(
        [(record.sent_s, 1) for record in records] + [(record.finish_s, -1) for record in records]
    )
    steps = np.cumsum([step for _, step in edges])
    return int(steps.max(initial=0))
