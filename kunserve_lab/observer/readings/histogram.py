"""A Prometheus histogram as a value: differences, quantiles, and draws of what it counted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

OPEN_CLASS = 1.5
"""Upper end of the class without a bound, in times of its lower end."""


@lru_cache(maxsize=1000)
def _one_for_all(bounds: tuple[float, ...]) -> tuple[float, ...]:
    return bounds


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values fell into each class. Counts are whole numbers unless a server says else."""

    bounds: tuple[float, ...]
    """Upper bounds, rising and finite; the last class has none."""
    counts: tuple[float, ...]
    """Of each class, one more than ``bounds``: not cumulated."""
    total: float
    """Of all values together."""

    def __post_init__(self) -> None:
        # A day has a million of them, and a server's have the same classes all day.
        object.__setattr__(self, "bounds", _one_for_all(self.bounds))

    @property
    def count(self) -> float:
        """Values that were counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None when nothing was counted."""
        return self.total / self.count if self.count > 0 else None

    def since(self, before: "Histogram | None") -> "Histogram":
        """What was added. A server that began anew counts from nothing."""
        if before is None or before.bounds != self.bounds:
            return self
        added = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        if min(added) < 0 or self.total < before.total:
            return self
        return Histogram(self.bounds, added, self.total - before.total)

    def __add__(self, other: "Histogram") -> "Histogram":
        if other.bounds != self.bounds:  # another version of the server: the larger one stands
            return max(self, other, key=lambda one: one.count)
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Histogram(self.bounds, counts, self.total + other.total)

    def quantile(self, share: float) -> float | None:
        """The value below which ``share`` of all lie, about; None when nothing was counted."""
        return float(self._values(np.array([share]))[0]) if self.count > 0 else None

    def bracket(self, share: float) -> tuple[float, float] | None:
        """The class in which that quantile lies: what is certain of it; None like `quantile`."""
        if not self.count > 0:
            return None
        reached = np.cumsum(self.counts)
        at = min(int(np.searchsorted(reached, share * reached[-1])), len(self.bounds))
        high = self.bounds[at] if at < len(self.bounds) else float("inf")
        return (self.bounds[at - 1] if at else 0.0), high

    def draw(self, number: int) -> npt.NDArray[np.float64]:
        """So many values, evenly through the distribution and in rising order, of its mean."""
        values = self._values((np.arange(number) + 0.5) / max(1, number))
        mean = self.mean
        if number and mean is not None and values.mean() > 0:
            values = values * np.clip(mean / values.mean(), 0.5, 2.0)
        return values

    def _values(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        last = self.bounds[-1] if self.bounds else 1.0
        ends = np.array([0.0, *self.bounds, last * OPEN_CLASS])
        reached = np.concatenate(([0.0], np.cumsum(self.counts)))
        place = np.searchsorted(reached, shares * reached[-1], side="left")
        at = np.clip(place, 1, len(self.counts)) - 1
        inside = np.array(self.counts)[at]
        part = (shares * reached[-1] - reached[at]) / np.where(inside > 0, inside, 1.0)
        result: npt.NDArray[np.float64] = ends[at] + part * (ends[at + 1] - ends[at])
        return result


def from_cumulative(buckets: Mapping[float, float], total: float) -> Histogram | None:
    """From ``le`` -> cumulated count, as pages have it; None where that makes no histogram."""
    bounds = tuple(sorted(bound for bound in buckets if np.isfinite(bound)))
    reached = [buckets[bound] for bound in bounds]
    reached.append(buckets.get(float("inf"), reached[-1] if reached else 0.0))
    counts = tuple(float(value) for value in np.diff(np.array([0.0, *reached])))
    if not bounds or min(counts) < 0 or not np.isfinite(reached[-1]):
        return None
    return Histogram(bounds, counts, total)


def merged(histograms: Iterable[Histogram]) -> Histogram | None:
    """All together; None where there is none."""
    some = list(histograms)
    if len({one.bounds for one in some}) == 1:  # the usual case: a day asks for millions
        counts = tuple(map(sum, zip(*(one.counts for one in some), strict=True)))
        return Histogram(some[0].bounds, counts, sum(one.total for one in some))
    result: Histogram | None = None
    for one in some:
        result = one if result is None else result + one
    return result
