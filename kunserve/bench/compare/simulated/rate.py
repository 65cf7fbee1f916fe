"""A rate."""

from kunserve.bench.compare.settings import SimulatedSetup, WorkloadSettings


def filling_rate(setup: SimulatedSetup, workload: WorkloadSettings) -> float:
    return workload.rate
