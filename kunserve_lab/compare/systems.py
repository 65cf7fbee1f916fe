"""The systems that are compared, each with its configuration in either world."""

import dataclasses
from dataclasses import dataclass, replace

from kunserve.core.config import (
    ClusterConfig,
    DispatchPolicy,
    OverloadConfig,
)
from kunserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class System:
    """One column of a comparison: the same brain under other policies.

    The simulated world takes every setting as it stands. The real world turns them into flags of
    ``kunserve serve`` (`serve_flags`); some settings exist in the simulated world only.
    """

    name: str
    overload: OverloadConfig
    description: str
    link_priority: bool = True
    """Whether activations pass bulk transfers on the links."""
    lookahead: bool = True
    """Whether pipelines form microbatches of equal predicted time."""
    pipeline_stages: int = 1
    """Groups of so many instances from the start; 1 is none."""
    autoscales: bool = False
    """Up to twice the instances are started under overload, and given back after it."""
    dispatch: DispatchPolicy = "soonest"
    """Which group a request is sent to."""
    tpot_slo_s: float | None = None
    """``SchedulerConfig.tpot_slo_s``."""
    caches_prefixes: bool = True
    """``SchedulerConfig.enable_prefix_caching``."""
    knows_prefixes: bool = True
    """``ClusterConfig.prefix_aware_dispatch``."""
    memory_factor: float = 1.0
    """Memory of each instance as a multiple of what the others have."""
    shares_weights: bool = False
    """All instances of the machine have one copy of the weights, so there is nothing to drop."""
    keeps_ring: bool = False
    """``InstanceConfig.kv_ring``, for models with windows by layer; it goes without a cache of
    prefixes."""
    reserves_prompts: bool = True
    """``SchedulerConfig.scheduler_reserve_full_isl``."""
    max_num_queued_reqs: int | None = None
    """``ServerConfig.max_num_queued_reqs``; None: that of the setup."""
    hides_host_copies: bool = True
    """Whether copies of parked and swapped KV run beside steps, as in InferCept. The engines'
    bodies make steps wait for them."""
    joined_instances: int = 1
    """So many instances are one under tensor parallelism, with the memory and compute of all."""

    @property
    def drops(self) -> bool:
        """Whether the system may drop layers."""
        return self.overload.policy == "drop"

    @property
    def is_baseline(self) -> bool:
        """Whether the system never drops layers, and has no more memory than the others."""
        return not self.drops and self.memory_factor == 1.0


_DROP = OverloadConfig(policy="drop")

SYSTEMS = {
    system.name: system
    for system in (
        System(
            "recompute",
            OverloadConfig(policy="recompute"),
            "vLLM: the last to come is thrown out and computed again",
        ),
        System(
            "recompute-rr",
            OverloadConfig(policy="recompute"),
            "recompute, and requests go round robin: plain replicas behind a plain balancer",
            dispatch="round-robin",
        ),
        System(
            "recompute-least",
            OverloadConfig(policy="recompute"),
            "recompute, and each request goes to the least loaded replica at once, as vLLM's own "
            "balancer and most routers have it",
            dispatch="least-load",
        ),
        System(
            "recompute-chunk",
            OverloadConfig(policy="recompute"),
            "recompute, and a request is admitted when its first chunk fits: vLLM with "
            "--no-scheduler-reserve-full-isl",
            reserves_prompts=False,
        ),
        System(
            "tp-pairs",
            OverloadConfig(policy="recompute"),
            "recompute, and pairs of instances are one under tensor parallelism: a copy of the "
            "weights for two",
            joined_instances=2,
        ),
        System(
            "endless",
            OverloadConfig(policy="recompute"),
            "recompute in five times the memory, which never fills: the bound",
            memory_factor=5.0,
        ),
        System(
            "shared",
            OverloadConfig(policy="recompute"),
            "recompute, and one copy of the weights for all instances, which one machine can have",
            shares_weights=True,
        ),
        System(
            "swap",
            OverloadConfig(policy="swap"),
            "InferCept: the last to come waits in host memory; copies hide behind steps",
        ),
        System(
            "park",
            OverloadConfig(policy="park"),
            "long answers pause in host memory so that whoever waits gets a first token",
        ),
        System(
            "static-pp",
            OverloadConfig(policy="recompute"),
            "vLLM with pipelines: pairs of half models from the start",
            pipeline_stages=2,
            lookahead=False,
        ),
        System(
            "migrate",
            OverloadConfig(policy="migrate"),
            "Llumnix: running requests move to the freest instance, KV and all",
        ),
        System("drop", _DROP, "KunServe: layers are dropped in a burst and restored after it"),
        System(
            "recompute-ring",
            OverloadConfig(policy="recompute"),
            "recompute, and KV of layers with a window is written over when it is not read again",
            caches_prefixes=False,
            keeps_ring=True,
        ),
        System(
            "drop-ring",
            _DROP,
            "drop, and KV as recompute-ring keeps it",
            caches_prefixes=False,
            keeps_ring=True,
        ),
        System(
            "drop-rr",
            _DROP,
            "drop, and requests go round robin",
            dispatch="round-robin",
        ),
        System(
            "drop-tpot",
            _DROP,
            "drop, and a next token may wait 0.8 s while prompts queue",
            tpot_slo_s=0.8,
        ),
        System(
            "drop-deep",
            replace(_DROP, min_deep_gain=0.0, max_queue_per_gain=1e9),
            "drop into groups of any depth, as the paper's Algorithm 1",
        ),
        System(
            "drop-pairs",
            replace(_DROP, max_group_size=2),
            "drop, and no more than two instances share a copy",
        ),
        System(
            "drop-park",
            replace(_DROP, park_behind_drop=True),
            "drop, and park where nothing is left to drop",
        ),
        System(
            "drop-tpot-park",
            replace(_DROP, park_behind_drop=True),
            "drop-tpot and drop-park",
            tpot_slo_s=0.8,
        ),
        System(
            "autoscale",
            OverloadConfig(policy="recompute"),
            "recompute, and start instances when memory is short; they are given back later",
            autoscales=True,
        ),
        System(
            "drop-autoscale",
            _DROP,
            "drop, and start instances when nothing is left to drop; they are given back later",
            autoscales=True,
        ),
    )
}


