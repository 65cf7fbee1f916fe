"""A metric of ``/metrics`` as one row: its name, type, meaning and labels, and where it is read."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kunserve.core.ids import InstanceId
from kunserve.server.telemetry.histogram import Histogram

Value: TypeAlias = float | Histogram
Samples: TypeAlias = Value | Mapping[tuple[str, ...], Value]
"""A value by itself, or one for each tuple of label values, without the model's name."""
S = TypeVar("S")


class Type(enum.StrEnum):
    """Prometheus' types of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_FAMILIES: dict[Type, Callable[..., Any]] = {
    Type.COUNTER: CounterMetricFamily,
    Type.GAUGE: GaugeMetricFamily,
    Type.HISTOGRAM: HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """One metric, read from ``S``. A counter's name ends in ``_total``."""

    name: str
    type: Type
    meaning: str
    labels: tuple[str, ...]
    samples: Callable[[S], Samples]

    def metric(self, source: S, model_name: str) -> Metric:
        """As the source is now."""
        family = _FAMILIES[self.type](self.name, self.meaning, labels=self.labels)
        samples = self.samples(source)
        by_labels = samples if isinstance(samples, Mapping) else {(): samples}
        for labels, value in by_labels.items():
            named = [model_name, *labels]
            assert len(named) == len(self.labels), (self.name, labels)
            if isinstance(value, Histogram):
                family.add_metric(named, value.buckets(), value.total)
            else:
                family.add_metric(named, value)
        made: Metric = family
        return made


def metrics_of(rows: Iterable[Row[S]], source: S, model_name: str) -> Iterator[Metric]:
    """Every row's metric."""
    return (row.metric(source, model_name) for row in rows)


def counter(name: str, meaning: str, samples: Callable[[S], Samples], *labels: str) -> Row[S]:
    """A number that only grows."""
    assert name.endswith("_total"), name
    return Row(name, Type.COUNTER, meaning, ("model_name", *labels), samples)


def gauge(name: str, meaning: str, samples: Callable[[S], Samples], *labels: str) -> Row[S]:
    """A number as it is now."""
    return Row(name, Type.GAUGE, meaning, ("model_name", *labels), samples)


def histogram(name: str, meaning: str, samples: Callable[[S], Samples], *labels: str) -> Row[S]:
    """How often values of each size came."""
    return Row(name, Type.HISTOGRAM, meaning, ("model_name", *labels), samples)


def by_engine(values: Mapping[InstanceId, float]) -> Samples:
    """A value of each instance."""
    return {(str(instance_id),): value for instance_id, value in values.items()}
