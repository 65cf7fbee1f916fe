"""Small simulated worlds that take a second or less to run."""

from dataclasses import replace
from typing import Any

from kunserve.core.config import SchedulerConfig
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import System, find_system
from kunserve_lab.sim.costs import profile_times
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import InstanceProfile, gpu_profile
from kunserve_lab.workload.workload import Lengths, Workload

GEMMA = "gemma-3-27b-it"
"""With windows by layer."""


def small_profile(pool_tokens: int = 20_000, model: str = "Qwen2.5-14B") -> InstanceProfile:
    """A model on one A800 with so little KV memory that a burst overflows it."""
    profile = gpu_profile(find_model(model), find_device("a800"))
    spec = profile.spec
    kv_units = pool_tokens // spec.block_size * spec.num_layers
    memory = spec.memory_bytes + (kv_units - spec.kv_units) * spec.unit_bytes
    return replace(profile, spec=replace(spec, kv_units=kv_units, memory_bytes=memory))


def burst(num: int, gap_s: float, tokens: tuple[int, int] = (1000, 200)) -> Workload:
    """Requests of one size, evenly spaced."""
    lengths = Lengths((tokens[0],) * num, (tokens[1],) * num, "fixed")
    return Workload(tuple(i * gap_s for i in range(num)), lengths, "even")


def scenario(
    workload: Workload, num_instances: int = 2, profile: InstanceProfile | None = None, **more: Any
) -> Scenario:
    """A cluster of small instances."""
    made = small_profile() if profile is None else profile
    cost = profile_times(made.times, made.spec.num_layers, 2048)
    limits = SchedulerConfig(256, 2048)
    return Scenario(made, num_instances, workload, limits, cost=cost, **more)


def run(system: str | System, world: Scenario, **more: Any) -> SimResult:
    """Simulate a system, or the one of that name."""
    made = find_system(system) if isinstance(system, str) else system
    return simulate(made, world, **more)
