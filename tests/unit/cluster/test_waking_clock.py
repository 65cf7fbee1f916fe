"""Time that stands still while the front does."""

from kunserve.cluster.waking_clock import MAX_STRIDE_S, WakingClock


def test_time_passes_as_it_does_outside() -> None:
    outside = [100.0]
    clock = WakingClock(lambda: outside[0])
    began_s = clock.now_s()
    for _ in range(50):
        outside[0] += 0.1
        clock.now_s()
    assert abs(clock.now_s() - began_s - 5.0) < 1e-6


def test_a_pause_counts_as_one_stride() -> None:
    outside = [100.0]
    clock = WakingClock(lambda: outside[0])
    began_s = clock.now_s()
    outside[0] += 3600.0
    assert clock.now_s() - began_s == MAX_STRIDE_S
    assert clock.now_s() - began_s == MAX_STRIDE_S
