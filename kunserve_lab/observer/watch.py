"""The fleet as our own controller would see it: its monitor, its plan of drops, and a forecast.

A replica's reading becomes the load report of a group of one instance. From there on everything is
what the overload policy ``observe`` runs (`control.cluster.observed`): one brain, other eyes.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kunserve.control.cluster.commands import LogObserved, Outbox
from kunserve.control.cluster.observed import Observation
from kunserve.core.config import OverloadConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import GroupLoad, LeaderTotals, LoadReport
from kunserve.core.snapshots import ObservedDrops
from kunserve.core.step import Chunk
from kunserve.policy.drop.decide import DropView
from kunserve.policy.drop.monitor import ClusterLoadView, MonitorState, free_blocks, observe
from kunserve_lab.observer.readings.change import Change, change_of
from kunserve_lab.observer.readings.page import Reading
from kunserve_lab.observer.trend import Trend
from kunserve_lab.sim.fluid import DROP_S
from kunserve_lab.sim.profile import InstanceProfile

STALE_S = 5.0
"""A reading older than this, and older than three periods, is not taken for the present."""
TREND_S, PROMPTS_TREND_S = 10.0, 30.0
"""Over which slopes are taken: of demand for memory, and of the time that prompts take, which
differs more from look to look."""
FORECAST_S = 30.0
"""Beyond it nothing is foretold."""
LENGTHS_S, NUM_KEPT = 300.0, 10
"""Lengths are of requests that ended in this time, by so many readings in it."""
LEAST_ENDED = 20
"""Of fewer requests lengths are chance: then they are of all since the server began."""
QUEUE_S = 2.0
"""So much work in the prompts that wait is a queue; less is a step's turn."""
BUSY_SHARE = 0.9
"""Of a replica's time that prompts take, above which it has no compute for more."""
_NOBODY = RequestId("nobody")


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica now. Shares are of its KV memory."""

    name: str
    age_s: float
    """Of the reading."""
    is_stale: bool
    kv_usage: float
    demand: float
    """What runs with what it will still need, and all that wait."""
    num_running: int
    num_waiting: int
    arrivals_per_s: float
    memory_short: bool
    compute_short: bool
    full_in_s: float | None
    """Until demand exceeds the memory, if it goes on so; None: not within `FORECAST_S`."""
    busy_in_s: float | None
    """Until prompts take all of its compute; the same."""

    @property
    def state(self) -> str:
        """In a word or two."""
        if self.is_stale:
            return "no answer"
        both = ("memory short", self.memory_short), ("compute short", self.compute_short)
        return ", ".join(word for word, holds in both if holds) or "well"


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet at one moment."""

    time_s: float
    replicas: tuple[ReplicaView, ...]
    prompt_share: float
    """Of the fleet's compute, taken by prompts."""
    drops: ObservedDrops
    """What drops would have done so far."""
    texts: tuple[str, ...]
    """What would stand now, for people."""
    decided: tuple[str, ...] = ()
    """Drops and restores that would have been decided at this moment."""

    @property
    def present(self) -> tuple[ReplicaView, ...]:
        """Those that answer."""
        return tuple(one for one in self.replicas if not one.is_stale)

    @property
    def full_in_s(self) -> float | None:
        """Until the first replica's memory is short; 0 where one is."""
        if any(one.memory_short for one in self.present):
            return 0.0
        return min((o.full_in_s for o in self.present if o.full_in_s is not None), default=None)

    @property
    def busy_in_s(self) -> float | None:
        """Until the first replica's compute is short; 0 where one is."""
        if any(one.compute_short for one in self.present):
            return 0.0
        return min((o.busy_in_s for o in self.present if o.busy_in_s is not None), default=None)


