"""Who makes way for the head of the queue, and who comes back when."""

import pytest

from kunserve.policy.batch.parking import (
    RETURN_STEPS,
    Away,
    Decoding,
    choose_in_place,
    choose_parked,
    num_due,
    room_for,
)

MAX_S = 10.0


def decode(blocks: int = 10, streamed: int = 50, parked: int = 0, ran_s: float = 20.0) -> Decoding:
    return Decoding(blocks, streamed, parked, ran_s)


def park(decodes: list[Decoding], missing: int, room: int = 1000) -> list[int]:
    return choose_parked(decodes, missing, room, MAX_S)


def test_who_has_streamed_most_goes_first() -> None:
    assert park([decode(streamed=5), decode(streamed=80), decode(streamed=70)], 15) == [1, 2]


def test_nobody_goes_twice_before_the_others_went() -> None:
    assert park([decode(streamed=500, parked=1), decode(streamed=1)], 5) == [1]


def test_nobody_goes_who_has_just_begun_or_come_back() -> None:
    assert park([decode(ran_s=4.9), decode(ran_s=5.0, streamed=1)], 5) == [1]
    assert park([decode(ran_s=4.9)], 5) == []


def test_nobody_goes_where_it_gains_no_first_token() -> None:
    assert park([decode(), decode()], 21) == []
    assert park([decode(), decode()], 20, room=19) == []
    assert sorted(park([decode(), decode()], 20, room=20)) == [0, 1]


def test_nobody_goes_who_is_not_needed() -> None:
    assert park([decode(blocks=3, streamed=90), decode(blocks=12)], 12) == [1]


def test_who_is_due_gets_the_place_of_whoever_has_run_longest() -> None:
    young = [decode(ran_s=1.0), decode(ran_s=2.0), decode(ran_s=0.5)]
    assert choose_in_place(young, 15, MAX_S) == [1, 0]
    assert choose_in_place([*young, decode(blocks=30)], 15, MAX_S) == [3], "it has run long enough"
    assert choose_in_place(young, 31, MAX_S) == []


@pytest.mark.parametrize(
    ("away", "due"),
    [
        ([], 0),
        ([(8.9, 0.0), (8.0, 0.0)], 0),
        ([(9.0, 0.0), (8.0, 0.0)], 1),
        ([(8.0, 0.5), (8.0, 0.0)], 2),
        ([(7.0, 0.5), (7.0, 0.5), (7.0, 0.5)], 3),
        ([(7.0, 0.5), (5.0, 0.5)], 0),
    ],
)
def test_copies_of_all_before_it_are_in_time(away: list[tuple[float, float]], due: int) -> None:
    assert num_due([Away(*one) for one in away], 1.0 / RETURN_STEPS, MAX_S) == due


def test_as_much_may_be_parked_as_memory_and_the_host_hold() -> None:
    assert room_for(100, 20, None, 1e3, MAX_S) == 80
    assert room_for(100, 20, 25, 1e3, MAX_S) == 5
    assert room_for(100, 120, None, 1e3, MAX_S) == 0


def test_over_a_slow_link_little_is_parked() -> None:
    assert room_for(100, 0, None, 2.0, MAX_S) == 5, "out and back within half the longest pause"
