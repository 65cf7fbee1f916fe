"""Parking through the scheduler: the queue's head begins, and nobody is away for long."""

from itertools import pairwise

import pytest

from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import RequestId
from kunserve.core.step import BlockRun
from kunserve.policy.batch.relief import HostLink
from tests.unit.control.group.test_swap import FAST, Story, begin

MAX_PARK_S = 20.0
COST = CostCoefficients(attention_s=0.0, token_s=1e-6, chunk_s=1.0, shared_s=1.0)
"""A step takes a second, and hides 100 blocks on the fast link, four on the slow one."""
SLOW = HostLink(blocks_per_s=4.0, capacity_blocks=None)
TWO = (("a", 20, 60), ("b", 60, 8))
"""Of 5 and 15 blocks at first: in 20 blocks the second one waits, until the first makes way."""


def first_token_s(story: Story, name: str) -> int:
    """Steps until the request's first token."""
    for number, plan in enumerate(story.plans):
        for chunk in plan.chunks:
            if chunk.request_id == name and chunk.samples:
                return number
    raise AssertionError(f"{name} has no token")


def gaps(story: Story, name: str) -> list[int]:
    """Steps between two that compute the request."""
    numbers = [
        number
        for number, plan in enumerate(story.plans)
        if any(chunk.request_id == name for chunk in plan.chunks)
    ]
    return [after - before for before, after in pairwise(numbers)]


def test_the_head_begins_while_a_long_answer_pauses() -> None:
    waits = begin(FAST, *TWO, capacity=20, cost=COST)
    waits.finish()
    parks = begin(FAST, *TWO, capacity=20, max_park_s=MAX_PARK_S, cost=COST)
    parks.finish()
    assert first_token_s(parks, "b") < first_token_s(waits, "b") - 20
    out, back = parks.moved("a")
    assert out and sum(e - s for _, s, e in out) == sum(e - s for _, s, e in back)
    assert max(gaps(parks, "a")) > 5 and max(gaps(waits, "a")) == 1
    assert parks.computed == waits.computed, "nothing is computed twice"


@pytest.mark.parametrize("num_stages", [1, 2])
def test_pauses_keep_their_bound_and_all_take_turns(num_stages: int) -> None:
    names = "abcdef"
    story = begin(
        FAST,
        *((name, 60, 60) for name in names),
        capacity=100,
        num_stages=num_stages,
        max_park_s=MAX_PARK_S,
        cost=COST,
    )
    story.finish()
    assert set(story.preempted) >= set(names[:2])
    for name in names:
        assert max(gaps(story, name)) <= MAX_PARK_S, name
        positions = [o.position for o in story.outputs if o.request_id == name]
        assert positions == list(range(60)), name
    totals = story.scheduler.totals
    assert sum(totals.pauses) == len(story.preempted) and totals.lost_tokens == 0
    assert totals.paused_s <= MAX_PARK_S * len(story.preempted)
    assert totals.swapped_out_blocks == totals.swapped_back_blocks > 0


def test_as_a_second_line_it_waits_until_it_is_allowed() -> None:
    story = begin(FAST, *TWO, capacity=20, max_park_s=MAX_PARK_S, cost=COST, is_second_line=True)
    for _ in range(30):
        story.step()
    assert not story.preempted
    story.scheduler.allow_parking(story.now_s)
    story.run_until(lambda plan: bool(plan.swapped_out))
    story.finish()
    assert max(gaps(story, "a")) <= MAX_PARK_S


def test_nobody_is_parked_where_the_head_would_not_fit() -> None:
    story = begin(FAST, *TWO, capacity=20, max_park_s=MAX_PARK_S, cost=COST)
    story.scheduler.set_capacity(14)  # as while a restore is prepared
    for _ in range(25):
        story.step()
    assert not story.preempted


def test_an_abort_on_the_way_out_leaves_nothing() -> None:
    story = begin(SLOW, *TWO, capacity=20, max_park_s=MAX_PARK_S, cost=COST)
    plan = story.run_until(lambda plan: bool(plan.swapped_out))
    assert plan.swapped_out[0].request_id == "a" and isinstance(plan.swapped_out[0], BlockRun)
    assert story.scheduler.abort(RequestId("a"))
    story.scheduler.check()
    story.finish()
    assert not story.moved("a")[1] and first_token_s(story, "b") > 0