_FLAGS = {
    "policy": "--overload-policy",
    "restore_below": "--restore-below",
    "dwell_s": "--dwell",
    "restore_hold_s": "--restore-hold",
    "min_deep_gain": "--min-deep-gain",
    "max_group_size": "--max-group-size",
    "max_queue_per_gain": "--max-queue-per-gain",
    "max_park_s": "--max-park-s",
    "park_behind_drop": "--park-behind-drop",
}
"""Fields of `OverloadConfig` that ``kunserve serve`` has a flag for."""


def find_system(name: str) -> System:
    """The system of that name."""
    system = SYSTEMS.get(name)
    if system is None:
        raise ConfigError(f"no system {name!r} to compare; there are: {', '.join(SYSTEMS)}")
    return system


def is_baseline(name: str) -> bool:
    """Whether the system of that name is one to be better than. A name of an older file may be
    gone.
    """
    system = SYSTEMS.get(name)
    return not name.startswith("drop") if system is None else system.is_baseline


def check_parts(system: System, num_instances: int) -> None:
    """Raise ConfigError if so many instances do not make the system's groups."""
    size = system.pipeline_stages * system.joined_instances
    if num_instances % size:
        raise ConfigError(
            f"{system.name} makes groups of {size} instances, and {num_instances} cannot be "
            "parted so"
        )


def serve_flags(system: System) -> tuple[str, ...]:
    """The flags of ``kunserve serve`` that make this system.

    `System.memory_factor` has no flag of its own: `real.serve_arguments` multiplies the memory, as
    it joins instances.
    Raises ConfigError for what ``kunserve serve`` cannot do.
    """
    missing = _simulated_only(system)
    if missing:
        real = ", ".join(one.name for one in SYSTEMS.values() if not _simulated_only(one))
        raise ConfigError(
            f"{system.name} needs {missing[0]}, which only the simulated world has; "
            f"real systems are: {real}"
        )
    flags = [_FLAGS["policy"], system.overload.policy]
    for name, value in _changed(system.overload).items():
        flags += [_FLAGS[name]] if value is True else [_FLAGS[name], str(value)]
    if not system.lookahead:
        flags.append("--no-lookahead")
    if system.tpot_slo_s is not None:
        flags += ["--tpot-slo", str(system.tpot_slo_s)]
    if system.dispatch != ClusterConfig().dispatch_policy:
        flags += ["--dispatch-policy", system.dispatch]
    if not system.caches_prefixes:
        flags.append("--no-enable-prefix-caching")
    if system.keeps_ring:
        flags.append("--no-disable-hybrid-kv-cache-manager")
    if not system.knows_prefixes:
        flags.append("--no-prefix-aware-dispatch")
    if not system.reserves_prompts:
        flags.append("--no-scheduler-reserve-full-isl")
    if system.max_num_queued_reqs is not None:
        flags += ["--max-num-queued-reqs", str(system.max_num_queued_reqs)]
    if system.joined_instances > 1:
        flags += ["--tensor-parallel-size", str(system.joined_instances)]
    if system.pipeline_stages > 1:
        flags += ["--pipeline-parallel-size", str(system.pipeline_stages)]
    return tuple(flags)


def _simulated_only(system: System) -> list[str]:
    """What of the system ``kunserve serve`` cannot do."""
    asked = (
        ("links without priority", not system.link_priority),
        ("instances ordered under overload", system.autoscales),
        ("a choice how KV goes to host memory", not system.hides_host_copies),
    )
    unknown = [f"overload.{name}" for name in _changed(system.overload) if name not in _FLAGS]
    return [what for what, is_asked in asked if is_asked] + unknown


def _changed(overload: OverloadConfig) -> dict[str, object]:
    """The settings that are not the default, without the policy."""
    fields = {field.name: field.default for field in dataclasses.fields(OverloadConfig)}
    del fields["policy"]
    return {
        name: getattr(overload, name)
        for name, default in fields.items()
        if getattr(overload, name) != default
    }
