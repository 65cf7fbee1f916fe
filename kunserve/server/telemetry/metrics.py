"""``/metrics``: requests as the front times them, groups as the controller sees them, processes."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kunserve.cluster.api import EngineClient
from kunserve.server.api.forms import metrics as form_metrics
from kunserve.server.api.forms.metrics import FormMetrics
from kunserve.server.telemetry import cluster_metrics, request_metrics
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_row import Row, histogram, metrics_of
from kunserve.server.telemetry.request_metrics import RequestMetrics

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LOOP_LAG: Row[Histogram] = histogram(
    "kunserve:front_loop_lag_seconds",
    "How late the front's event loop wakes up, asked five times a second.",
    lambda lag: lag,
)
ROWS: tuple[Row[Any], ...] = (
    *request_metrics.ROWS,
    *cluster_metrics.ROWS,
    *form_metrics.ROWS,
    LOOP_LAG,
)
"""Every metric that is ours to describe; the registry has those of the Python process besides."""


def register_process(registry: CollectorRegistry) -> None:
    """What the Python client tells of this process."""
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)


class FrontMetrics(RequestMetrics, Collector):
    """Every metric of ``/metrics``; also feeds the timeline."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        super().__init__(engine.limits.max_model_len)
        self._model_name = model_name
        self.cluster = ClusterMetrics(engine, model_name)
        self.forms = FormMetrics()
        self.loop_lag = Histogram(LAG_BUCKETS)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.registry.register(self.cluster)
        register_process(self.registry)

    def exposition(self) -> bytes:
        """The text of ``/metrics``."""
        self.cluster.observe()
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """What the front itself measured."""
        model = self._model_name
        return chain(
            metrics_of(request_metrics.ROWS, self, model),
            metrics_of(form_metrics.ROWS, self.forms, model),
            metrics_of([LOOP_LAG], self.loop_lag, model),
        )
