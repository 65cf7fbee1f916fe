"""Counters and histograms of all fronts as one: sums of what each tells, ended ones included."""

from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]


class SampleCount(msgspec.Struct, frozen=True, array_like=True):
    """One line of ``/metrics``."""

    name: str
    labels: Labels
    value: float


class FamilyCount(msgspec.Struct, frozen=True, array_like=True):
    """One metric of a front."""

    name: str
    documentation: str
    type: str
    samples: list[SampleCount]


def counts_of(families: Iterable[Metric]) -> list[FamilyCount]:
    """What a front has counted. Gauges are left out, because they cannot be added."""
    return [
        FamilyCount(
            family.name,
            family.documentation,
            family.type,
            [
                SampleCount(sample.name, tuple(sample.labels.items()), sample.value)
                for sample in family.samples
            ],
        )
        for family in families
        if family.type in ("counter", "histogram")
    ]


class Tally(Collector):
    """Sums over fronts. A front that has ended counts with what it last told."""

    def __init__(self) -> None:
        self._live: dict[int, list[FamilyCount]] = {}
        self._ended: list[FamilyCount] = []

    def told(self, front: int, families: list[FamilyCount]) -> None:
        """A front's latest word."""
        self._live[front] = families

    def ended(self, front: int) -> None:
        """The front's process is over; the next one begins at zero."""
        self._ended = _sum([self._ended, self._live.pop(front, [])])

    def collect(self) -> Iterable[Metric]:
        """Every metric once."""
        for family in _sum([self._ended, *self._live.values()]):
            metric = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def _sum(parts: Iterable[list[FamilyCount]]) -> list[FamilyCount]:
    heads: dict[str, FamilyCount] = {}
    sums: dict[str, dict[tuple[str, Labels], float]] = {}
    for part in parts:
        for family in part:
            heads.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, sample.labels
                values[key] = values.get(key, 0.0) + sample.value
    return [_family(head, sums[name]) for name, head in heads.items()]


def _family(head: FamilyCount, values: Mapping[tuple[str, Labels], float]) -> FamilyCount:
    samples = [SampleCount(name, labels, value) for (name, labels), value in values.items()]
    return FamilyCount(head.name, head.documentation, head.type, samples)
