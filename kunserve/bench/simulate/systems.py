"""The systems that a simulation compares: the same brain with other policies."""

from dataclasses import dataclass, replace

from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
    ServerConfig,
    SwapConfig,
)
from kunserve.core.errors import ConfigError
from kunserve.sim.cluster import WorldConfig
from kunserve.sim.profile import InstanceProfile


@dataclass(frozen=True, slots=True)
class SimSystem:
    """One row of a comparison."""

    label: str
    overload: OverloadConfig
    description: str
    link_priority: bool = True
    lookahead: bool = True
    """Whether pipelines form microbatches of equal predicted time."""
    pipeline_stages: int = 1
    """Groups of so many instances from the start; 1 is none."""
    autoscales: bool = False
    """Up to twice the instances are started under overload, and given back after it."""
    watermark: float | None = None
    """``SchedulerConfig.watermark`` where it is not the default."""
    swaps: bool = False
    """Preempted KV goes to host memory and comes back."""


_DROP = OverloadConfig(policy="drop")

SYSTEMS = {
    system.label: system
    for system in (
        SimSystem(
            "recompute",
            OverloadConfig(policy="recompute"),
            "vLLM: the last to come is thrown out and computed again",
        ),
        SimSystem(
            "recompute-watermark",
            OverloadConfig(policy="recompute"),
            "recompute, and admission leaves 5 % of the memory for those that run",
            watermark=0.05,
        ),
        SimSystem(
            "swap",
            OverloadConfig(policy="recompute"),
            "InferCept: the last to come waits in host memory; copies hide behind steps",
            swaps=True,
        ),
        SimSystem(
            "static-pp",
            OverloadConfig(policy="recompute"),
            "vLLM with pipelines: pairs of half models from the start",
            pipeline_stages=2,
            lookahead=False,
        ),
        SimSystem(
            "static-pp4",
            OverloadConfig(policy="recompute"),
            "static-pp with groups of four",
            pipeline_stages=4,
            lookahead=False,
        ),
        SimSystem(
            "static-pp8",
            OverloadConfig(policy="recompute"),
            "static-pp with groups of eight",
            pipeline_stages=8,
            lookahead=False,
        ),
        SimSystem(
            "migrate",
            OverloadConfig(policy="migrate"),
            "Llumnix: running requests move to the freest instance, KV and all",
        ),
        SimSystem("drop", _DROP, "KunServe: layers are dropped in a burst and restored after it"),
        SimSystem(
            "drop-no-priority",
            _DROP,
            "drop, but activations wait behind bulk transfers on the links",
            link_priority=False,
        ),
        SimSystem(
            "drop-no-lookahead",
            _DROP,
            "drop, with microbatches formed by a token budget",
            lookahead=False,
        ),
        SimSystem(
            "drop-basic",
            _DROP,
            "drop without lookahead and without priority on the links",
            link_priority=False,
            lookahead=False,
        ),
        SimSystem(
            "drop-no-restore",
            replace(_DROP, restore_below=0.0),
            "drop, and never restore",
        ),
        SimSystem(
            "drop-no-forecast",
            replace(_DROP, forecast_s=0.0),
            "drop when memory is short, not when it is about to be",
        ),
        SimSystem(
            "drop-deep",
            replace(_DROP, min_deep_gain=0.0),
            "drop into groups of any depth, as the paper's Algorithm 1",
        ),
        SimSystem(
            "drop-pairs",
            replace(_DROP, max_group_size=2),
            "drop, and no more than two instances share a copy",
        ),
        SimSystem(
            "autoscale",
            OverloadConfig(policy="recompute"),
            "recompute, and start instances when memory is short; they are given back later",
            autoscales=True,
        ),
        SimSystem(
            "drop-autoscale",
            _DROP,
            "drop, and start instances when nothing is left to drop; they are given back later",
            autoscales=True,
        ),
    )
}


def find_system(label: str) -> SimSystem:
    """The system of that name."""
    system = SYSTEMS.get(label)
    if system is None:
        raise ConfigError(f"no system {label!r} to compare; there are: {', '.join(SYSTEMS)}")
    return system


def config_of(
    system: SimSystem,
    profile: InstanceProfile,
    num_instances: int,
    scheduler: SchedulerConfig,
    host_bytes: int | None = None,
    server: ServerConfig | None = None,
) -> KunServeConfig:
    """The settings that the system's controller and agents run under.

    ``host_bytes`` is the host memory of each instance for swapped KV; None is no limit. Of
    ``server`` the limits of the queue count.
    """
    if num_instances % system.pipeline_stages:
        raise ConfigError(
            f"{system.label} makes groups of {system.pipeline_stages} instances, and "
            f"{num_instances} cannot be parted so"
        )
    return KunServeConfig(
        model=ModelConfig(model=profile.model.name),
        instance=InstanceConfig(
            memory_bytes=profile.spec.memory_bytes,
            block_size=profile.spec.block_size,
            granule_bytes=profile.spec.granule_bytes,
        ),
        scheduler=replace(
            scheduler,
            lookahead=system.lookahead,
            watermark=scheduler.watermark if system.watermark is None else system.watermark,
            swap=SwapConfig(profile.host_bytes_per_s, host_bytes) if system.swaps else None,
        ),
        overload=system.overload,
        server=ServerConfig() if server is None else server,
        cluster=ClusterConfig(
            num_instances=num_instances,
            max_instances=2 * num_instances if system.autoscales else None,
        ),
    )


def world_of(system: SimSystem, world: WorldConfig) -> WorldConfig:
    """The world as this system finds it."""
    return replace(world, link_priority=system.link_priority)
