"""``/metrics``: requests as the front times them, groups as the controller sees them, processes."""

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric

from kunserve.cluster.api import EngineClient
from kunserve.server.api.forms import metrics as form_metrics
from kunserve.server.api.forms.metrics import FormMetrics
from kunserve.server.telemetry import (
    cluster_metrics,
    host_memory_metrics,
    overload_metrics,
    process_metrics,
    request_metrics,
    savings,
    stage_metrics,
    transition_metrics,
)
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_family import histogram
from kunserve.server.telemetry.request_metrics import RequestMetrics

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LOOP_LAG = histogram(
    "kunserve:front_loop_lag_seconds",
    "How late the front's event loop wakes up, asked five times a second.",
)
FAMILIES = (
    *request_metrics.FAMILIES,
    *cluster_metrics.FAMILIES,
    *transition_metrics.FAMILIES,
    *overload_metrics.FAMILIES,
    *host_memory_metrics.FAMILIES,
    *savings.FAMILIES,
    *stage_metrics.FAMILIES,
    *process_metrics.FAMILIES,
    *form_metrics.FAMILIES,
    LOOP_LAG,
)
"""Every metric that is ours to describe; the registry has those of the Python process besides."""


class FrontMetrics(RequestMetrics):
    """Every metric of ``/metrics``; also feeds the timeline."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        super().__init__(model_name, engine.limits.max_model_len)
        self._labels = (model_name,)
        self.cluster = ClusterMetrics(engine, model_name)
        self.forms = FormMetrics(model_name)
        self.loop_lag = Histogram(LAG_BUCKETS)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.registry.register(self.cluster)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def exposition(self) -> bytes:
        """The text of ``/metrics``."""
        self.cluster.observe()
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """What the front itself measured."""
        yield from super().collect()
        yield from self.forms.collect()
        yield LOOP_LAG.of_histograms({self._labels: self.loop_lag})
