"""Requests that are admitted when their first chunk fits: plain chunked prefill."""

from collections import deque

import pytest

from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig
from kunserve.core.step import StepPlan
from kunserve.policy.batch.reserve import reserved_tokens
from tests.unit.control.group.test_scheduler import (
    chunks,
    drive,
    finish,
    make,
    plan_of,
    request,
)

LAZY = {"scheduler_reserve_full_isl": False}


@pytest.mark.parametrize(
    ("reserves", "known", "computed", "tokens"),
    [(True, 40, 0, 40), (False, 40, 0, 16), (False, 40, 16, 32), (False, 40, 32, 40),
     (False, 9, 0, 9), (False, 41, 40, 41)],
)  # fmt: skip
def test_memory_is_for_the_next_chunk_or_for_all(
    reserves: bool, known: int, computed: int, tokens: int
) -> None:
    config = SchedulerConfig(max_num_batched_tokens=16, scheduler_reserve_full_isl=reserves)
    assert reserved_tokens(known, computed, config) == tokens


def test_a_request_is_admitted_when_its_first_chunk_fits() -> None:
    scheduler = make(capacity=10, **LAZY)
    scheduler.add(request("a", 17))
    scheduler.add(request("b", 17))
    plan = plan_of(scheduler)
    assert chunks(plan) == [("a", 0, 16, False)] and scheduler.used_blocks == 4
    finish(scheduler, plan)
    # All of "b" would not fit beside "a".
    assert chunks(plan_of(scheduler)) == [("a", 16, 1, True), ("b", 0, 15, False)]
    assert scheduler.used_blocks == 9


def test_a_prompt_that_runs_out_half_way_takes_the_latest_arrivals_memory() -> None:
    scheduler = make(capacity=9, **LAZY)
    scheduler.add(request("a", 33, 0.0))
    plan = plan_of(scheduler)
    scheduler.add(request("b", 3, 1.0, max_tokens=20))
    finish(scheduler, plan)
    for _ in range(2):  # two chunks of "a", and "b" beside the second
        finish(scheduler, plan_of(scheduler))
    assert scheduler.drain_preemptions() == []
    assert [output.request_id for output in drive(scheduler)].count("b") == 20
    assert scheduler.used_blocks == 0


def test_the_last_to_come_waits_for_its_next_chunk_and_keeps_what_it_has() -> None:
    scheduler = make(capacity=8, max_num_batched_tokens=8, **LAZY)
    scheduler.add(request("old", 9, 0.0, max_tokens=4))
    for _ in range(2):
        finish(scheduler, plan_of(scheduler))
    scheduler.add(request("new", 24, 1.0, max_tokens=1))
    seen = []
    while (plan := scheduler.schedule(0.0)) is not None:
        seen += [chunk for chunk in chunks(plan) if chunk[0] == "new"]
        finish(scheduler, plan)
    assert scheduler.totals.num_preemptions == 0
    starts = [start for _, start, _, _ in seen]
    assert starts == sorted(set(starts)) and seen[-1][3]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("lookahead", [True, False])
def test_more_prompts_than_memory_all_end(stages: int, lookahead: bool) -> None:
    """Each is the whole memory: who came first always goes on, whatever is thrown out for it."""
    limits = {"max_num_batched_tokens": 5, "lookahead": lookahead, "min_microbatch_tokens": 4}
    scheduler = make(stages, capacity=11, **LAZY, **limits)
    for number in range(8):
        scheduler.add(request(f"r{number}", 36 - number, float(number), max_tokens=6))
    ended = _ends(scheduler)
    assert sorted(ended) == [f"r{number}" for number in range(8)]
    assert ended[0] == "r0" and scheduler.totals.num_preemptions > 0
    assert scheduler.used_blocks == 0


def _ends(scheduler: Scheduler) -> list[str]:
    """Run everything; who ended, in order. Each step in which something is planned moves someone.

    Between two ends no more is computed than all requests from the beginning.
    """
    flying: deque[StepPlan] = deque()
    ended: list[str] = []
    num_tokens = 0
    while True:
        plan = scheduler.schedule(0.0)
        if plan is not None:
            num_tokens += plan.num_tokens
            assert num_tokens < 8 * 50, "work without an end"
            flying.append(plan)
        elif flying:
            outputs = finish(scheduler, flying.popleft())
            new = [one.request_id for one in outputs if one.finish_reason is not None]
            num_tokens = 0 if new else num_tokens
            ended += new
        else:
            return ended
