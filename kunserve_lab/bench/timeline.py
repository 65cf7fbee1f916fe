"""Series over time from a run's records, for figures. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kunserve_lab.bench.metrics import output_tokens_per_bin, tpot_s, ttft_s
from kunserve_lab.bench.records import RequestRecord, ServerSample

Array = npt.NDArray[np.float64]
_BIN_CHOICES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Binned:
    """Statistics per bin of time; a bin without a value is NaN."""

    centers_s: Array
    mean: Array
    p50: Array
    p99: Array


@dataclass(frozen=True, slots=True)
class Steps:
    """A quantity that changes at moments and holds between them."""

    times_s: Array
    values: Array


def bin_width_s(duration_s: float, most_bins: int = 80) -> float:
    """The finest round width that gives at most ``most_bins`` bins (or the coarsest one)."""
    return next(
        (width for width in _BIN_CHOICES_S if duration_s / width <= most_bins), _BIN_CHOICES_S[-1]
    )


def rate_per_bin(times_s: Sequence[float], duration_s: float, bin_s: float) -> Steps:
    """Events per second in each bin over ``[0, duration_s]``."""
    edges = _edges(duration_s, bin_s)
    counts = np.histogram(np.array(times_s, dtype=np.float64), edges)[0]
    return Steps(edges[:-1], counts / bin_s)


def output_rate(records: Sequence[RequestRecord], duration_s: float, bin_s: float) -> Steps:
    """Output tokens per second in each bin."""
    edges = _edges(duration_s, bin_s)
    tokens = output_tokens_per_bin(records, bin_s)
    padded = np.zeros(len(edges) - 1)
    count = min(len(padded), len(tokens))
    padded[:count] = tokens[:count]
    return Steps(edges[:-1], padded / bin_s)


def binned(times_s: Array, values: Array, duration_s: float, bin_s: float) -> Binned:
    """Mean, median and P99 of ``values`` in each bin of their ``times_s``."""
    edges = _edges(duration_s, bin_s)
    bins = np.clip((times_s / bin_s).astype(np.int64), 0, len(edges) - 2)
    stats = np.full((3, len(edges) - 1), np.nan)
    for place in np.unique(bins):
        inside = values[bins == place]
        stats[:, place] = (inside.mean(), *np.percentile(inside, (50, 99)))
    return Binned(edges[:-1] + bin_s / 2, stats[0], stats[1], stats[2])


def ttft_points(records: Sequence[RequestRecord]) -> tuple[Array, Array]:
    """(moment of sending, TTFT) of every completed request, in seconds."""
    pairs = [(record.sent_s, ttft_s(record)) for record in records if record.succeeded]
    kept = [(moment, value) for moment, value in pairs if value is not None]
    return _columns(kept)


def tpot_points(records: Sequence[RequestRecord]) -> tuple[Array, Array]:
    """(moment of sending, TPOT) of every completed request of two tokens or more, in seconds."""
    pairs = [(record.sent_s, tpot_s(record)) for record in records if record.succeeded]
    kept = [(moment, value) for moment, value in pairs if value is not None]
    return _columns(kept)


def in_flight(records: Sequence[RequestRecord]) -> Steps:
    """Requests sent and not yet ended, as the client sees them."""
    return _running_sum(
        [(record.sent_s, 1.0) for record in records]
        + [(record.finish_s, -1.0) for record in records]
    )


def waiting(records: Sequence[RequestRecord]) -> Steps:
    """Requests sent that have no token yet: queued or in prefill."""
    ends = [
        record.token_times_s[0] if record.token_times_s else record.finish_s for record in records
    ]
    return _running_sum(
        [(record.sent_s, 1.0) for record in records] + [(end_s, -1.0) for end_s in ends]
    )


def sampled(samples: Sequence[ServerSample], field: str) -> Steps | None:
    """One field of the samples, or None if the server never gave it."""
    pairs = [(sample.time_s, getattr(sample, field)) for sample in samples]
    times, values = _columns([(time, value) for time, value in pairs if value is not None])
    return Steps(times, values) if len(times) else None


def increments(samples: Sequence[ServerSample], field: str) -> Array:
    """Moments at which a counter was seen to have grown."""
    series = sampled(samples, field)
    if series is None:
        return np.zeros(0)
    return series.times_s[1:][np.diff(series.values) > 0]


def bubbles(samples: Sequence[ServerSample], window_s: float = 2.0) -> Steps | None:
    """Idle share of the time of pipelines' stages over each window in which they had work.

    None if there was no such window; NaN where no pipeline worked. ``docs/metrics.md``, Bubbles.
    """
    accounts = [
        (sample.time_s, sample.stage_busy_s, sample.stage_active_s)
        for sample in samples
        if sample.stage_busy_s is not None and sample.stage_active_s is not None
    ]
    windows: list[tuple[float, float]] = []
    for time_s, busy_s, active_s in accounts:
        if not windows:
            began = (time_s, busy_s, active_s)
            windows.append((time_s, np.nan))
        elif time_s - began[0] >= window_s:
            worked_s = active_s - began[2]
            share = 1.0 - (busy_s - began[1]) / worked_s if worked_s > 0.0 else np.nan
            windows.append((time_s, float(np.clip(share, 0.0, 1.0))))
            began = (time_s, busy_s, active_s)
    series = Steps(*_columns(windows))
    return None if np.isnan(series.values).all() else series


def whole_bubbles(samples: Sequence[ServerSample]) -> float | None:
    """Idle share of the time of pipelines' stages from the first to the last sample."""
    if not samples:
        return None
    first, last = samples[0], samples[-1]
    if last.stage_busy_s is None or last.stage_active_s is None:
        return None
    worked_s = last.stage_active_s - (first.stage_active_s or 0.0)
    busy_s = last.stage_busy_s - (first.stage_busy_s or 0.0)
    return 1.0 - busy_s / worked_s if worked_s > 0.0 else None


def _edges(duration_s: float, bin_s: float) -> Array:
    count = max(1, int(np.ceil(duration_s / bin_s - 1e-9)))
    return np.arange(count + 1, dtype=np.float64) * bin_s


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _running_sum(changes: list[tuple[float, float]]) -> Steps:
    times, steps = _columns(sorted(changes))
    return Steps(times, np.cumsum(steps))
