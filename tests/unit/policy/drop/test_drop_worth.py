import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.drop.plan import DropPlan, Limits, Standing, Wanted
from kunserve.policy.drop.worth import LITTLE, Queue, deepest_worth, plan_worth, unplaced_blocks
from tests.unit.policy.drop.plans import FIRST_ID
from tests.unit.policy.drop.test_drop_plan import pipeline, shape, spec, whole

FOUR = [whole(i) for i in range(1, 5)]
SPECS = {layout.leader: spec(layout.leader) for layout in FOUR}
PAIRS, ALL = 198, 299
"""Blocks that two pairs free of these four instances, and that one pipeline of four frees."""


def worth(
    required: int,
    unplaced: int,
    most: float = 1.0,
    size: int | None = None,
    capacity_blocks: int = 400,
    prompt_share: float = 1.0,
) -> DropPlan:
    standing = Standing(FOUR, SPECS, FIRST_ID)
    queue = Queue(unplaced, capacity_blocks, prompt_share, most)
    return plan_worth(standing, Wanted(required), Limits(max_group_size=size), queue)


def test_what_fits_into_the_freed_memory_is_worth_a_drop():
    assert worth(1000, 0).gain_blocks == ALL
    assert shape(worth(50, 50)) == [[1, 2]]
    assert len(worth(PAIRS, PAIRS).merges) == 2


def test_a_queue_longer_than_what_pairs_free_waits_for_compute():
    found = worth(1000, PAIRS + 1)
    assert not found.merges and not found.enough
    assert found.obstacle is not None and f"{PAIRS + 1} blocks" in found.obstacle
    assert worth(1000, 2 * PAIRS, most=2.0).merges
    assert worth(1000, 10**9, most=math.inf).gain_blocks == ALL


def test_deeper_than_pairs_only_while_nothing_waits_behind_them():
    assert shape(worth(1000, PAIRS)) == [[1, 2, 3, 4]], "all that waits fits into pairs"
    assert shape(worth(1000, PAIRS + 10, most=1.1)) == [[1, 2, 3, 4]], "a tenth of what fours add"
    assert [len(found) for found in shape(worth(1000, PAIRS + 11, most=1.1))] == [2, 2]
    assert shape(worth(50, PAIRS + 11, most=1.1)) == [[1, 2]], "no more than is needed"


@pytest.mark.parametrize(
    ("prompt_share", "unplaced", "deepest"),
    [(0.99 * LITTLE, 20, 4), (0.99 * LITTLE, 21, 2), (LITTLE, 1, 2), (LITTLE, 0, 4)],
)
def test_behind_pairs_as_much_may_wait_as_is_kept_back_where_prompts_take_little(
    prompt_share: float, unplaced: int, deepest: int
) -> None:
    """Pairs stand with 1,000 blocks, and fours free 50 more."""
    assert deepest_worth([(2, 0), (4, 50)], unplaced, 1.0, 1000, prompt_share) == deepest


def test_where_much_memory_is_added_no_queue_is_too_long():
    assert shape(worth(1000, 10**6, capacity_blocks=200)) == [[1, 2, 3, 4]]
    pairs = worth(1000, 10**6, capacity_blocks=2 * PAIRS)
    assert [len(found) for found in shape(pairs)] == [2, 2], "fours add 17 %"


def test_behind_pairs_that_stand_a_deeper_drop_is_refused_by_name():
    pairs = Standing([pipeline(5, 1, 2), pipeline(6, 3, 4)], SPECS, FIRST_ID)
    found = plan_worth(pairs, Wanted(1000), Limits(), Queue(500, 10**6, 1.0, most=1.0))
    assert not found.merges and not found.enough
    assert not found.is_worth and "no drop is worth it: 500 blocks" in found.shortfall


def test_no_deeper_than_is_allowed():
    assert [len(found) for found in shape(worth(1000, PAIRS, size=2))] == [2, 2]


@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0.0, 10.0))
def test_never_more_than_the_plan_and_never_less_for_a_shorter_queue(required, unplaced, most):
    found = worth(required, unplaced, most)
    assert found.gain_blocks <= worth(required, 0).gain_blocks
    assert found.gain_blocks <= worth(required, unplaced // 2, most).gain_blocks
    assert not found.merges or unplaced <= most * PAIRS


@pytest.mark.parametrize(
    ("unplaced", "deepest"), [(0, 8), (200, 8), (206, 8), (207, 4), (220, 4), (221, 1)]
)
def test_the_depth_that_a_queue_allows(unplaced: int, deepest: int) -> None:
    """Pairs free 200 blocks, fours no more than that, eights 60 more."""
    gains = [(2, 200), (4, 200), (8, 260)]
    assert deepest_worth(gains, unplaced, 1.1, 1000) == deepest


def test_what_finds_no_room() -> None:
    def load(used: int, waiting: int, **more: int) -> GroupLoad:
        report = LoadReport(
            GroupId(1), used_blocks=used, waiting_blocks=waiting, capacity_blocks=100
        )
        return GroupLoad(report, 100, **more)

    assert unplaced_blocks([load(90, 50, backlog_blocks=20), load(60, 0)]) == 24
    assert unplaced_blocks([load(90, 50, backlog_blocks=20), load(60, 0)], 15) == 9
    assert unplaced_blocks([load(90, 50), load(0, 0)]) == 0
    assert unplaced_blocks([load(100, 50)], -10) == 50, "a restore is called off"
    kept_back = [load(98, 1), load(99, 1), load(98, 0)]
    assert unplaced_blocks(kept_back) == 2, "five blocks that no admission may use"
