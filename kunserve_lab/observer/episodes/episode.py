"""When a burst begins and when it is over: with hysteresis, so that one burst is one episode."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kunserve_lab.observer.readings.change import Change
from kunserve_lab.observer.watch import FleetView

BEGIN_S = 2.0
"""So long a replica must be short before an episode begins: one reading is no burst."""
CALM_S = 10.0
"""So long none may be short, nor anybody wait, before it is over."""
LEAD_S = 60.0
"""Of what came before it, kept for the simulation to begin with."""
LONGEST_S = 900.0
"""An episode that lasts longer is told in parts."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A burst that was too much for some replica."""

    begin_s: float
    """Since the epoch: when the first replica was short; as is the next, of the last."""
    end_s: float
    replicas: tuple[str, ...]
    """All that answered."""
    memory_s: dict[str, float]
    """How long each replica's memory was short."""
    compute_s: dict[str, float]
    """How long each replica's requests waited although memory had room."""
    changes: tuple[Change, ...]
    """From `LEAD_S` before it to its end, of all replicas, in order of time."""
    num_drops: int = 0
    """That the controller would have decided."""
    was_cut: bool = False
    """Whether it was `LONGEST_S` long and goes on."""

    @property
    def during(self) -> tuple[Change, ...]:
        """Without what came before."""
        return tuple(one for one in self.changes if one.after.time_s >= self.begin_s)


@dataclass(slots=True)
class _Open:
    begin_s: float
    num_drops: int
    short_s: float
    """When somebody was short last."""
    memory_s: dict[str, float] = field(default_factory=dict)
    compute_s: dict[str, float] = field(default_factory=dict)


class Episodes:
    """Watches for bursts. It keeps what the newest one needs, and nothing older."""

    def __init__(self, lead_s: float = LEAD_S) -> None:
        self._lead_s = lead_s
        self._changes: deque[Change] = deque(maxlen=100_000)
        self._first_short_s: float | None = None
        self._num_drops = 0
        """When nobody was short yet: the first drop is decided before an episode begins."""
        self._open: _Open | None = None
        self._looked_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether a burst goes on."""
        return self._open is not None

    def take(self, changes: Iterable[Change]) -> None:
        """What happened since the last look."""
        self._changes.extend(changes)

    def look(self, view: FleetView, period_s: float) -> Episode | None:
        """The episode that is over now, if one is."""
        now_s = view.time_s
        elapsed_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        elapsed_s = min(elapsed_s, CALM_S + period_s)  # nobody looked in a longer one
        self._looked_s = now_s
        is_short = any(one.memory_short or one.compute_short for one in view.present)
        waits = any(one.num_waiting for one in view.present)
        if self._open is None:
            self._forget(now_s - self._lead_s - BEGIN_S)
            self._begin(view, is_short, period_s)
            if self._open is None:
                return None
        one = self._open
        for replica in view.present:
            for short, spent in ((replica.memory_short, one.memory_s),
                                 (replica.compute_short, one.compute_s)):  # fmt: skip
                if short:
                    spent[replica.name] = spent.get(replica.name, 0.0) + max(elapsed_s, period_s)
        if is_short or waits:
            one.short_s = now_s
        was_cut = now_s - one.begin_s >= LONGEST_S
        if now_s - one.short_s < CALM_S and not was_cut:
            return None
        return self._close(view, was_cut)

    def close(self, view: FleetView) -> Episode | None:
        """The one that goes on when the watching ends."""
        return None if self._open is None else self._close(view, was_cut=True)

    def _begin(self, view: FleetView, is_short: bool, period_s: float) -> None:
        if not is_short:
            self._first_short_s = None
            self._num_drops = view.drops.num_drops
            return
        if self._first_short_s is None:
            self._first_short_s = view.time_s
        if view.time_s - self._first_short_s + period_s >= BEGIN_S:
            self._open = _Open(self._first_short_s, self._num_drops, view.time_s)

    def _close(self, view: FleetView, was_cut: bool) -> Episode:
        one, self._open, self._first_short_s = self._open, None, None
        assert one is not None
        self._num_drops = view.drops.num_drops
        return Episode(
            begin_s=one.begin_s,
            end_s=max(one.short_s, one.begin_s),
            replicas=tuple(sorted({change.replica for change in self._changes})),
            memory_s=one.memory_s,
            compute_s=one.compute_s,
            changes=tuple(sorted(self._changes, key=lambda change: change.after.time_s)),
            num_drops=view.drops.num_drops - one.num_drops,
            was_cut=was_cut,
        )

    def _forget(self, until_s: float) -> None:
        while self._changes and self._changes[0].after.time_s < until_s:
            self._changes.popleft()


def span_s(changes: Sequence[Change]) -> tuple[float, float]:
    """From the first reading to the last."""
    return (min(c.before.time_s for c in changes), max(c.after.time_s for c in changes))
