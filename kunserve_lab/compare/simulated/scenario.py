"""One scenario of the simulated world: what the compared systems have in common."""

import math
from dataclasses import dataclass, field, replace

from kunserve.cluster.driver.topology import Places, read_topology
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import ConfigError
from kunserve.core.kv_blocks import ring_of
from kunserve.core.plan import Measured, Plan, SwapPlan
from kunserve.model.profile import read_profile
from kunserve_lab.compare.settings import SimulatedSetup
from kunserve_lab.compare.systems import System, check_parts
from kunserve_lab.sim.by_time import WorldConfig
from kunserve_lab.sim.costs import cpu_profile, profile_times
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import InstanceProfile, gpu_profile, joined_profile
from kunserve_lab.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that the compared systems have in common."""

    profile: InstanceProfile
    num_instances: int
    workload: Workload
    scheduler: SchedulerConfig
    world: WorldConfig = field(default_factory=WorldConfig)
    kills: tuple[tuple[float, int], ...] = ()
    """(seconds since the first request could come, instance) of each death."""
    host_bytes: int | None = None
    """Host memory of each instance for swapped KV; None is no limit."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """For the limits of its queue."""
    cost: CostCoefficients | None = None
    """What schedulers believe of steps; None: every token costs the same."""


def build_scenario(setup: SimulatedSetup, workload: Workload) -> Scenario:
    """The scenario, or a ConfigError that says what is wrong with it."""
    _check_setup(setup)
    profile = _instance_profile(setup)
    return Scenario(
        profile=profile,
        num_instances=setup.num_instances,
        workload=workload,
        scheduler=SchedulerConfig(setup.max_num_seqs, setup.max_num_batched_tokens),
        world=WorldConfig(start_s=setup.start_s, places=_places(setup)),
        kills=setup.kills,
        host_bytes=None if setup.host_gib is None else int(setup.host_gib * (1 << 30)),
        server=ServerConfig(
            max_num_queued_reqs=setup.max_num_queued_reqs,
            max_num_queued_tokens=setup.max_num_queued_tokens,
        ),
        cost=_cost(profile, setup.max_num_batched_tokens),
    )


def scenario_of(system: System, scenario: Scenario) -> Scenario:
    """The scenario as this system finds it: of instances that are joined there are fewer."""
    joined = system.joined_instances
    if joined == 1:
        return scenario
    check_parts(system, scenario.num_instances)
    if scenario.kills or scenario.world.places:
        raise ConfigError(f"{system.name} joins instances: say none to die, and no topology")
    profile = joined_profile(scenario.profile, joined)
    return replace(
        scenario,
        profile=profile,
        num_instances=scenario.num_instances // joined,
        cost=_cost(profile, scenario.scheduler.max_num_batched_tokens),
    )


def _cost(profile: InstanceProfile, max_tokens: int) -> CostCoefficients:
    """What schedulers believe of these instances' steps."""
    model = profile.model
    num_layers = profile.spec.num_layers
    return profile_times(profile.times, num_layers, max_tokens, model.experts, model.windows)


def _places(setup: SimulatedSetup) -> Places:
    return () if setup.topology is None else read_topology(setup.topology, setup.num_instances)


_COUNTS = (
    "num_instances",
    "gpus_per_instance",
    "instance_mib",
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
)
"""Settings that are 1 at least."""


def _check_setup(setup: SimulatedSetup) -> None:
    """What can be seen to be impossible before anything is built. Written so that NaN fails."""
    for name in _COUNTS:
        count = getattr(setup, name)
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be at least 1, not {count}")
    if not 0.0 < setup.memory_utilization <= 1.0:
        raise ConfigError(f"memory_utilization must be in (0, 1], not {setup.memory_utilization}")
    if not 0.0 <= setup.stage_host_share <= 1.0:
        raise ConfigError(f"stage_host_share must be in [0, 1], not {setup.stage_host_share}")
    for name, amount in (("start_s", setup.start_s), ("host_gib", setup.host_gib)):
        if amount is not None and not 0.0 <= amount < math.inf:
            raise ConfigError(f"{name} must be at least 0 and finite, not {amount}")
    for time_s, instance in setup.kills:
        if not 0.0 <= time_s < math.inf:
            raise ConfigError(f"an instance dies at a time of at least 0 s, not at {time_s} s")
        if not 0 <= instance < setup.num_instances:
            raise ConfigError(
                f"no instance {instance} to kill: there are 0 to {setup.num_instances - 1}"
            )


