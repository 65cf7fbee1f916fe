"""X, the rate that loads are heights of where an experiment draws one burst."""

from dataclasses import replace

from kunserve.core.errors import ConfigError
from kunserve_lab.compare.settings import (
    RealSetup,
    SimulatedSetup,
    WorkloadSettings,
    lengths_of,
)
from kunserve_lab.compare.simulated.projection import capacity
from kunserve_lab.compare.simulated.scenario import build_scenario
from kunserve_lab.sim.fluid import Capacity
from kunserve_lab.workload.workload import Workload

NUM_LENGTHS = 4096
"""Pairs of lengths that stand for all."""
DIGITS = 4
"""Of X: rounded, because the same requests must come on every processor."""


def full_capacity(setup: SimulatedSetup, workload: WorkloadSettings) -> Capacity:
    """What an instance can do for these lengths, whatever is drawn of them."""
    lengths = lengths_of(workload, NUM_LENGTHS, seed=0)
    scenario = build_scenario(setup, Workload((0.0,) * NUM_LENGTHS, lengths, "all at once"))
    return capacity(scenario)


def with_full_rate(
    setup: SimulatedSetup | RealSetup, workload: WorkloadSettings
) -> WorkloadSettings:
    """A drawn burst with X as its ``rate``; any other workload as it is.

    It has at least so much time before the burst as a request stays in full memory: after less,
    memory would not be as full as the base rate makes it.
    """
    if workload.burst_s is None:
        return workload
    if isinstance(setup, RealSetup):
        raise ConfigError("burst_s: X is known of simulated instances only; give a trace")
    able = full_capacity(setup, workload)
    return replace(
        workload,
        rate=float(f"{able.full_rate * setup.num_instances:.{DIGITS}g}"),
        before_s=max(workload.before_s, float(round(able.residence_s))),
    )
