"""How many microbatches decodes go in is found by timing both ways."""

import random
from collections.abc import Callable

import pytest

from kunserve.policy.batch.decode_split import AGAIN_S, BETTER, CALM, ENOUGH, DecodeSplit

RoundTime = Callable[[int, int], float]
"""Seconds of a round, by its microbatches and its decodes."""


def always(joined_s: float, parted_s: float) -> RoundTime:
    return lambda parts, _: joined_s if parts == 1 else parted_s


def breaking_even(at: int) -> RoundTime:
    """A microbatch reads for 10 ms; arithmetic makes both ways equal at that many decodes."""
    return lambda parts, num: 0.01 * parts + num / at * 0.02 / parts


class Group:
    """Rounds of decodes on a clock of their own."""

    def __init__(self, num_stages: int = 2) -> None:
        self.split, self.now_s = DecodeSplit(num_stages), 0.0
        self.ways: list[int] = []
        self.slower_s = self.all_s = 0.0
        """Of rounds of several decodes alone."""

    def round(self, num_decodes: int, seconds: RoundTime, *, is_alone: bool = True) -> int:
        """One round; its number of microbatches."""
        parts = self.split.parts(num_decodes, self.now_s)
        took_s = seconds(parts, num_decodes)
        self.now_s += took_s
        for _ in range(parts):
            self.split.note(parts, num_decodes, took_s, self.now_s, is_alone=is_alone)
        self.ways.append(parts)
        if is_alone and num_decodes > 1:
            self.all_s += took_s
            best_s = min(seconds(1, num_decodes), seconds(2, num_decodes))
            self.slower_s += took_s if took_s > 1.1 * best_s else 0.0
        return parts

    def run(self, num_rounds: int, num_decodes: int, seconds: RoundTime) -> set[int]:
        """The ways of the last rounds but the first of these."""
        for _ in range(num_rounds):
            self.round(num_decodes, seconds)
        return set(self.ways[-num_rounds // 2 :])


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_faster_way_is_found(num_stages: int) -> None:
    group = Group(num_stages)
    assert group.run(24, 6, always(0.01, 0.02)) == {1}
    assert set(group.ways) == {1, num_stages}, "and the other one was tried"
    assert Group(num_stages).run(24, 6, always(0.02, 0.01)) == {num_stages}


def test_every_number_of_decodes_has_its_own_way() -> None:
    group, seconds = Group(), breaking_even(10)
    for _ in range(40):
        for num_decodes in (2, 4, 7, 10, 14, 20, 28, 40):
            group.run(12, num_decodes, seconds)
    group.split._try, group.split._calm_until_s = None, 2.0 * group.now_s
    for num_decodes in (2, 4, 7, 14, 20, 28, 40):
        assert group.round(num_decodes, seconds) == (1 if num_decodes < 10 else 2), num_decodes


def test_a_tie_is_for_stages_side_by_side() -> None:
    assert Group().run(40, 6, always(0.01, 0.01)) == {2}
    assert Group().run(40, 6, always(0.01 * (BETTER + 0.01), 0.01)) == {2}


def test_the_other_way_is_tried_again_and_may_have_become_faster() -> None:
    group = Group()
    group.run(40, 6, always(0.01, 0.02))
    group.now_s += 2 * AGAIN_S
    assert group.run(40, 6, always(0.03, 0.02)) == {2}
    group.now_s += 2 * AGAIN_S
    assert group.run(40, 6, always(0.01, 0.02)) == {1}


def test_disturbed_rounds_are_forgotten() -> None:
    """An exchange that makes the first rounds three times as long decides nothing for long."""
    group = Group()
    for _ in range(7):
        group.round(6, always(0.03, 0.045))
    for _ in range(3):
        group.round(6, always(0.03, 0.015))
    group.now_s += 2 * AGAIN_S
    assert group.run(200, 6, always(0.01, 0.015)) == {1}


@pytest.mark.parametrize(
    ("mean_decodes", "mean_output"), [(2, 5), (2, 20), (6, 20), (6, 100), (16, 50), (60, 200)]
)
@pytest.mark.parametrize("joined_s", [0.014, 0.028])
def test_tries_take_little_however_numbers_change(
    mean_decodes: int, mean_output: int, joined_s: float
) -> None:
    """Requests come and go; the rounds of the slower way are few."""
    draw = random.Random(mean_decodes * mean_output)
    group, running, rate = Group(), mean_decodes, mean_decodes / mean_output
    seconds = always(joined_s, 0.02)
    for number in range(6000):
        running -= sum(draw.random() < 1 / mean_output for _ in range(running))
        arrived = sum(draw.random() < rate / 8 for _ in range(8))
        running += arrived
        if running:
            group.round(running, seconds, is_alone=not arrived)
        if number == 2000:
            group.slower_s = group.all_s = 0.0
    assert group.slower_s < 0.15 * group.all_s


def test_slow_rounds_are_tried_no_more_often_than_quick_ones() -> None:
    """Of a large model a round may take a second: what tries take is a share of all time."""
    group = Group(4)
    for _ in range(400):
        group.round(60, always(2.0, 0.7))
    assert group.ways[100:].count(1) * 2.0 < 3.0 / CALM * group.now_s


def test_prompts_beside_every_round_end_a_try() -> None:
    """Their rounds say nothing, and the way in force is kept for nearly all of the time."""
    group = Group()
    for _ in range(2 * ENOUGH):
        group.round(6, always(0.02, 0.01))
    for _ in range(1000):
        group.round(6, always(0.02, 0.01), is_alone=False)
        group.now_s += 0.02
    assert group.ways.count(1) < 100


def test_one_decode_is_one_microbatch() -> None:
    group = Group(4)
    assert [group.round(1, always(0.02, 0.01)) for _ in range(5)] == [1] * 5
    assert group.split._try is None
