"""An episode's requests once more, on simulated replicas under other policies.

The simulator is that of ``kunserve simulate``: the real controller and schedulers over modelled
replicas. What the fleet did itself is simulated too, replica by replica, so that the ways are
compared with each other and not with a measurement; the measurement stands beside it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from kunserve.core.config import SchedulerConfig
from kunserve_lab.bench.metrics import tpot_s, ttft_s
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.compare.simulated.projection import Projection, capacity, outlook
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import SYSTEMS
from kunserve_lab.observer.episodes.episode import Episode
from kunserve_lab.observer.episodes.rebuild import Rebuilt, rebuild
from kunserve_lab.observer.fleet import Factors, Made, with_memory
from kunserve_lab.observer.readings.change import together
from kunserve_lab.sim.by_time import WorldConfig
from kunserve_lab.sim.costs import profile_times
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.workload.workload import Workload

WAKE_S = 3.0
"""From the order for a sleeping replica to its first request: what sleep modes are reported to
take for 64 GiB of weights."""
AS_IT_RAN, LEAST_LOAD, DROP, ENDLESS = "as it ran", "least load", "drop", "endless memory"
FP8_KV, WAKE = "fp8 KV", "wake sleepers"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way makes of the episode. Times are seconds, over those who came during it."""

    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    num_failed: int
    num_preemptions: int
    num_drops: int = 0
    num_woken: int = 0
    """Replicas that were added."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the servers themselves counted during the episode; None where they do not."""

    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    num_arrived: int
    ttft_p99_class_s: tuple[float, float] | None = None
    """The class of the servers' histogram in which P99 lies: what is certain of it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An episode, and what each way would have made of it."""

    episode: Episode
    measured: Measured
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By way; empty where it could not be simulated."""
    alike: Measured | None = None
    """The simulated run of what the fleet did, over those whom ``measured`` counts."""
    map: Projection | None = None
    """What the fluid model's map says of its burst."""
    num_left_out: int = 0
    factors: Factors = field(default_factory=Factors)
    why_not: str = ""
    """Why nothing was simulated."""


def measured_of(episode: Episode) -> Measured:
    """By the histograms of those who got their first token, or ended, during the episode."""
    ttft, tpot = together(episode.during, "ttft"), together(episode.during, "tpot")
    tpot = tpot if tpot is not None and tpot.count else together(episode.during, "itl")
    return Measured(
        ttft_p50_s=None if ttft is None else ttft.quantile(0.5),
        ttft_p99_s=None if ttft is None else ttft.quantile(0.99),
        tpot_p50_s=None if tpot is None else tpot.quantile(0.5),
        num_arrived=sum(one.num_arrived for one in episode.during),
        ttft_p99_class_s=None if ttft is None else ttft.bracket(0.99),
    )


def judge(episode: Episode, profile: InstanceProfile, factors: Factors, made: Made) -> Judged:
    """Simulate every way. ``profile`` is a replica of the fleet, its step times corrected.

    It takes seconds, up to a minute for thousands of requests.
    """
    rebuilt = rebuild(episode, profile.max_model_len)
    measured = measured_of(episode)
    if len(rebuilt.workload) < 2:
        return Judged(episode, measured, factors=factors, why_not="hardly a request came")
    scenario = _scenario(profile, rebuilt.workload, len(episode.replicas), made)
    ran = _as_it_ran(scenario, rebuilt)
    outcomes = {AS_IT_RAN: _outcome(ran, rebuilt)}
    for way, run in _ways(scenario, is_fp8=_is_fp8(episode)).items():
        result = run()
        outcomes[way] = _outcome([result], rebuilt, result.num_ordered)
    return Judged(
        episode,
        measured,
        outcomes,
        _alike(episode, ran, rebuilt.begin_s),
        outlook(scenario, capacity(scenario)),
        rebuilt.num_left_out,
        factors,
    )


