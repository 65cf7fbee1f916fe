"""Readings in, views and episodes out: for a live fleet, a file and a Prometheus server alike."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.episodes.episode import Episode, Episodes
from kunserve_lab.observer.fleet import Factors, corrected, fit_factors, preset_of
from kunserve_lab.observer.readings.change import Change, change_of
from kunserve_lab.observer.readings.histogram import Histogram, merged
from kunserve_lab.observer.readings.page import Reading
from kunserve_lab.observer.settings import Made
from kunserve_lab.observer.watch import FleetView, Watch
from kunserve_lab.sim.profile import InstanceProfile

MOST_POINTS = 20_000
"""Of a history: when there are more, every other one goes."""
MOST_CHANGES = 4000
"""The newest, to which step times are fitted."""
REFIT_S = 30.0
LONGEST_GAP_S, MOST_PERIODS = 300.0, 5
"""Of a replica's silence: what came in a longer one came nobody knows when, and is not counted."""
TTFT_WINDOW_S = 30.0
"""Over which P99 TTFT is taken for the history."""


@dataclass(frozen=True, slots=True)
class Point:
    """The fleet at one moment, as a report draws it."""

    view: FleetView
    ttft_p99_s: float | None
    """Of those who got their first token in the last `TTFT_WINDOW_S`."""


class Session:
    """What is known of a fleet so far."""

    def __init__(self, made: Made, period_s: float) -> None:
        self.made = made
        self.period_s = period_s
        self.history: list[Point] = []
        self.factors = Factors()
        self.refused: dict[str, str] = {}
        """Replicas that are not watched beside the others, and why."""
        self._presets: dict[str, InstanceProfile] = {}
        self._last: dict[str, Reading] = {}
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._ttft: deque[tuple[float, Histogram]] = deque()
        self._watch = Watch({}, made.max_num_batched_tokens)
        self._episodes = Episodes()
        self._fitted_s: float | None = None
        self._every, self._num_skipped = 1, 0

    @property
    def in_burst(self) -> bool:
        """Whether an episode goes on."""
        return self._episodes.is_open

    @property
    def replicas(self) -> tuple[str, ...]:
        """That were ever read."""
        return tuple(self._last)

    def feed(self, readings: Iterable[Reading], now_s: float) -> tuple[FleetView, Episode | None]:
        """What was read since the last call. Raises ConfigError if a replica's make is unknown."""
        changes = [change for one in readings for change in self._take(one)]
        self._changes.extend(changes)
        self._episodes.take(changes)
        self._refit(now_s)
        view = self._watch.look(now_s, self.period_s)
        episode = self._episodes.look(view, self.period_s)
        self._remember(Point(view, self._ttft_p99_s(changes, now_s)))
        return view, episode

    def close(self) -> Episode | None:
        """The episode that goes on when the watching ends."""
        return self._episodes.close(self.history[-1].view) if self.history else None

    def make_of(self, episode: Episode) -> tuple[InstanceProfile, Factors]:
        """One replica for all, the one of most memory, with step times as they were in the episode:
        its machines may have been slower then. All that is kept counts where that is too little.
        """
        preset = max(self._presets.values(), key=lambda one: one.spec.kv_units)
        factors = self._fit(preset, episode.changes)
        if not factors.num_windows:
            factors = self._fit(preset, self._changes)
        return corrected(preset, factors), factors

    def _fit(self, preset: InstanceProfile, changes: Iterable[Change]) -> Factors:
        return fit_factors(preset, changes, self.made.max_num_batched_tokens)

    def _take(self, reading: Reading) -> Sequence[Change]:
        name = reading.replica
        before = self._last.get(name)
        if before is not None and reading.time_s <= before.time_s:
            return ()
        is_new = before is None or before.capacity_blocks != reading.capacity_blocks
        if is_new and not self._know(reading):
            return ()
        self._last[name] = reading
        change = None if before is None else change_of(before, reading)
        if change and change.elapsed_s > max(LONGEST_GAP_S, MOST_PERIODS * self.period_s):
            change = None
        self._watch.take(reading, change)
        return () if change is None else (change,)

    def _know(self, reading: Reading) -> bool:
        """Whether the replica can be watched. Raises ConfigError if there is no other."""
        name, models = reading.replica, {one.model for one in self._last.values()}
        try:
            if self.made.model is None and not models <= {reading.model}:
                raise ConfigError(
                    f"{name} serves {reading.model}, others {', '.join(models)}: observe each "
                    "model by itself, or give --model if it is the same one"
                )
            self._presets[name] = preset_of(self.made, reading)
        except ConfigError as error:
            if not models:
                raise
            self.refused[name] = str(error)
            return False
        self.refused.pop(name, None)
        self._watch.add(name, corrected(self._presets[name], self.factors))
        return True

    def _refit(self, now_s: float) -> None:
        if self._fitted_s is not None and now_s - self._fitted_s < REFIT_S:
            return
        self._fitted_s = now_s
        if not self._presets:
            return
        preset = next(iter(self._presets.values()))
        self.factors = self._fit(preset, self._changes)
        for name, one in self._presets.items():
            self._watch.add(name, corrected(one, self.factors))

    def _ttft_p99_s(self, changes: Iterable[Change], now_s: float) -> float | None:
        for change in changes:
            if "ttft" in change.histograms:
                self._ttft.append((change.after.time_s, change.histograms["ttft"]))
        window_s = max(TTFT_WINDOW_S, 2 * self.period_s)
        while self._ttft and now_s - self._ttft[0][0] > window_s:
            self._ttft.popleft()
        counted = merged(one for _, one in self._ttft)
        return None if counted is None else counted.quantile(0.99)

    def _remember(self, point: Point) -> None:
        self._num_skipped += 1
        if self._num_skipped < self._every:
            return
        self._num_skipped = 0
        self.history.append(point)
        if len(self.history) > MOST_POINTS:
            self.history = self.history[::2]
            self._every *= 2
