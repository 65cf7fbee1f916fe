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
from kunserve_lab.observer.fleet import Factors, with_memory
from kunserve_lab.observer.readings.change import together
from kunserve_lab.observer.readings.histogram import Histogram
from kunserve_lab.observer.settings import Made
from kunserve_lab.sim.by_time import WorldConfig
from kunserve_lab.sim.costs import profile_times
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.workload.workload import Workload

WAKE_S = 3.0
"""From the order for a sleeping replica to its first request: what sleep modes are reported to
take for 64 GiB of weights."""
MOST_DRAWS = 3
"""Answers are given to prompts by chance: so often, and figures are over all of them."""
TRIED = 8
"""Times as many are tried, and those taken that come nearest to what the servers counted."""
MOST_DRAWN = 6000
"""Requests of all draws together: of a large episode chance makes less."""
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


def judge(
    episode: Episode,
    profile: InstanceProfile,
    factors: Factors,
    made: Made,
    most_draws: int = MOST_DRAWS,
) -> Judged:
    """Simulate every way. ``profile`` is a replica of the fleet, its step times corrected.

    It takes seconds, up to minutes for thousands of requests.
    """
    measured = measured_of(episode)
    number = len(rebuild(episode, profile.max_model_len).workload)
    if number < 2:
        return Judged(episode, measured, factors=factors, why_not="hardly a request came")
    most = max(1, MOST_DRAWN // number)
    num_draws = min(most_draws, most)
    num_tried = min(TRIED * most_draws, most)
    tried = [_draw(episode, profile, made, seed) for seed in range(num_tried)]
    draws = sorted(tried, key=lambda one: one.how_far)[:num_draws]
    scenarios = [one.scenario for one in draws]
    ran = [result for one in draws for result in one.ran]
    begin_s, num_left_out = draws[0].rebuilt.begin_s, draws[0].rebuilt.num_left_out
    outcomes = {AS_IT_RAN: _outcome(ran, begin_s, num_draws)}
    for way, run in _ways(scenarios[0].num_instances, _is_fp8(episode)).items():
        outcomes[way] = _outcome([run(one) for one in scenarios], begin_s, num_draws)
    return Judged(
        episode,
        measured,
        outcomes,
        _alike(episode, ran, begin_s, num_draws),
        outlook(scenarios[0], capacity(scenarios[0])),
        num_left_out,
        factors,
    )


@dataclass(frozen=True, slots=True)
class _Draw:
    """An episode's requests as they may have been, and what the fleet then made of them."""

    rebuilt: Rebuilt
    scenario: Scenario
    ran: list[SimResult]
    how_far: float
    """From the first tokens that the servers counted (`distance`)."""


def _draw(episode: Episode, profile: InstanceProfile, made: Made, seed: int) -> _Draw:
    rebuilt = rebuild(episode, profile.max_model_len, seed)
    scenario = _scenario(profile, rebuilt.workload, episode, made)
    ran = _as_it_ran(scenario, rebuilt)
    ttfts = [ttft_s(record) for record in _began(episode, ran, rebuilt.begin_s)]
    counted = together(episode.during, "ttft")
    return _Draw(rebuilt, scenario, ran, distance(counted, [one for one in ttfts if one]))


def distance(counted: Histogram | None, ttfts: Sequence[float]) -> float:
    """How far simulated first tokens are from a histogram of real ones: natural logarithms of
    ratios, of the mean, and of percentiles outside the class in which the real one lies, added.
    """
    if counted is None or not counted.mean or not ttfts:
        return 0.0
    found = abs(np.log(np.mean(ttfts) / counted.mean))
    for share in (0.5, 0.9, 0.99):
        low, high = counted.bracket(share) or (0.0, np.inf)
        value = float(np.quantile(ttfts, share))
        found += max(0.0, np.log(value / high), np.log(low / value) if low else 0.0)
    return float(found)


def _scenario(
    profile: InstanceProfile, workload: Workload, episode: Episode, made: Made
) -> Scenario:
    model = profile.model
    tokens, seqs = made.max_num_batched_tokens, made.max_num_seqs
    times = profile_times(
        profile.times, profile.spec.num_layers, tokens, model.experts, model.windows
    )
    caches = all(change.after.caches_prefixes for change in episode.changes)
    scheduler = SchedulerConfig(seqs, tokens, enable_prefix_caching=caches)
    num_instances = len(episode.replicas)
    return Scenario(profile, num_instances, workload, scheduler, WorldConfig(), cost=times)


def _ways(num_instances: int, is_fp8: bool) -> dict[str, Callable[[Scenario], SimResult]]:
    recompute = SYSTEMS["recompute"]

    def wake(scenario: Scenario) -> SimResult:
        world = replace(scenario.world, start_s=WAKE_S)
        return simulate(SYSTEMS["autoscale"], replace(scenario, world=world))

    def fp8(scenario: Scenario) -> SimResult:
        return simulate(recompute, replace(scenario, profile=_half_kv(scenario.profile)))

    ways: dict[str, Callable[[Scenario], SimResult]] = {
        LEAST_LOAD: lambda scenario: simulate(recompute, scenario),
        ENDLESS: lambda scenario: simulate(SYSTEMS["endless"], scenario),
        WAKE: wake,
    }
    if not is_fp8:
        ways[FP8_KV] = fp8
    if num_instances > 1:
        ways[DROP] = lambda scenario: simulate(SYSTEMS["drop"], scenario)
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


def _alike(
    episode: Episode, results: Sequence[SimResult], begin_s: float, num_draws: int
) -> Measured:
    """Over those who got their first token during the episode, as servers count."""
    end_s = begin_s + episode.end_s - episode.begin_s
    began = _began(episode, results, begin_s)
    records = [record for one in results for record in one.run.records]
    ttfts = [ttft_s(record) for record in began]
    tpots = [tpot_s(record) for record in began]
    arrived = sum(begin_s <= record.sent_s <= end_s for record in records)
    return Measured(
        _percentile(ttfts, 50.0),
        _percentile(ttfts, 99.0),
        _percentile(tpots, 50.0),
        round(arrived / num_draws),
    )


def _began(episode: Episode, results: Sequence[SimResult], begin_s: float) -> list[RequestRecord]:
    """Those who got their first token during the episode."""
    end_s = begin_s + episode.end_s - episode.begin_s
    return [
        record
        for one in results
        for record in one.run.records
        if record.token_times_s and begin_s <= record.token_times_s[0] <= end_s
    ]


def _outcome(results: Sequence[SimResult], begin_s: float, num_draws: int) -> Outcome:
    """Latencies over all draws together; counts are those of one, on average."""
    records = _during(chain.from_iterable(one.run.records for one in results), begin_s)

    def mean(counts: Iterable[int]) -> int:
        return round(sum(counts) / num_draws)

    return Outcome(
        ttft_p50_s=_percentile([ttft_s(one) for one in records], 50.0),
        ttft_p99_s=_percentile([ttft_s(one) for one in records], 99.0),
        tpot_p50_s=_percentile([tpot_s(one) for one in records], 50.0),
        num_failed=mean(one.error is not None for one in records),
        num_preemptions=mean(one.num_preemptions for one in results),
        num_drops=mean(one.num_drops for one in results),
        num_woken=mean(one.num_ordered for one in results),
    )


def _during(records: Iterable[RequestRecord], begin_s: float) -> list[RequestRecord]:
    """Those who came when the episode had begun, or all where none did."""
    every = list(records)
    return [one for one in every if one.sent_s >= begin_s] or every


def _percentile(values: Sequence[float | None], percentile: float) -> float:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percentile)) if known else float("nan")
