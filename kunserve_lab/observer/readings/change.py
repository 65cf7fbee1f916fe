"""What happened at a replica between two readings. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kunserve_lab.observer.readings.histogram import Histogram, merged
from kunserve_lab.observer.readings.names import COUNTERS
from kunserve_lab.observer.readings.page import Reading


@dataclass(frozen=True, slots=True)
class Change:
    """From one reading to the next. Amounts are never negative."""

    before: Reading
    after: Reading
    amounts: dict[str, float]
    """By `names.COUNTERS`: what was added."""
    histograms: dict[str, Histogram]
    began_anew: bool
    """Whether the server was started between the two: its totals then count from nothing."""

    @property
    def replica(self) -> str:
        """Whose."""
        return self.after.replica

    @property
    def elapsed_s(self) -> float:
        """At least a millisecond."""
        return max(1e-3, self.after.time_s - self.before.time_s)

    @property
    def more(self) -> int:
        """Requests that are there more, and those that ended. A page whose gauges are older than
        its counters makes it too large, and that of the next change too small, even below 0.
        """
        inside = self.after.num_inside - (0.0 if self.began_anew else self.before.num_inside)
        return round(inside + self.amounts.get("finished", 0.0))

    @property
    def num_arrived(self) -> int:
        """Requests that came, about; exact in the sum of many (`more`)."""
        return max(0, self.more)

    def rate(self, counter: str) -> float:
        """Of a counter, per second."""
        return self.amounts.get(counter, 0.0) / self.elapsed_s


def change_of(before: Reading, after: Reading) -> Change:
    """Between two readings of one replica."""
    began_anew = any(
        after.counters.get(name, 0.0) < before.counters.get(name, 0.0)
        for name in COUNTERS
        if name in after.counters
    )
    amounts = {
        name: value if began_anew else value - before.counters.get(name, value)
        for name, value in after.counters.items()
    }
    histograms = {
        name: one if began_anew else one.since(before.histograms.get(name))
        for name, one in after.histograms.items()
        if began_anew or name in before.histograms
    }
    return Change(before, after, amounts, histograms, began_anew)


def changes_in(readings: Sequence[Reading]) -> list[Change]:
    """Of one replica's readings in order of time; of equal moments the first counts."""
    result = []
    last: Reading | None = None
    for one in readings:
        if last is not None and one.time_s > last.time_s:
            result.append(change_of(last, one))
        if last is None or one.time_s > last.time_s:
            last = one
    return result


def together(changes: Iterable[Change], name: str) -> Histogram | None:
    """All that a histogram counted in these changes; None where no server has it."""
    return merged(one.histograms[name] for one in changes if name in one.histograms)
