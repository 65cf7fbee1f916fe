"""What somebody who reads along sees of an answer: how long it waits, and which tokens are late.

A reader begins with the first token and reads so many each second. Defined in ``docs/metrics.md``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kunserve_lab.bench.records import RequestRecord

READER_RATES = (4.0, 8.0)
"""Tokens per second: of somebody who reads with care, and of one faster than most read silently."""


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """Over all completed requests, for readers of one rate."""

    tokens_per_s: float
    stall_p50_s: float
    stall_p99_s: float
    """Of each request, all seconds in which its reader waits."""
    late_share: float
    """Of all tokens, those that came after they were due."""


def lateness_s(record: RequestRecord, tokens_per_s: float) -> npt.NDArray[np.float64]:
    """[chunks] how long after it was due each chunk came; negative before.

    Token ``j`` is due ``j / tokens_per_s`` after the first. A record's tokens are spread evenly
    over its chunks, since a chunk does not say how many it carries.
    """
    times = np.array(record.token_times_s)
    if not len(times):
        return times
    first_tokens = np.arange(len(times)) * (record.output_tokens / len(times))
    lateness: npt.NDArray[np.float64] = times - times[0] - first_tokens / tokens_per_s
    return lateness


def stall_s(record: RequestRecord, tokens_per_s: float) -> float:
    """Visible stall: the seconds, all together, in which its reader has nothing to read.

    Whoever has waited goes on from there, so it is the largest lateness of a token.
    """
    return float(lateness_s(record, tokens_per_s).max(initial=0.0))


def reader_stats(records: Sequence[RequestRecord], tokens_per_s: float) -> ReaderStats:
    """Of these completed requests. A token counts as late from a millisecond on."""
    found = [lateness_s(record, tokens_per_s) for record in records]
    stalls = [late.max(initial=0.0) for late in found] or [0.0]
    num_late = sum(
        float((late > 1e-3).mean()) * record.output_tokens
        for record, late in zip(records, found, strict=True)
        if len(late)
    )
    p50, p99 = np.percentile(stalls, [50.0, 99.0]).tolist()
    num_tokens = sum(record.output_tokens for record in records)
    return ReaderStats(tokens_per_s, p50, p99, num_late / max(1, num_tokens))
