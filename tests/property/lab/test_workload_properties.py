"""What holds for every workload: order, determinism, and what scaling keeps."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kunserve_lab.workload.arrivals import gamma_arrivals
from kunserve_lab.workload.bursty import bursty_arrivals
from kunserve_lab.workload.lengths import burstgpt_lengths, clip_total, random_lengths
from kunserve_lab.workload.transform import scale_time, thin, upscale, upscale_whole, window
from kunserve_lab.workload.workload import Lengths, Workload

SEEDS = st.integers(0, 2**32)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    moments = draw(st.lists(st.floats(0, 1e4, allow_nan=False), min_size=1, max_size=60))
    count = len(moments)
    return Workload(
        tuple(sorted(moments)),
        Lengths(tuple(range(1, count + 1)), tuple(range(count, 0, -1)), "numbered"),
        "drawn",
    )


@given(st.integers(0, 300), st.floats(0.01, 1e4), st.floats(0.05, 20), SEEDS)
def test_gamma_arrivals_are_ordered_counted_and_repeatable(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    arrivals = gamma_arrivals(count, rate, burstiness, seed)
    assert len(arrivals) == count
    assert list(arrivals) == sorted(arrivals)
    assert all(0 <= moment <= count / rate * (1 + 1e-9) for moment in arrivals)
    assert arrivals == gamma_arrivals(count, rate, burstiness, seed)


@given(st.floats(1, 700), st.floats(0.05, 20), st.floats(0.1, 4), SEEDS)
def test_bursty_arrivals_stay_in_their_window(
    duration_s: float, rate: float, burstiness: float, seed: int
) -> None:
    arrivals = bursty_arrivals(duration_s, rate, seed, burstiness)
    assert list(arrivals) == sorted(arrivals)
    assert all(0 <= moment <= duration_s for moment in arrivals)
    assert arrivals == bursty_arrivals(duration_s, rate, seed, burstiness)


@given(workloads(), st.floats(0.05, 6), SEEDS)
def test_upscaling_keeps_the_pattern_and_the_count_rule(
    workload: Workload, factor: float, seed: int
) -> None:
    scaled = upscale(workload, factor, seed)
    assert scaled == upscale(workload, factor, seed)
    assert len(scaled) <= len(workload)
    assert scaled.lengths.input_tokens == workload.lengths.take(len(scaled)).input_tokens
    whole = Counter(upscale_whole(workload, factor, seed).arrival_s)
    original = Counter(workload.arrival_s)
    low = int(factor)
    high = low if factor == low else low + 1
    for moment, count in original.items():
        assert low * count <= whole[moment] <= high * count
    assert set(whole) <= set(original)
    assert scaled.arrival_s == upscale_whole(workload, factor, seed).arrival_s[: len(workload)]


@given(workloads(), st.floats(0.01, 1), st.floats(0.01, 1), SEEDS)
def test_thinning_keeps_pairs_order_and_nests(
    workload: Workload, one: float, other: float, seed: int
) -> None:
    small, large = sorted((one, other))
    requests = {request[1:] for request in workload.requests()}
    kept_small = {request[1:] for request in thin(workload, small, seed).requests()}
    kept_large = {request[1:] for request in thin(workload, large, seed).requests()}
    assert kept_small <= kept_large <= requests
    assert thin(workload, 1.0, seed) is workload


@given(workloads(), st.floats(0.01, 100))
def test_time_scaling_keeps_everything_but_the_clock(workload: Workload, factor: float) -> None:
    scaled = scale_time(workload, factor)
    assert scaled.lengths == workload.lengths
    assert scaled.arrival_s == tuple(moment * factor for moment in workload.arrival_s)


@given(workloads(), st.floats(1, 1e4))
def test_two_windows_part_a_workload(workload: Workload, cut_s: float) -> None:
    numbers: list[int] = []
    for start_s, end_s in ((0.0, cut_s), (cut_s, 2e4)):
        inside = [moment for moment in workload.arrival_s if start_s <= moment < end_s]
        if inside:
            part = window(workload, start_s, end_s)
            assert len(part) == len(inside)
            numbers += part.input_tokens
    assert tuple(numbers) == workload.input_tokens


@given(st.integers(1, 200), SEEDS)
def test_lengths_are_repeatable_and_fit(count: int, seed: int) -> None:
    drawn = burstgpt_lengths(count, seed)
    assert drawn == burstgpt_lengths(count, seed)
    clipped = clip_total(drawn, 1000)
    pairs = zip(clipped.input_tokens, clipped.output_tokens, strict=True)
    assert all(inputs + outputs <= 1000 for inputs, outputs in pairs)
    assert random_lengths(count, 9, 9, 0.9, seed) == random_lengths(count, 9, 9, 0.9, seed)
