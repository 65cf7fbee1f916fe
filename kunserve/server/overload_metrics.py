"""Metrics of the overload policy: whether it is paused, and what it would have done."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kunserve.cluster.api import EngineClient


class OverloadMetrics(Collector):
    """Reads ``engine.state()`` when it is asked. Its counters live in the controller."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """The pause; and under the policy ``observe`` what drops would have gained."""
        state = self._engine.state()
        yield self._gauge(
            "kunserve:paused", "1 while drops and restores are made by hand only.", state.paused
        )
        observed = state.observed
        if observed is None:
            return
        yield self._gauge(
            "kunserve:observed_merges",
            "Merges that would stand now, were the overload policy drop.",
            observed.num_merged,
        )
        yield self._gauge(
            "kunserve:observed_requests_waiting",
            "Requests that wait now, and would run.",
            observed.num_requests_now,
        )
        yield self._counter(
            "kunserve:observed_drops", "Drops that would have been made.", observed.num_drops
        )
        yield self._counter(
            "kunserve:observed_restores",
            "Restores that would have been made.",
            observed.num_restores,
        )
        yield self._counter(
            "kunserve:observed_freed_bytes",
            "Weight bytes that these drops would have freed.",
            observed.freed_bytes,
        )
        yield self._counter(
            "kunserve:observed_requests",
            "Requests that these drops would have admitted at once, at least.",
            observed.num_requests,
        )
        yield self._counter(
            "kunserve:observed_wait_seconds",
            "Waiting for memory that these drops would have avoided, summed over requests.",
            observed.wait_s,
        )

    def _gauge(self, name: str, documentation: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, documentation, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, documentation, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
