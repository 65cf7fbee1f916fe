"""Arrival processes keep their rate, and their burstiness."""

import numpy as np
import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.workload.arrivals import (
    constant_arrivals,
    gamma_arrivals,
    immediate_arrivals,
    modulated_arrivals,
)
from kunserve_lab.workload.bursty import SPIKES, bursty_arrivals, bursty_workload, peak_over_mean
from kunserve_lab.workload.summary import arrivals_per_bin, summarize


def variation(arrival_s: tuple[float, ...]) -> float:
    gaps = np.diff(arrival_s)
    return float(gaps.std() / gaps.mean())


def test_constant_and_immediate() -> None:
    assert constant_arrivals(4, 2.0) == (0.0, 0.5, 1.0, 1.5)
    assert immediate_arrivals(3) == (0.0, 0.0, 0.0)


def test_the_mean_rate_is_the_one_asked_for() -> None:
    for burstiness in (0.2, 1.0, 5.0):
        arrivals = gamma_arrivals(500, 4.0, burstiness, seed=3)
        assert arrivals[-1] == pytest.approx(125.0)


def test_burstiness_is_the_inverse_of_squared_variation() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        arrivals = gamma_arrivals(40_000, 10.0, burstiness, seed=1)
        assert variation(arrivals) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert gamma_arrivals(5, 2.0, float("inf"), seed=1) == constant_arrivals(5, 2.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="request rate"):
        gamma_arrivals(10, rate, 1.0, seed=0)


def test_an_impossible_burstiness_is_refused() -> None:
    with pytest.raises(ConfigError, match="burstiness"):
        gamma_arrivals(10, 1.0, 0.0, seed=0)


def test_a_modulated_process_has_its_rate_in_every_span() -> None:
    times, rates = np.array([0.0, 1000.0, 1500.0, 4000.0]), np.array([2.0, 20.0, 0.0])
    arrivals = np.array(modulated_arrivals(times, rates, 0.5, seed=2))
    counts = np.histogram(arrivals, times)[0]
    assert counts[0] == pytest.approx(2000, rel=0.1)
    assert counts[1] == pytest.approx(10_000, rel=0.05)
    assert counts[2] == 0


@pytest.mark.parametrize("burstiness", [0.05, 0.1, 0.5, 1.0, 4.0])
def test_the_mean_count_is_what_the_rates_say_from_the_start_on(burstiness: float) -> None:
    """A process that begins with an arrival has too many at first: 110 of 100 at 0.05."""
    times, rates = np.array([0.0, 5.0, 100.0]), np.array([1.0, 1.0])
    counts = np.array(
        [
            np.histogram(modulated_arrivals(times, rates, burstiness, seed), times)[0]
            for seed in range(1500)
        ]
    )
    errors = counts.std(axis=0) / 1500**0.5
    assert abs(counts[:, 0].mean() - 5.0) < 4 * errors[0]
    assert abs(counts[:, 1].mean() - 95.0) < 4 * errors[1]


def test_the_bursty_window_has_two_spikes_of_the_stated_height() -> None:
    arrivals = np.array(bursty_arrivals(640.0, 100.0, seed=0))
    assert len(arrivals) == pytest.approx(64_000, rel=0.03)
    base = np.histogram(arrivals, [100.0, 400.0])[0][0] / 300
    first = np.histogram(arrivals, [45.0, 90.0])[0][0] / 45
    second = np.histogram(arrivals, [415.0, 480.0])[0][0] / 65
    assert first / base == pytest.approx(3.5, rel=0.05)
    assert second / base == pytest.approx(4.5, rel=0.05)
    assert 2.8 < peak_over_mean() < 3.0


def test_a_shorter_window_keeps_the_shape() -> None:
    arrivals = np.array(bursty_arrivals(64.0, 1000.0, seed=0))
    spike = SPIKES[1]
    inside = (arrivals >= spike.start * 64) & (arrivals < spike.end * 64)
    assert inside.sum() / (6.5 * 1000) == pytest.approx(peak_over_mean(), rel=0.05)


def test_the_bursty_workload_says_that_it_is_synthetic() -> None:
    workload = bursty_workload(60.0, 2.0, seed=0)
    assert "synthetic" in workload.provenance and "BurstGPT" in workload.provenance
    with pytest.raises(ConfigError, match="finite request rate"):
        bursty_workload(60.0, float("inf"), seed=0)
    with pytest.raises(ConfigError, match="duration"):
        bursty_workload(0.0, 1.0, seed=0)


def test_summary_finds_the_peak() -> None:
    workload = bursty_workload(640.0, 10.0, seed=1)
    summary = summarize(workload, bin_s=10.0)
    assert summary.mean_rate == pytest.approx(10.0, rel=0.1)
    assert 2.5 < summary.peak_over_mean < 4.5
    assert sum(arrivals_per_bin(workload.arrival_s, 10.0)) == len(workload)
    assert arrivals_per_bin((), 1.0) == ()


def test_a_short_workload_has_its_mean_as_its_peak() -> None:
    summary = summarize(bursty_workload(5.0, 10.0, seed=1), bin_s=10.0)
    assert summary.peak_rate == summary.mean_rate and summary.peak_over_mean == 1.0
