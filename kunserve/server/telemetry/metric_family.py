"""What a metric of ``/metrics`` is, told once: its samples and its row in the docs follow."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kunserve.server.telemetry.histogram import Histogram


class Type(enum.StrEnum):
    """Prometheus' types of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. A counter's name ends in ``_total``."""

    name: str
    type: Type
    meaning: str
    labels: tuple[str, ...]

    def of(self, values: Mapping[tuple[str, ...], float]) -> Metric:
        """A counter or a gauge, from the value at each tuple of label values."""
        names = list(self.labels)
        family: CounterMetricFamily | GaugeMetricFamily
        if self.type is Type.COUNTER:
            family = CounterMetricFamily(self.name, self.meaning, labels=names)
        else:
            assert self.type is Type.GAUGE, self
            family = GaugeMetricFamily(self.name, self.meaning, labels=names)
        for labels, value in values.items():
            assert len(labels) == len(names), (self.name, labels)
            family.add_metric(list(labels), value)
        return family

    def of_histograms(self, histograms: Mapping[tuple[str, ...], Histogram]) -> Metric:
        """A histogram for each tuple of label values."""
        assert self.type is Type.HISTOGRAM, self
        family = HistogramMetricFamily(self.name, self.meaning, labels=list(self.labels))
        for labels, histogram in histograms.items():
            assert len(labels) == len(self.labels), (self.name, labels)
            family.add_metric(list(labels), histogram.buckets(), histogram.total)
        return family


def counter(name: str, meaning: str, *labels: str) -> Family:
    """A number that only grows."""
    assert name.endswith("_total"), name
    return Family(name, Type.COUNTER, meaning, ("model_name", *labels))


def gauge(name: str, meaning: str, *labels: str) -> Family:
    """A number as it is now."""
    return Family(name, Type.GAUGE, meaning, ("model_name", *labels))


def histogram(name: str, meaning: str, *labels: str) -> Family:
    """How often values of each size came."""
    return Family(name, Type.HISTOGRAM, meaning, ("model_name", *labels))
