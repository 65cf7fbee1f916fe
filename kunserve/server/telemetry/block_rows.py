"""What becomes of KV blocks in the prefix cache, and of requests whose blocks are taken."""

from collections.abc import Callable

from kunserve.core.load import PREEMPTION_BOUNDS, RESIDENCY_BOUNDS_S, LeaderTotals
from kunserve.core.snapshots import InstanceSnapshot
from kunserve.server.telemetry.cluster_rows import Look, of_instance
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_row import Row, Value, gauge, histogram


def _residency(
    name: str, meaning: str, read: Callable[[LeaderTotals], tuple[tuple[int, ...], float]]
) -> Row[Look]:
    """Of blocks of the prefix cache."""

    def measured(instance: InstanceSnapshot) -> Histogram:
        return Histogram.of_counts(RESIDENCY_BOUNDS_S, *read(instance.totals))

    return of_instance(histogram, f"vllm:kv_block_{name}_seconds", meaning, measured)


def _preemptions(instance: InstanceSnapshot) -> Histogram:
    totals = instance.totals
    return Histogram.of_counts(PREEMPTION_BOUNDS, totals.preemptions, totals.ended_preemptions)


def _sleep_state(instance: InstanceSnapshot) -> dict[tuple[str, ...], Value]:
    """No instance sleeps."""
    return {("awake",): float(instance.alive), ("weights_offloaded",): 0.0, ("discard_all",): 0.0}


BLOCK_ROWS: tuple[Row[Look], ...] = (
    of_instance(
        histogram,
        "vllm:request_num_preemptions",
        "Preemptions of a request that ended by itself.",
        _preemptions,
    ),
    _residency(
        "lifetime",
        "From when a block of the prefix cache was filled to its eviction.",
        lambda done: (done.block_lives, done.block_lived_s),
    ),
    _residency(
        "idle_before_evict",
        "From the last use of such a block to its eviction.",
        lambda done: (done.block_idles, done.block_idle_s),
    ),
    _residency(
        "reuse_gap",
        "From the last use of such a block to the next.",
        lambda done: (done.reuse_gaps, done.reuse_gap_s),
    ),
    of_instance(
        gauge,
        "vllm:engine_sleep_state",
        "Whether the instance lives (`awake`); none sleeps.",
        _sleep_state,
        "sleep_state",
    ),
)
