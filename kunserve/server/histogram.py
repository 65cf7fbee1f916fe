"""A Prometheus histogram that costs a list index per observation."""

import bisect
import itertools
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts per bucket. Observed once per token, so it is no more than that."""

    __slots__ = ("_bounds", "_counts", "documentation", "name", "total")

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bound belongs to its own bucket."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.total += value

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        """The Prometheus form."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=list(labels))
        bounds = [repr(float(bound)) for bound in self._bounds] + ["+Inf"]
        cumulative = itertools.accumulate(self._counts)
        buckets = list(zip(bounds, map(float, cumulative), strict=True))
        family.add_metric(list(labels.values()), buckets, self.total)
        return family
