"""Pages and histograms: what is read of them, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve_lab.observer.readings.change import change_of, changes_in
from kunserve_lab.observer.readings.histogram import Histogram, from_cumulative
from kunserve_lab.observer.readings.page import PageError, parse_page
from tests.lab.observer.pages import SGLANG, VLLM, reading


def test_a_page_of_vllm() -> None:
    (one,) = parse_page(VLLM, "a:8000", 5.0)
    assert (one.replica, one.kind, one.model) == ("a:8000", "vllm", "Qwen/Qwen2.5-14B")
    assert (one.num_running, one.num_waiting, one.kv_usage) == (3.0, 2.0, 0.5)
    assert (one.capacity_blocks, one.block_size, one.capacity_tokens) == (1000, 16, 16_000)
    assert one.counters == {
        "finished": 9.0, "prompt_tokens": 1000.0, "generation_tokens": 400.0, "preemptions": 7.0,
    }  # fmt: skip
    assert one.histograms["ttft"] == Histogram((0.1, 1.0), (4.0, 5.0, 1.0), 5.0)


def test_a_server_says_whether_it_caches_prefixes() -> None:
    for said, caches in (("True", True), ("False", False)):
        page = VLLM.replace("cache_dtype=", f'enable_prefix_caching="{said}",cache_dtype=')
        (one,) = parse_page(page, "a:8000", 5.0)
        assert one.caches_prefixes is caches
    (one,) = parse_page(VLLM, "a:8000", 5.0)
    assert one.caches_prefixes


def test_a_page_of_sglang() -> None:
    (one,) = parse_page(SGLANG, "a:8000", 5.0)
    assert (one.kind, one.capacity_tokens, one.kv_usage) == ("sglang", 64_000, 0.25)
    assert one.counters["finished"] == 12.0


def test_each_engine_that_counts_its_own_requests_is_a_replica() -> None:
    text = VLLM + VLLM.replace('engine="0"', 'engine="1"')
    first, second = parse_page(text, "a:8000", 5.0)
    assert (first.replica, second.replica) == ("a:8000#0", "a:8000#1")
    assert first.capacity_blocks == second.capacity_blocks == 1000


def test_engines_that_count_together_are_one_replica() -> None:
    lines = []
    for line in VLLM.splitlines():
        shared = line.startswith("vllm:request_success")
        lines += [line.replace('engine="0"', 'engine="all"')] if shared else [
            line, line.replace('engine="0"', 'engine="1"')
        ]  # fmt: skip
    (one,) = parse_page("\n".join(lines), "a:8000", 5.0)
    assert (one.capacity_blocks, one.num_running, one.kv_usage) == (2000, 6.0, 0.5)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("<html>Welcome to nginx</html>", "give a server's own address"),
        ("vllm:num_requests_running{ 3 3 3 {", "no Prometheus text"),
        (VLLM.replace("vllm:kv_cache_usage_perc", "vllm:other"), "kv_cache_usage_perc"),
        (VLLM.replace("0.5", "NaN"), "kv_cache_usage_perc"),
        (VLLM.replace("cache_config_info", "other_info"), "cache_config_info"),
        (VLLM.replace("vllm:num_requests_running", "vllm:other"), "disable-log-stats"),
        (SGLANG.replace("sglang:num_running_reqs", "sglang:other"), "enable-metrics"),
    ],
)
def test_what_is_no_such_page_is_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(PageError, match=word):
        parse_page(text, "a:8000", 5.0)


_COUNTS = st.lists(st.integers(0, 1000), min_size=4, max_size=4)


@given(_COUNTS, _COUNTS)
def test_a_histogram_never_loses_counts(before: list[int], after: list[int]) -> None:
    bounds = (1.0, 2.0, 4.0)
    one = Histogram(bounds, tuple(map(float, before)), float(sum(before)))
    two = Histogram(bounds, tuple(map(float, after)), float(sum(after)))
    added = two.since(one)
    assert min(added.counts) >= 0 and added.total >= 0
    assert added in (two, two.since(one))
    assert (one + two).since(one) == two
    for share in (0.0, 0.5, 0.99, 1.0):
        value, bracket = two.quantile(share), two.bracket(share)
        assert (value is None) == (bracket is None) == (two.count == 0)
        if value is not None and bracket is not None:
            assert 0.0 <= value <= 4.0 * 1.5
            assert bracket[0] <= bracket[1]


@given(_COUNTS.filter(any), st.integers(1, 50))
def test_draws_are_sorted_and_of_its_range(counts: list[int], number: int) -> None:
    middles = np.array([0.5, 1.5, 3.0, 5.0])
    one = Histogram((1.0, 2.0, 4.0), tuple(map(float, counts)), float(middles @ counts))
    drawn = one.draw(number)
    assert len(drawn) == number and bool((np.diff(drawn) >= 0).all())
    assert drawn[0] >= 0.0 and drawn[-1] <= 12.0


def test_buckets_that_fall_are_no_histogram() -> None:
    assert from_cumulative({1.0: 5.0, 2.0: 3.0, math.inf: 6.0}, 1.0) is None
    assert from_cumulative({}, 0.0) is None
    assert from_cumulative({1.0: 2.0, math.inf: 6.0}, 9.0) == Histogram((1.0,), (2.0, 4.0), 9.0)


def test_a_change_counts_those_who_came() -> None:
    before = reading(0.0, num_running=4.0, counters={"finished": 10.0, "prompt_tokens": 100.0})
    after = reading(1.0, num_running=6.0, counters={"finished": 13.0, "prompt_tokens": 900.0})
    change = change_of(before, after)
    assert change.num_arrived == 5
    assert change.rate("prompt_tokens") == 800.0
    assert not change.began_anew


def test_those_who_came_are_exact_in_the_sum() -> None:
    """The gauge of the second page is older than its counters: nobody is counted twice."""
    inside, finished = (4.0, 4.0, 3.0, 3.0), (10.0, 12.0, 12.0, 13.0)
    readings = [
        reading(float(at), num_running=num, counters={"finished": done})
        for at, (num, done) in enumerate(zip(inside, finished, strict=True))
    ]
    changes = changes_in(readings)
    assert [change.more for change in changes] == [2, -1, 1]
    assert [change.num_arrived for change in changes] == [2, 0, 1]


def test_a_server_that_began_anew_counts_from_nothing() -> None:
    before = reading(0.0, num_running=40.0, counters={"finished": 1000.0, "prompt_tokens": 9e5})
    after = reading(1.0, num_running=2.0, counters={"finished": 1.0, "prompt_tokens": 30.0})
    change = change_of(before, after)
    assert change.began_anew
    assert change.num_arrived == 3
    assert change.amounts == {"finished": 1.0, "prompt_tokens": 30.0}


@given(st.lists(st.tuples(st.floats(0, 50), st.sampled_from([0.0, 1.0, 5.0, 3.0])), max_size=20))
def test_changes_are_never_negative(steps: list[tuple[float, float]]) -> None:
    """Whatever the totals do, and at equal moments."""
    moment, readings = 0.0, []
    for inside, elapsed_s in steps:
        moment += elapsed_s
        totals = {"finished": inside * 2, "generation_tokens": 50 - inside}
        readings.append(reading(moment, num_running=inside, counters=totals))
    for change in changes_in(readings):
        assert change.num_arrived >= 0 and change.elapsed_s > 0
        assert all(value >= 0 for value in change.amounts.values())


def test_a_series_that_comes_or_goes_is_no_change() -> None:
    without = reading(0.0, counters={"finished": 1.0}, histograms={})
    with_more = reading(1.0, counters={"finished": 2.0, "prompt_tokens": 1e6})
    assert change_of(without, with_more).amounts == {"finished": 1.0, "prompt_tokens": 0.0}
    assert change_of(without, with_more).histograms == {}
    assert change_of(with_more, without).amounts == {"finished": 1.0}
