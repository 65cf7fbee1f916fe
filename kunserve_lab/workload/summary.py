"""What a workload asks for, in numbers."""

from dataclasses import dataclass

import numpy as np

from kunserve_lab.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """Rates are over ``duration_s``; the peak is that of the busiest bin of ``bin_s``."""

    num_requests: int
    duration_s: float
    mean_rate: float
    """Requests per second; infinite when all arrive at once."""
    peak_rate: float
    peak_over_mean: float
    bin_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    max_input_tokens: int
    max_output_tokens: int
    max_total_tokens: int


def arrivals_per_bin(arrival_s: tuple[float, ...], bin_s: float) -> tuple[int, ...]:
    """Arrivals in [0, bin), [bin, 2 bin), ... up to the last arrival."""
    if not arrival_s:
        return ()
    bins = (np.array(arrival_s) / bin_s).astype(np.int64)
    return tuple(np.bincount(bins).tolist())


def summarize(workload: Workload, bin_s: float = 10.0) -> WorkloadSummary:
    """Counts, rates and lengths of ``workload``; needs at least one request."""
    assert len(workload) > 0, workload.arrivals_source
    duration_s = workload.duration_s
    mean_rate = len(workload) / duration_s if duration_s > 0 else float("inf")
    width_s = min(bin_s, duration_s) if duration_s > 0 else bin_s
    if duration_s <= bin_s:
        peak_rate = mean_rate
    else:
        peak_rate = max(arrivals_per_bin(workload.arrival_s, width_s)) / width_s
    lengths = workload.lengths
    totals = np.array(lengths.input_tokens) + np.array(lengths.output_tokens)
    return WorkloadSummary(
        num_requests=len(workload),
        duration_s=duration_s,
        mean_rate=mean_rate,
        peak_rate=peak_rate,
        peak_over_mean=peak_rate / mean_rate if duration_s > 0 else 1.0,
        bin_s=width_s,
        mean_input_tokens=lengths.mean_input_tokens,
        mean_output_tokens=lengths.mean_output_tokens,
        max_input_tokens=max(lengths.input_tokens),
        max_output_tokens=max(lengths.output_tokens),
        max_total_tokens=int(totals.max()),
    )
