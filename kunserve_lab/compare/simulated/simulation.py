"""One simulated run, from settings to records."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.snapshots import ObservedDrops, TransitionRecord
from kunserve_lab.bench.metrics import RunMetrics, compute_metrics
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.bench.runfile import Run
from kunserve_lab.compare.simulated.scenario import (
    Scenario,
    plan_of,
    profile_of,
    scenario_of,
    world_of,
)
from kunserve_lab.compare.simulated.sim_client import SimClient
from kunserve_lab.compare.systems import System
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.world.world import Watcher

LEAD_S = 5.0
"""Virtual time before the first request, in which instances form their groups."""
DRAIN_S = 30.0
MakeWorld: TypeAlias = Callable[..., TimedWorld]
"""As `TimedWorld` is made: what a study changes of the world is a subclass."""


@dataclass(frozen=True, slots=True)
class SimResult:
    """What one system made of the scenario."""

    run: Run
    metrics: RunMetrics
    transitions: tuple[TransitionRecord, ...]
    """Times count from the run's start, as in the records."""
    num_preemptions: int
    lost_tokens: int
    num_drops: int
    num_restores: int
    num_migrations: int
    num_ordered: int
    """Instances started beyond the first ones."""
    num_given_back: int
    bubble_ratio: float | None
    gpu_hours: float
    bulk_bytes: float
    swapped_out_bytes: int
    """To host memory."""
    swapped_back_bytes: int
    prefix_hit_rate: float
    """Share of the prompt tokens whose KV was cached, of requests that began."""
    generation_tokens: tuple[int, ...]
    """Of each instance that lives at the end, as a leader."""
    num_events: int
    observed: ObservedDrops | None
    """What drops would have done, by the policy ``observe``; None under another one."""


def simulate(
    system: System,
    scenario: Scenario,
    *,
    watcher: Watcher | None = None,
    ended: Callable[[RequestRecord], None] = lambda record: None,
    is_drained: bool = False,
    make_world: MakeWorld = TimedWorld,
) -> SimResult:
    """Replay the scenario under one system. Equal arguments give equal results.

    With ``is_drained`` the cluster runs on for a while, and nothing may be left of any request.
    """
    with _without_collector():
        found = scenario_of(system, scenario)
        return _simulate(system, found, watcher, ended, is_drained, make_world)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """A run makes millions of small objects and no cycles: looking for them costs a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _simulate(
    system: System,
    scenario: Scenario,
    watcher: Watcher | None,
    ended: Callable[[RequestRecord], None],
    is_drained: bool,
    make_world: MakeWorld,
) -> SimResult:
    heap = EventHeap()
    profile, workload = scenario.profile, scenario.workload
    profile = profile_of(system, profile, scenario.scheduler.max_num_batched_tokens)
    plan = plan_of(
        system,
        profile,
        scenario.num_instances,
        scenario.scheduler,
        scenario.cost,
        scenario.host_bytes,
        scenario.server,
    )
    client = SimClient(heap, workload, LEAD_S, ended)
    cluster = make_world(
        plan,
        profile,
        heap,
        client.received,
        world_of(system, scenario.world),
        watcher,
    )
    _form_groups(cluster, heap, system)
    num_first = cluster.controller.transitions.num_drops
    client.begin(cluster)
    for time_s, instance_id in scenario.kills:
        heap.at(LEAD_S + time_s, cluster.kill_instance, InstanceId(instance_id))
    while client.num_left:
        heap.step()
    result = _result(system, scenario, cluster, client, heap, num_first)
    if is_drained:
        while heap.now_s() < LEAD_S + result.run.duration_s + DRAIN_S:
            heap.step()
        cluster.check_empty()
    return result


def _form_groups(cluster: TimedWorld, heap: EventHeap, system: System) -> None:
    """Let instances come up and form their groups."""
    while heap.now_s() < LEAD_S - 0.5:
        heap.step()
    stages = {len(g.layout.stages) for g in cluster.controller.placement.groups.values()}
    if stages != {system.pipeline_stages}:
        raise ConfigError(f"{system.name}: groups of {sorted(stages)} stages came about")


def _result(
    system: System,
    scenario: Scenario,
    cluster: TimedWorld,
    client: SimClient,
    heap: EventHeap,
    num_first: int,
) -> SimResult:
    state = cluster.controller.state(heap.now_s())
    totals = cluster.accounts.totals
    duration_s = client.end_s
    run = Run(
        label=system.name,
        provenance=scenario.workload.provenance,
        duration_s=duration_s,
        records=tuple(sorted(client.records, key=lambda record: record.number)),
        samples=tuple(client.samples),
        config=(
            ("system", system.name),
            ("model", scenario.profile.model.name),
            ("num_instances", scenario.num_instances),
            ("num_gpus", scenario.profile.num_gpus),
            ("max_num_batched_tokens", scenario.scheduler.max_num_batched_tokens),
            ("max_num_seqs", scenario.scheduler.max_num_seqs),
            ("block_size", scenario.profile.spec.block_size),
        ),
    )
    return SimResult(
        run=run,
        metrics=compute_metrics(run.records, duration_s),
        transitions=tuple(state.transitions),
        num_preemptions=sum(total.num_preemptions for total in totals),
        lost_tokens=sum(total.lost_tokens for total in totals),
        num_drops=state.num_drops - num_first,
        num_restores=state.num_restores,
        num_migrations=cluster.controller.balance.num_moved,
        num_ordered=cluster.num_instances - scenario.num_instances,
        num_given_back=len(cluster.given_back),
        bubble_ratio=cluster.accounts.bubble_ratio,
        gpu_hours=cluster.accounts.instance_seconds(heap.now_s())
        * scenario.profile.num_gpus
        / 3600.0,
        bulk_bytes=cluster.network.bulk_bytes,
        swapped_out_bytes=cluster.swapped_bytes[0],
        swapped_back_bytes=cluster.swapped_bytes[1],
        prefix_hit_rate=client.num_cached_tokens / max(1, client.num_prompt_tokens),
        generation_tokens=tuple(one.totals.generation_tokens for one in state.instances),
        num_events=heap.num_done,
        observed=state.observed,
    )
