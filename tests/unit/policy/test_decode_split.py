"""How many microbatches decodes go in is found by trials."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from kunserve.policy.decode_split import AGAIN_S, ROUNDS, SKIPPED_ROUNDS, TURNS, DecodeSplit

RoundTime = Callable[[int, int], float]
"""Seconds of a round, by its microbatches and its decodes."""


def reads_once(breaks_even: int) -> RoundTime:
    """A microbatch reads for a second; arithmetic makes both ways equal at that many decodes."""

    def seconds(parts: int, num_decodes: int) -> float:
        return 1.0 * parts + num_decodes / breaks_even * (2.0 / parts)

    return seconds


def run(split: DecodeSplit, num_decodes: int, seconds: RoundTime, num_rounds: int, now_s: float):
    """Undisturbed rounds; the parts of each, and the time."""
    ways = []
    for _ in range(num_rounds):
        parts = split.parts(num_decodes, now_s)
        ways.append(parts)
        now_s += seconds(parts, num_decodes)
        for _ in range(parts):
            split.note(parts, num_decodes, seconds(parts, num_decodes), now_s)
    return ways, now_s


TRIAL = 2 * TURNS * (ROUNDS + SKIPPED_ROUNDS)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_faster_way_is_found_by_one_trial(num_stages: int) -> None:
    for num_decodes, expected in ((4, 1), (40, num_stages)):
        split = DecodeSplit(num_stages)
        faster_joined = num_decodes == 4

        def seconds(parts: int, _: int, joined: bool = faster_joined) -> float:
            return 1.0 if (parts == 1) == joined else 2.0

        ways, now_s = run(split, num_decodes, seconds, TRIAL, 0.0)
        assert set(ways) == {1, num_stages}, "a trial has rounds of both ways"
        later, _ = run(split, num_decodes, seconds, 5, now_s)
        assert set(later) == {expected}


def test_what_was_found_holds_for_fewer_and_for_more() -> None:
    split, seconds = DecodeSplit(2), reads_once(10)
    _, now_s = run(split, 4, seconds, TRIAL, 0.0)
    _, now_s = run(split, 20, seconds, TRIAL, now_s)
    split._ask_at_s = now_s + 1e6
    assert [split.parts(num, now_s) for num in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert [split.parts(num, now_s) for num in (20, 30, 200)] == [2, 2, 2]


def test_bisection_ends_at_the_number_where_ways_break_even() -> None:
    """Whatever number of decodes comes, after some trials each goes the faster way."""
    split, seconds, now_s = DecodeSplit(2), reads_once(10), 0.0
    for num_decodes in (30, 2, 16, 8, 11, 9, 10, 7, 12):
        _, now_s = run(split, num_decodes, seconds, TRIAL, now_s)
    split._ask_at_s = now_s + 1e6
    for num_decodes in range(1, 40):
        joined_s, parted_s = seconds(1, num_decodes), seconds(2, num_decodes)
        if joined_s < 0.95 * parted_s:
            assert split.parts(num_decodes, now_s) == 1, num_decodes
        if joined_s > 1.05 * parted_s:
            assert split.parts(num_decodes, now_s) == 2, num_decodes


def test_a_verdict_is_asked_for_again_and_may_be_wrong() -> None:
    split = DecodeSplit(2)
    _, now_s = run(split, 6, lambda parts, _: float(parts), TRIAL, 0.0)
    assert split.most_joined == 6
    slower_joined: RoundTime = lambda parts, _: 3.0 - parts  # noqa: E731
    ways, now_s = run(split, 6, slower_joined, 3, now_s)
    assert set(ways) == {1}, "not asked yet"
    ways, now_s = run(split, 6, slower_joined, TRIAL, now_s + 2 * AGAIN_S)
    assert set(ways) == {1, 2}
    assert split.most_joined == 5
    ways, _ = run(split, 6, slower_joined, 3, now_s)
    assert set(ways) == {2}


def test_a_verdict_that_stands_is_asked_for_ever_more_seldom() -> None:
    split, now_s, asked = DecodeSplit(2), 0.0, []
    for _ in range(4000):
        before = split._trial
        _, now_s = run(split, 6, lambda parts, _: 0.01 * parts, 1, now_s)
        if before is None and split._trial is not None:
            asked.append(now_s)
        now_s += 0.05
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert len(gaps) >= 3
    assert all(later > 1.2 * earlier for earlier, later in pairwise(gaps[:3]))


def test_a_tie_is_for_stages_side_by_side() -> None:
    split = DecodeSplit(2)
    _, now_s = run(split, 6, lambda parts, _: 1.0, TRIAL, 0.0)
    assert split.parts(6, now_s) == 2


def test_another_number_of_decodes_ends_a_trial_and_begins_its_own() -> None:
    split = DecodeSplit(2)
    _, now_s = run(split, 8, reads_once(10), TRIAL - 2, 0.0)
    _, now_s = run(split, 30, reads_once(10), 2, now_s)
    assert split.most_joined == 1, "the first trial has no verdict"
    _, now_s = run(split, 30, reads_once(10), TRIAL - 2, now_s)
    assert split.parts(30, now_s) == 2
    assert split.parts(8, now_s) == 1, "and here the next one begins"


def test_rounds_beside_prompts_count_for_nothing() -> None:
    """The turn's round begins anew: what prompts delayed is not held against a way."""
    split, now_s = DecodeSplit(2), 0.0
    for _ in range(100):
        assert split.parts(6, now_s) == 1
        split.note(1, 6, 99.0, now_s)
        split.interrupt()
        now_s += 0.1
    assert split._trial is not None and not split._trial.seconds


def test_one_decode_needs_no_trial() -> None:
    split = DecodeSplit(4)
    assert [split.parts(1, 100.0 * step) for step in range(5)] == [1] * 5