def _instance_profile(setup: SimulatedSetup) -> InstanceProfile:
    if setup.profile is not None:
        measured = read_profile(setup.profile)
        return cpu_profile(
            find_model(measured.subject.model),
            measured.serving,
            measured.alone,
            measured.subject.block_size,
            setup.instance_mib << 20,
        )
    return gpu_profile(
        find_model(setup.model),
        find_device(setup.device),
        setup.gpus_per_instance,
        memory_utilization=setup.memory_utilization,
        block_size=setup.block_size,
        stage_host_share=setup.stage_host_share,
    )


def plan_of(
    system: System,
    profile: InstanceProfile,
    num_instances: int,
    scheduler: SchedulerConfig,
    cost: CostCoefficients | None,
    host_bytes: int | None = None,
    server: ServerConfig | None = None,
) -> Plan:
    """What the system's controller and agents run by.

    ``host_bytes`` is the host memory of each instance for swapped KV; None is no limit. Of
    ``server`` the limits of the queue count.
    """
    check_parts(replace(system, joined_instances=1), num_instances)
    server = ServerConfig() if server is None else server
    if system.max_num_queued_reqs is not None:
        server = replace(server, max_num_queued_reqs=system.max_num_queued_reqs)
    config = KunServeConfig(
        model=ModelConfig(model=profile.model.name),
        instance=InstanceConfig(
            memory_bytes=profile.spec.memory_bytes,
            block_size=profile.spec.block_size,
            granule_bytes=profile.spec.granule_bytes,
            disable_hybrid_kv_cache_manager=profile.spec.kv_ring is None,
        ),
        scheduler=replace(
            scheduler,
            enable_prefix_caching=scheduler.enable_prefix_caching and system.caches_prefixes,
            lookahead=system.lookahead,
            tpot_slo_s=scheduler.tpot_slo_s if system.tpot_slo_s is None else system.tpot_slo_s,
            scheduler_reserve_full_isl=system.reserves_prompts,
        ),
        overload=system.overload,
        server=server,
        cluster=ClusterConfig(
            num_instances=num_instances,
            dispatch_policy=system.dispatch,
            prefix_aware_dispatch=system.knows_prefixes,
            pipeline_stages=system.pipeline_stages,
            max_instances=2 * num_instances if system.autoscales else None,
        ),
    )
    swap = SwapPlan.of(system.overload, profile.host_bytes_per_s, host_bytes)
    return Plan(config, Measured(cost, swap, profile.spec.kv_ring))


def profile_of(system: System, profile: InstanceProfile, step_tokens: int) -> InstanceProfile:
    """The instances of this system: with more memory than the others, for a bound; or with a ring
    for steps of so many tokens. Raises ConfigError for a system that is not simulated.
    """
    if system.shares_weights:
        raise ConfigError(
            f"{system.name} is for real instances of one machine; simulated ones have memories of "
            "their own"
        )
    spec = profile.spec
    more_units = int(spec.memory_bytes * (system.memory_factor - 1.0)) // spec.unit_bytes
    ring = None
    if system.keeps_ring:
        model = profile.model
        if model.window is None:
            raise ConfigError(f"{system.name} is for models with windows, not {model.name}")
        ring = ring_of(model.window, model.period, spec.block_size, step_tokens)
    return replace(
        profile,
        hides_host_copies=system.hides_host_copies,
        spec=replace(
            spec,
            memory_bytes=spec.memory_bytes + more_units * spec.unit_bytes,
            kv_units=spec.kv_units + more_units,
            kv_ring=ring,
        ),
    )


def world_of(system: System, world: WorldConfig) -> WorldConfig:
    """The world as this system finds it."""
    return replace(world, link_priority=system.link_priority)
