"""Drawn bursts: their heights are in X, and X is the cluster's."""

from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.compare.comparison import compare
from kunserve_lab.compare.experiment import Experiment
from kunserve_lab.compare.settings import (
    RealSetup,
    SimulatedSetup,
    WorkloadSettings,
    digest_of,
    workload_of,
)
from kunserve_lab.compare.simulated.full_rate import full_capacity, with_full_rate
from kunserve_lab.compare.systems import find_system

BURST = WorkloadSettings(
    lengths=Path("longbench"), max_total_tokens=16384, burst_s=40.0, before_s=10.0, after_s=20.0
)
SMALL = SimulatedSetup(num_instances=2, max_num_seqs=64)


def test_x_is_what_the_cluster_sustains() -> None:
    one = with_full_rate(SMALL, BURST)
    able = full_capacity(SMALL, BURST)
    assert one.rate == pytest.approx(2 * able.full_rate, rel=1e-3)
    assert one.before_s == round(able.residence_s) > BURST.before_s, "as long as a request stays"
    assert with_full_rate(replace(SMALL, num_instances=4), BURST).rate == pytest.approx(
        2 * one.rate, rel=1e-3
    )
    faster = with_full_rate(replace(SMALL, device="h800"), BURST)
    assert faster.rate > 1.2 * one.rate
    late = replace(BURST, before_s=500.0)
    assert with_full_rate(SMALL, late).before_s == 500.0
    trace = WorkloadSettings(trace=Path("azure-2023-conv"))
    assert with_full_rate(SMALL, trace) is trace and with_full_rate(RealSetup(), trace) is trace


def test_loads_are_heights_in_x() -> None:
    asked = replace(BURST, rate=20.0, before_s=100.0, after_s=100.0, base=0.5)
    drawn = workload_of(asked, 1.5, seed=0)
    inside = [moment for moment in drawn.arrival_s if 100.0 <= moment < 140.0]
    assert len(inside) == pytest.approx(1.5 * 20 * 40, rel=0.1)
    assert len(drawn) - len(inside) == pytest.approx(0.5 * 20 * 200, rel=0.1)
    assert max(a + b for a, b in zip(drawn.input_tokens, drawn.output_tokens, strict=True)) <= 16384
    assert drawn == workload_of(asked, 1.5, seed=0) != workload_of(asked, 1.5, seed=1)
    assert "1.5 X for 40 s" in drawn.arrivals_source


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace": Path("azure-2023-conv")}, "does not go with a trace"),
        ({"turns": 3}, "does not go with a trace or with turns"),
        ({"burst_s": 0.0}, "burst_s must be above 0 and finite, not 0"),
        ({"base": float("nan")}, "base must be above 0"),
        ({"rate": 1e-9}, "no request arrives at 1e-09 requests/s"),
    ],
)
def test_mistakes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload_of(replace(BURST, **changes), 1.2, seed=0)


def test_real_instances_have_no_x() -> None:
    with pytest.raises(ConfigError, match="give a trace"):
        with_full_rate(RealSetup(), BURST)


def test_an_experiment_runs_at_x() -> None:
    few = replace(BURST, burst_s=2.0, after_s=0.5, base=0.05)
    experiment = Experiment(SMALL, few, systems=("recompute",), loads=(1.2,))
    said: list[str] = []
    (result,) = compare(experiment, say=said.append)
    drawn = workload_of(with_full_rate(SMALL, few), 1.2, seed=0)
    assert result.digest == digest_of(SMALL, find_system("recompute"), drawn)
    assert result.num_requests == len(drawn)