class Watch:
    """Looks at readings, one moment after the other."""

    def __init__(self, presets: Mapping[str, InstanceProfile], max_tokens: int) -> None:
        """``presets`` of each replica; more may come (`add`)."""
        self._presets = dict(presets)
        self._max_tokens = max_tokens
        self._config = OverloadConfig(policy="observe")
        self._monitor = MonitorState()
        self._outbox = Outbox()
        self._observation = Observation(self._config, self._outbox, self._name)
        self._ids: dict[str, GroupId] = {}
        self._numbers: dict[str, int] = {}
        self._readings: dict[str, Reading] = {}
        self._changes: dict[str, Change] = {}
        self._lost: dict[str, int] = {}
        self._older: dict[str, deque[Reading]] = {}
        self._demand: dict[str, Trend] = {}
        self._prompts: dict[str, Trend] = {}

    def add(self, replica: str, preset: InstanceProfile) -> None:
        """A replica that was not known, or the corrected make of one that is."""
        self._presets[replica] = preset

    def take(self, reading: Reading, change: Change | None) -> None:
        """A replica's newest reading, and what happened since the one before."""
        name = reading.replica
        self._ids.setdefault(name, GroupId(len(self._ids)))
        self._numbers[name] = self._numbers.get(name, 0) + 1
        self._readings[name] = reading
        older = self._older.setdefault(name, deque(maxlen=NUM_KEPT + 1))
        if change is not None and change.began_anew:
            older.clear()
        if not older or reading.time_s - older[-1].time_s >= LENGTHS_S / NUM_KEPT:
            older.append(reading)
        if change is None:
            return
        self._changes[name] = change
        num = max(1.0, change.before.num_running)
        each = change.before.kv_usage * change.before.capacity_tokens / num
        lost = change.amounts.get("preemptions", 0.0) * each
        self._lost[name] = self._lost.get(name, 0) + int(lost)

    def look(self, now_s: float, period_s: float) -> FleetView:
        """The fleet now. Replicas without a reading that is new enough have no say."""
        newest = {name: one for name, one in self._readings.items()
                  if now_s - one.time_s <= max(STALE_S, 3 * period_s)}  # fmt: skip
        loads = {name: self._load(one) for name, one in newest.items()}
        view = ClusterLoadView(tuple(loads.values()), self._block_size(), DROP_S)
        self._monitor, verdict = observe(self._monitor, view, now_s, self._config)
        short = set() if verdict.overloaded is None else set(verdict.overloaded.group_ids)
        prompt_share = self._prompt_share(newest)
        if loads:
            self._observation.look(view, self._drop_view(loads, prompt_share), now_s)
        decided = tuple(one.text for one in self._outbox if isinstance(one, LogObserved))
        self._outbox.clear()
        return FleetView(
            time_s=now_s,
            replicas=tuple(
                self._replica(one, loads.get(name), now_s, self._ids[name] in short)
                for name, one in self._readings.items()
            ),
            prompt_share=prompt_share,
            drops=self._observation.totals,
            texts=self._observation.texts,
            decided=decided,
        )

    def _name(self, group_id: GroupId) -> str:
        return next(name for name, one in self._ids.items() if one == group_id)

    def _block_size(self) -> int:
        return next((one.block_size for one in self._readings.values()), 1)

    def _load(self, reading: Reading) -> GroupLoad:
        name, size = reading.replica, reading.block_size
        prompt, answer = self._lengths(reading)
        waiting = round(reading.num_waiting)
        head = max(1, -(-int(prompt) // size))
        totals = LeaderTotals(
            num_preemptions=int(reading.counters.get("preemptions", 0.0)),
            lost_tokens=self._lost.get(name, 0),
            prompt_tokens=int(reading.counters.get("prompt_tokens", 0.0)),
            generation_tokens=int(reading.counters.get("generation_tokens", 0.0)),
        )
        report = LoadReport(
            self._ids[name],
            sequence_number=self._numbers[name],
            num_running=round(reading.num_running),
            num_waiting=waiting,
            used_blocks=round(reading.kv_usage * reading.capacity_blocks),
            capacity_blocks=reading.capacity_blocks,
            growth_blocks=int(reading.num_running * answer / 2) // size,
            head_of_line_blocks=head if waiting else 0,
            waiting_blocks=head * waiting,
            waiting_tokens=int(prompt) * waiting,
            totals=totals,
        )
        blocks = reading.capacity_blocks
        return GroupLoad(report, blocks, undropped_blocks=blocks)

    def _lengths(self, reading: Reading) -> tuple[float, float]:
        """Mean tokens of its prompts and answers, lately or since it began."""
        histograms, counters = reading.histograms, reading.counters
        lately = change_of(self._older[reading.replica][0], reading)
        if lately.amounts.get("finished", 0.0) >= LEAST_ENDED:
            histograms, counters = lately.histograms, lately.amounts
        means = []
        for name, counter in (("input_tokens", "prompt_tokens"),
                              ("output_tokens", "generation_tokens")):  # fmt: skip
            found = histograms.get(name)
            num_ended = max(1.0, counters.get("finished", 0.0))
            each = counters.get(counter, 0.0) / num_ended
            means.append((found.mean if found else None) or each)
        return means[0], means[1]

    def _prompt_share(self, newest: Mapping[str, Reading]) -> float:
        shares = [self._prompt_share_of(name) for name in newest]
        return sum(shares) / len(shares) if shares else 0.0

    def _prompt_share_of(self, name: str) -> float:
        """Of a replica's time, what the prompts took that were computed since its last reading."""
        change = self._changes.get(name)
        if change is None:
            return 0.0
        return min(1.0, change.rate("prompt_tokens") * self._token_s(name))

    def _token_s(self, name: str) -> float:
        """Of a replica's time, for a token of a prompt in a full step."""
        preset = self._presets[name]
        chunk = [Chunk(_NOBODY, 0, self._max_tokens, True)]
        return preset.times.stage_s(chunk, preset.spec.num_layers, True) / self._max_tokens

    def _drop_view(self, loads: Mapping[str, GroupLoad], prompt_share: float) -> DropView:
        layouts, specs = [], {}
        for name, load in loads.items():
            member, spec = InstanceId(int(load.group_id)), self._presets[name].spec
            specs[member] = replace(spec, instance_id=member)
            layers = LayerRange(0, spec.num_layers)
            layouts.append(GroupLayout(load.group_id, (Stage(member, layers),)))
        ids = {load.group_id for load in loads.values()}
        return DropView(
            tuple(layouts),
            {load.group_id: load for load in loads.values()},
            specs,
            GroupId(len(self._ids)),
            frozenset(),
            ids,
            (),
            0,
            prompt_share,
        )

    def _replica(
        self, reading: Reading, load: GroupLoad | None, now_s: float, memory_short: bool
    ) -> ReplicaView:
        change = self._changes.get(reading.replica)
        demand = 0.0 if load is None else load.need_blocks / max(1, reading.capacity_blocks)
        prompt_share = self._prompt_share_of(reading.replica)
        full_in_s, busy_in_s = self._foretell(reading.replica, load, demand, prompt_share, now_s)
        has_room = load is not None and load.report.head_of_line_blocks <= free_blocks(load.report)
        is_busy = prompt_share > BUSY_SHARE
        queued = 0 if load is None else load.report.waiting_tokens
        queues = queued * self._token_s(reading.replica) > QUEUE_S
        return ReplicaView(
            name=reading.replica,
            age_s=max(0.0, now_s - reading.time_s),
            is_stale=load is None,
            kv_usage=reading.kv_usage,
            demand=demand,
            num_running=round(reading.num_running),
            num_waiting=round(reading.num_waiting),
            arrivals_per_s=0.0 if change is None else change.num_arrived / change.elapsed_s,
            memory_short=memory_short,
            compute_short=queues and (is_busy or (has_room and not memory_short)),
            full_in_s=full_in_s,
            busy_in_s=busy_in_s,
        )

    def _foretell(
        self, name: str, load: GroupLoad | None, demand: float, prompt_share: float, now_s: float
    ) -> tuple[float | None, float | None]:
        """Until memory and compute are short. Of one that is silent nothing is known, nor what it
        did meanwhile when it speaks again.
        """
        demands = self._demand.setdefault(name, Trend(TREND_S))
        prompts = self._prompts.setdefault(name, Trend(PROMPTS_TREND_S))
        if load is None:
            demands.clear()
            prompts.clear()
            return None, None
        demands.add(now_s, demand)
        prompts.add(now_s, prompt_share)
        full_in_s = 0.0 if demand >= 1.0 else demands.reaches_in_s(1.0, FORECAST_S)
        return full_in_s, prompts.reaches_in_s(BUSY_SHARE, FORECAST_S)
