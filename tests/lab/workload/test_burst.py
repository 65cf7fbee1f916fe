"""The burst of a workload: where it is, how high it is, what it comes after."""

import numpy as np
import pytest

from kunserve_lab.workload.burst import find_burst
from kunserve_lab.workload.workload import Lengths, Workload


def workload(times: list[float], outputs: list[int] | None = None) -> Workload:
    count = len(times)
    answers = [100] * count if outputs is None else outputs
    return Workload(tuple(times), Lengths((100,) * count, tuple(answers), "told"), "told")


def even(rate: float, start_s: float, end_s: float) -> list[float]:
    return np.arange(start_s, end_s, 1 / rate).tolist()


def test_a_burst_is_found_where_it_is() -> None:
    burst = find_burst(workload(even(1, 0, 100) + even(8, 100, 130) + even(1, 130, 200)), 4.0)
    assert burst is not None
    assert burst.start_s == pytest.approx(100, abs=1)
    assert burst.length_s == pytest.approx(30, abs=1)
    assert burst.rate == pytest.approx(8, rel=0.05)
    assert burst.base_rate == pytest.approx(1, rel=0.05)


def test_of_two_bursts_the_greater_excess_counts() -> None:
    times = even(1, 0, 60) + even(9, 60, 70) + even(1, 70, 140) + even(6, 140, 180)
    burst = find_burst(workload(times), 4.0)
    assert burst is not None and burst.start_s == pytest.approx(140, abs=1)


def test_a_short_lull_does_not_end_a_burst() -> None:
    times = even(1, 0, 60) + even(8, 60, 80) + even(1, 80, 84) + even(8, 84, 104)
    burst = find_burst(workload(times), 4.0)
    assert burst is not None and burst.length_s == pytest.approx(44, abs=1)


def test_longer_requests_weigh_more() -> None:
    times = even(2, 0, 100)
    outputs = [10 if moment < 50 or moment > 70 else 400 for moment in times]
    burst = find_burst(workload(times, outputs), 4.0)
    assert burst is not None
    assert burst.start_s == pytest.approx(50, abs=1) and burst.length_s == pytest.approx(20, abs=1)
    assert burst.rate > 4.0 > burst.base_rate


def test_a_burst_at_the_start_comes_after_what_follows() -> None:
    burst = find_burst(workload(even(8, 0, 20) + even(1, 20, 100)), 4.0)
    assert burst is not None
    assert burst.start_s == 0.0 and burst.base_rate == pytest.approx(1, rel=0.1)


def test_one_moment_is_no_burst() -> None:
    assert find_burst(workload([]), 4.0) is None
    assert find_burst(workload([3.0]), 4.0) is None
    assert find_burst(workload([3.0] * 9), 4.0) is None


def test_a_clump_has_a_length() -> None:
    burst = find_burst(workload([0.0, 100.0, 100.0, 100.0, 200.0]), 4.0)
    assert burst is not None and burst.length_s > 0 and np.isfinite(burst.rate)
