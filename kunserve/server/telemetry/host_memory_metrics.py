"""Metrics of KV in host memory: what was copied, who is away, and how long pauses are."""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from kunserve.core.load import PAUSE_BOUNDS_S
from kunserve.core.snapshots import ClusterState, InstanceSnapshot
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_family import counter, gauge, histogram

OUT, BACK = "out", "back"
SWAPPED = counter(
    "kunserve:swapped_bytes_total",
    "KV bytes that the group copied `out` to host memory, and `back`.",
    "engine",
    "direction",
)
AWAY = gauge(
    "kunserve:num_requests_away",
    "Running requests whose KV is in host memory, or on its way there or back.",
    "engine",
)
PAUSE = histogram(
    "kunserve:request_pause_seconds",
    "How long a request was away in host memory, swapped or parked. A stay that a change of "
    "groups ended is not counted, because the request is computed again.",
    "engine",
)
FAMILIES = (SWAPPED, AWAY, PAUSE)


def host_memory_metrics(state: ClusterState, model_name: str) -> Iterable[Metric]:
    """Of every instance that leads a group, or has led one."""
    instances = {(model_name, str(one.spec.instance_id)): one for one in state.instances}
    yield SWAPPED.of(
        {
            (*labels, direction): num_bytes
            for labels, instance in instances.items()
            for direction, num_bytes in _swapped_bytes(instance).items()
        }
    )
    yield AWAY.of(
        {
            (model_name, str(group.leader)): load.num_away
            for group, load in state.loads_by_group()
            if load is not None
        }
    )
    yield PAUSE.of_histograms({labels: _pauses(one) for labels, one in instances.items()})


def _swapped_bytes(instance: InstanceSnapshot) -> dict[str, int]:
    """Over all stages of the groups that the instance led: a block has every layer somewhere."""
    block_bytes = instance.spec.unit_bytes * instance.spec.num_layers
    totals = instance.totals
    return {
        OUT: totals.swapped_out_blocks * block_bytes,
        BACK: totals.swapped_back_blocks * block_bytes,
    }


def _pauses(instance: InstanceSnapshot) -> Histogram:
    totals = instance.totals
    return Histogram.of_counts(PAUSE_BOUNDS_S, totals.pauses, totals.paused_s)
