"""A Prometheus histogram that costs a list index per observation."""

import bisect
import itertools
from collections.abc import Iterable, Sequence

# vLLM's buckets: seconds, then counts.
_TAIL = (5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BELOW_A_TENTH = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1)
FIRST_TOKEN_BUCKETS = (*_BELOW_A_TENTH, 0.25, 0.5, 0.75, 1.0, 2.5, *_TAIL, 160.0, 640.0, 2560.0)
_BELOW_A_HALF = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
TOKEN_BUCKETS = (*_BELOW_A_HALF, 0.75, 1.0, 2.5, *_TAIL)
_TENS = (10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_MINUTES = (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, *_TENS, *_MINUTES)
CHOICES_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def length_buckets(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to ``most`` tokens."""
    bounds = (digit * 10.0**power for power in itertools.count() for digit in (1, 2, 5))
    return tuple(itertools.takewhile(lambda bound: bound <= most, bounds))


class Histogram:
    """Counts per bucket. Observed once per token, so it is no more than that."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @classmethod
    def of_counts(cls, bounds: Sequence[float], counts: Iterable[int], total: float) -> "Histogram":
        """What somebody else has counted; no counts at all mean zeros."""
        made = cls(bounds)
        made._counts = list(counts) or made._counts
        made.total = total
        assert len(made._counts) == len(bounds) + 1, made._counts
        return made

    def observe(self, value: float) -> None:
        """Count one value; a bound belongs to its own bucket."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count of each bucket, as Prometheus wants them."""
        bounds = [repr(float(bound)) for bound in self._bounds] + ["+Inf"]
        return list(zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True))
