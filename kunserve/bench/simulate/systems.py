"""The systems that a simulation compares: the same brain with other policies."""

from dataclasses import dataclass, replace

from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
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
    scales_up: bool = False
    """More instances are started when nothing is left to drop."""


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
            "static-pp",
            OverloadConfig(policy="recompute"),
            "vLLM with pipelines: pairs of half models from the start",
            pipeline_stages=2,
            lookahead=False,
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
            "drop-autoscale",
            _DROP,
            "drop, and start instances when nothing is left to drop",
            scales_up=True,
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
) -> KunServeConfig:
    """The settings that the system's controller and agents run under."""
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
        scheduler=replace(scheduler, lookahead=system.lookahead),
        overload=system.overload,
        cluster=ClusterConfig(num_instances=num_instances),
    )


def world_of(system: SimSystem, world: WorldConfig, num_instances: int) -> WorldConfig:
    """The world as this system finds it."""
    most = max(2 * num_instances, num_instances + 1) if system.scales_up else None
    return replace(world, link_priority=system.link_priority, max_instances=most)
