"""The rate at which a simulated cluster's memory fills, from step times alone."""

from pathlib import Path
from typing import Any

import pytest

from kunserve_lab.compare.settings import SimulatedSetup, WorkloadSettings, workload_of
from kunserve_lab.compare.simulated.rate import filling_rate
from kunserve_lab.compare.simulated.scenario import build_scenario


def rate(window_s: float = 400.0, lengths: str = "longbench", **setup: Any) -> float:
    few = WorkloadSettings(
        duration_s=100.0, rate=2.0, lengths=Path(lengths), max_total_tokens=32768
    )
    scenario = build_scenario(SimulatedSetup(**setup), workload_of(few, 1.0, seed=0))
    return filling_rate(scenario, window_s)


def test_the_rate_follows_the_cluster() -> None:
    assert 2.0 < rate() < 3.5  # eight A800 overflow at 2.6 requests/s (simulated)
    assert rate(num_instances=16) == pytest.approx(2 * rate(), rel=0.03)
    assert rate(device="h800") > 1.3 * rate()


def test_the_rate_follows_the_requests() -> None:
    assert rate(lengths="sharegpt") > 2 * rate()
    assert rate(window_s=640.0) < rate()
    assert rate(window_s=1.0) == rate(window_s=0.1) < 2 * rate()
