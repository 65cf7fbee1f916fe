"""Metrics of the overload policy: whether it is paused, and what it would have done."""

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric

from kunserve.core.snapshots import ClusterState, ObservedDrops
from kunserve.server.telemetry.metric_family import Family, counter, gauge

PAUSED = gauge("kunserve:paused", "1 while drops and restores are made by hand only.")
MERGES = gauge(
    "kunserve:observed_merges", "Under the policy `observe`: merges that would stand now."
)
WAITING = gauge(
    "kunserve:observed_requests_waiting",
    "Under the policy `observe`: requests that wait now, and would run.",
)
DROPS = counter(
    "kunserve:observed_drops_total",
    "Under the policy `observe`: drops that would have been made.",
)
RESTORES = counter(
    "kunserve:observed_restores_total",
    "Under the policy `observe`: restores that would have been made.",
)
FREED = counter(
    "kunserve:observed_freed_bytes_total",
    "Under the policy `observe`: weight bytes that these drops would have freed.",
)
REQUESTS = counter(
    "kunserve:observed_requests_total",
    "Under the policy `observe`: requests that these drops would have admitted at once, at least.",
)
WAIT = counter(
    "kunserve:observed_wait_seconds_total",
    "Under the policy `observe`: waiting for memory that these drops would have avoided, summed "
    "over requests.",
)
_OF_OBSERVED: tuple[tuple[Family, Callable[[ObservedDrops], float]], ...] = (
    (MERGES, lambda observed: observed.num_merged),
    (WAITING, lambda observed: observed.num_requests_now),
    (DROPS, lambda observed: observed.num_drops),
    (RESTORES, lambda observed: observed.num_restores),
    (FREED, lambda observed: observed.freed_bytes),
    (REQUESTS, lambda observed: observed.num_requests),
    (WAIT, lambda observed: observed.wait_s),
)
FAMILIES = (PAUSED, *(family for family, _ in _OF_OBSERVED))


def overload_metrics(state: ClusterState, model_name: str) -> Iterable[Metric]:
    """The pause; and under the policy ``observe`` what drops would have gained."""
    labels, observed = (model_name,), state.observed
    yield PAUSED.of({labels: state.paused})
    for family, value in _OF_OBSERVED:
        yield family.of({} if observed is None else {labels: value(observed)})