def _scenario(
    profile: InstanceProfile, workload: Workload, num_instances: int, made: Made
) -> Scenario:
    model = profile.model
    tokens, seqs = made.max_num_batched_tokens, made.max_num_seqs
    times = profile_times(
        profile.times, profile.spec.num_layers, tokens, model.experts, model.windows
    )
    return Scenario(
        profile, num_instances, workload, SchedulerConfig(seqs, tokens), WorldConfig(), cost=times
    )


def _ways(scenario: Scenario, is_fp8: bool) -> dict[str, Callable[[], SimResult]]:
    recompute = SYSTEMS["recompute"]
    ways = {
        LEAST_LOAD: lambda: simulate(recompute, scenario),
        ENDLESS: lambda: simulate(SYSTEMS["endless"], scenario),
        WAKE: lambda: simulate(
            SYSTEMS["autoscale"],
            replace(scenario, world=replace(scenario.world, start_s=WAKE_S)),
        ),
    }
    if not is_fp8:
        half = replace(scenario, profile=_half_kv(scenario.profile))
        ways[FP8_KV] = lambda: simulate(recompute, half)
    if scenario.num_instances > 1:
        ways[DROP] = lambda: simulate(SYSTEMS["drop"], scenario)
    return ways


def _half_kv(profile: InstanceProfile) -> InstanceProfile:
    """The same memory with KV of half the bytes: twice the blocks."""
    model = replace(profile.model, kv_token_bytes=max(1, profile.model.kv_token_bytes // 2))
    spec = replace(profile.spec, unit_bytes=max(1, profile.spec.unit_bytes // 2))
    blocks = profile.spec.kv_units * profile.spec.unit_bytes // spec.unit_bytes // spec.num_layers
    weights = profile.spec.memory_bytes - profile.spec.kv_units * profile.spec.unit_bytes
    spec = replace(spec, kv_units=0, memory_bytes=weights)
    return with_memory(replace(profile, model=model, spec=spec), blocks)


def _is_fp8(episode: Episode) -> bool:
    return any("fp8" in change.after.cache_dtype for change in episode.changes)


def _as_it_ran(scenario: Scenario, rebuilt: Rebuilt) -> list[SimResult]:
    """Each replica alone, with the requests that it got."""
    results = []
    for place in range(scenario.num_instances):
        own = rebuilt.of_replica(place)
        if len(own):
            alone = replace(scenario, num_instances=1, workload=own)
            results.append(simulate(SYSTEMS["recompute"], alone))
    return results


def _alike(episode: Episode, results: Sequence[SimResult], begin_s: float) -> Measured:
    """Over those who got their first token during the episode, as servers count."""
    end_s = begin_s + episode.end_s - episode.begin_s
    records = [record for one in results for record in one.run.records]
    began = [
        record
        for record in records
        if record.token_times_s and begin_s <= record.token_times_s[0] <= end_s
    ]
    ttfts = [ttft_s(record) for record in began]
    tpots = [tpot_s(record) for record in began]
    arrived = sum(begin_s <= record.sent_s <= end_s for record in records)
    return Measured(
        _percentile(ttfts, 50.0), _percentile(ttfts, 99.0), _percentile(tpots, 50.0), arrived
    )


def _outcome(results: Sequence[SimResult], rebuilt: Rebuilt, num_woken: int = 0) -> Outcome:
    records = _during(chain.from_iterable(one.run.records for one in results), rebuilt.begin_s)
    return Outcome(
        ttft_p50_s=_percentile([ttft_s(one) for one in records], 50.0),
        ttft_p99_s=_percentile([ttft_s(one) for one in records], 99.0),
        tpot_p50_s=_percentile([tpot_s(one) for one in records], 50.0),
        num_failed=sum(one.error is not None for one in records),
        num_preemptions=sum(one.num_preemptions for one in results),
        num_drops=sum(one.num_drops for one in results),
        num_woken=num_woken,
    )


def _during(records: Iterable[RequestRecord], begin_s: float) -> list[RequestRecord]:
    """Those who came when the episode had begun, or all where none did."""
    every = list(records)
    return [one for one in every if one.sent_s >= begin_s] or every


def _percentile(values: Sequence[float | None], percentile: float) -> float:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percentile)) if known else float("nan")
