"""What a group's scheduler shares, keeps and evicts, step by step."""

from typing import Any

import pytest

from kunserve.control.group import prefix_cache
from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.load import RESIDENCY_BOUNDS_S
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Measured, SwapPlan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import SampledToken, StepPlan, StepResult
from kunserve.core.tokens import TokenIds
from kunserve.policy.batch.relief import HostLink

BLOCK = 4


def make(capacity: int = 100, stages: int = 1, **config: Any) -> Scheduler:
    limits = SchedulerConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 64} | config))
    return Scheduler(limits, GroupId(3), stages, BLOCK, capacity, frozenset(), 256)


def request(
    name: str, num_common: int, num_own: int = 0, salt: str = "", **sampling: Any
) -> Request:
    own = int(name.encode().hex(), 16) % 1000 + 1000
    prompt = TokenIds([*range(num_common), *range(own, own + num_own)])
    params = SamplingParams(**({"max_tokens": 4} | sampling))
    return Request(RequestId(name), prompt, params, 0.0, cache_salt=salt)


def step(scheduler: Scheduler, now_s: float = 0.0) -> tuple[StepPlan, list[TokenOutput]]:
    plan = scheduler.schedule(now_s)
    assert plan is not None
    scheduler.check()
    tokens = tuple(SampledToken(c.request_id, 7, None) for c in plan.chunks if c.samples)
    outputs = scheduler.complete(StepResult(GroupId(3), plan.step_id, tokens), max(1.0, now_s))
    scheduler.check()
    return plan, outputs


def finish(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(step(scheduler)[0])
    return plans


def starts(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: chunk.start for chunk in plan.chunks}


def test_blocks_of_a_running_request_are_shared_and_count_once() -> None:
    scheduler = make()
    scheduler.add(request("a", 10, 5))
    step(scheduler)
    assert scheduler.used_blocks == 4
    scheduler.add(request("b", 10, 6))
    plan, outputs = step(scheduler)
    assert starts(plan) == {"a": 15, "b": 8}
    (kept,), (shared,) = plan.kept, plan.shared
    assert (kept.request_id, kept.first_block, kept.end_block) == ("a", 0, 3)
    assert (shared.request_id, shared.prefix_id, shared.end_block) == ("b", kept.prefix_id, 2)
    assert scheduler.used_blocks == 4 + 2
    by_name = {output.request_id: output.num_cached_tokens for output in outputs}
    assert by_name["b"] == 8
    load = scheduler.load(1, 2, 0.0)
    assert (load.totals.prefix_queried_tokens, load.totals.prefix_hit_tokens) == (15 + 16, 8)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler = make()
    for name in ("a", "b"):
        scheduler.add(request(name, 16))
        plan, _ = step(scheduler)
    assert starts(plan)["b"] == 12


def test_salts_share_nothing() -> None:
    scheduler = make()
    for name, salt in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x")):
        scheduler.add(request(name, 12, 1, salt))
        plan, _ = step(scheduler)
        assert starts(plan)[name] == (12 if name == "d" else 0)


def test_what_ended_is_found_again_and_counts_as_free() -> None:
    scheduler = make()
    scheduler.add(request("a", 12, 1))
    finish(scheduler)
    assert scheduler.used_blocks == 0 and scheduler.cached_blocks == 4
    load = scheduler.load(1, 1, 0.0)
    assert load.used_blocks == load.demand_blocks == 0 and load.cached_blocks == 4
    # The next turn of the chat: all that was said, and more.
    prompt = TokenIds([*request("a", 12, 1).prompt_token_ids, 7, 7, 7, 7, 1, 2, 3])
    scheduler.add(Request(RequestId("b"), prompt, SamplingParams(max_tokens=1), 0.0))
    plan, outputs = step(scheduler)
    assert starts(plan) == {"b": 16} and outputs[0].num_cached_tokens == 16
    assert scheduler.cached_blocks == 5, "what b added is kept behind what it shared"


def test_memory_is_taken_from_the_cache_before_anybody_waits() -> None:
    scheduler = make(capacity=12)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 0, 13, max_tokens=4))
        finish(scheduler)
    assert scheduler.cached_blocks == 12
    scheduler.add(request("d", 0, 18, max_tokens=1))
    plan, _ = step(scheduler)
    # The oldest goes first, its end before its beginning.
    evicted = {one.prefix_id: one.end_block for one in plan.evicted}
    assert evicted == {"prefix-3-0": 0, "prefix-3-1": 3}
    assert not scheduler.is_memory_short and not scheduler.drain_preemptions()
    scheduler.add(request("b", 0, 13, max_tokens=1))
    plan, _ = step(scheduler)
    assert starts(plan) == {"b": 12}


def test_a_reset_frees_what_nobody_shares_at_once() -> None:
    scheduler = make()
    scheduler.add(request("a", 10, 5))
    scheduler.add(request("b", 0, 13, max_tokens=20))
    for _ in range(4):
        step(scheduler)
    assert scheduler.cached_blocks == 4 and scheduler.used_blocks > 0
    scheduler.cache.reset()
    scheduler.check()
    assert scheduler.cached_blocks == 0
    scheduler.add(request("c", 0, 13, max_tokens=1))
    plan, _ = step(scheduler)
    assert [one.end_block for one in plan.evicted] == [0], "and what b uses stays"
    finish(scheduler)
    assert scheduler.schedule(1.0) is None and not scheduler.can_schedule
    scheduler.cache.reset()
    assert scheduler.can_schedule, "an idle group, too"
    (plan,) = finish(scheduler)
    assert plan.evicted and not plan.chunks
    assert scheduler.cached_blocks == 0 and not scheduler.has_work
    scheduler.add(request("a", 10, 5))
    plan, _ = step(scheduler)
    assert starts(plan) == {"a": 0}, "it is computed again"


def test_blocks_that_two_prefixes_have_count_once_for_who_needs_all_memory() -> None:
    """Whoever shared them needed more than there is, and waited in an idle group for ever."""
    scheduler = make(capacity=10)
    scheduler.add(request("a", 4, 2, max_tokens=8))
    scheduler.add(request("b", 12, 1, max_tokens=8))
    step(scheduler)
    scheduler.add(request("c", 12, 1, max_tokens=1))
    finish(scheduler)
    scheduler.add(request("d", 12, 26, max_tokens=2))
    plan, _ = step(scheduler)
    assert starts(plan) == {"d": 12}
    finish(scheduler)
    scheduler.check()


def test_what_an_exchange_brings_is_demand_until_it_is_over() -> None:
    """Members still write it, so nobody may have its memory, though all who shared it are gone."""
    giver, taker = make(capacity=10), make(capacity=10)
    for name in ("a", "b"):
        giver.add(request(name, 8, 1, max_tokens=20))
        step(giver)
    prefixes, states = giver.cache.export(), giver.export()
    taker.cache.adopt(prefixes)
    taker.adopt(states, {RequestId("a"), RequestId("b")})
    assert taker.load(1, 0, 0.0).used_blocks == 2 + 2, "two of the prefix and one of each"
    for name in ("a", "b"):
        taker.abort(RequestId(name))
    taker.check()
    assert taker.load(2, 0, 0.0).demand_blocks == 2
    taker.add(request("c", 0, 37, max_tokens=3))
    plan, _ = step(taker)
    assert not plan.chunks and taker.schedule(0.0) is None
    assert taker.load(3, 1, 0.0).demand_blocks == 2 + 10
    taker.cache.end_exchange()
    plan, _ = step(taker)
    assert starts(plan) == {"c": 0} and [one.end_block for one in plan.evicted] == [0]
    finish(taker)
    assert taker.load(4, 1, 0.0).demand_blocks == 0


def test_who_is_preempted_finds_its_own_beginning_again() -> None:
    scheduler = make(capacity=9, watermark=0.0)
    for name in ("a", "b"):
        scheduler.add(request(name, 0, 13, max_tokens=12))
    plans = finish(scheduler)
    (again,) = [start for start in plans[-12:] for start in start.started]
    first = next(c for plan in plans[-12:] for c in plan.chunks if c.request_id == "b")
    assert again.request_id == "b" and first.start >= 8


def test_prompts_whose_scores_are_wanted_are_computed() -> None:
    scheduler = make()
    scheduler.add(request("a", 12, 1))
    finish(scheduler)
    scheduler.add(request("b", 12, 1, num_prompt_logprobs=0))
    plan = scheduler.schedule(0.0)
    assert plan is not None and starts(plan) == {"b": 0} and not plan.shared
    assert scheduler.load(1, 2, 0.0).totals.prefix_queried_tokens == 13, "it is not looked for"


def test_what_failed_is_not_kept() -> None:
    scheduler = make()
    scheduler.add(request("a", 12, 1))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    failed = (SampledToken(RequestId("a"), None, None),)
    scheduler.complete(StepResult(GroupId(3), plan.step_id, failed), 1.0)
    finish(scheduler)
    assert scheduler.cached_blocks == 0


def test_an_idle_group_gives_memory_up_that_it_loses() -> None:
    scheduler = make(capacity=12)
    scheduler.add(request("a", 0, 30, max_tokens=2))
    finish(scheduler)
    assert scheduler.cached_blocks == 7 and not scheduler.can_schedule
    scheduler.set_capacity(5)
    assert scheduler.can_schedule
    plan, _ = step(scheduler)
    assert [one.end_block for one in plan.evicted] == [5] and not plan.chunks
    assert not scheduler.has_work


def test_two_who_compute_the_same_at_once_keep_it_once() -> None:
    scheduler = make()
    for name in ("a", "b"):
        scheduler.add(request(name, 12, 1, max_tokens=1))
    finish(scheduler)
    assert scheduler.cached_blocks == 3


def test_without_a_cache_plans_say_nothing_of_it() -> None:
    scheduler = make(enable_prefix_caching=False)
    for name in ("a", "b"):
        scheduler.add(request(name, 12, 1))
        for plan in finish(scheduler):
            assert not (plan.kept or plan.evicted or plan.shared)
    assert scheduler.cached_blocks == 0 and not scheduler.cache.export()


def parking(capacity: int) -> Scheduler:
    """Who has run for 10 s may make way for 20 s."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    cost = CostCoefficients(attention_s=0.0, token_s=1e-6, chunk_s=1.0, shared_s=1.0)
    measured = Measured(cost, SwapPlan(1.0, max_park_s=20.0))
    link = HostLink(blocks_per_s=100.0, capacity_blocks=None)
    return Scheduler(
        config,
        GroupId(3),
        1,
        BLOCK,
        capacity,
        frozenset(),
        256,
        host_link=link,
        measured=measured,
    )


def test_who_counts_on_blocks_of_one_that_is_parked_waits() -> None:
    scheduler = parking(capacity=13)
    scheduler.add(request("r", 20, max_tokens=60))
    now_s = 0.0
    while scheduler.used_blocks < 9:
        step(scheduler, now_s := now_s + 1.0)
    # The first needs one block besides those of "r", the second makes "r" leave.
    scheduler.add(request("a", 20, 4, max_tokens=2))
    scheduler.add(request("b", 0, 16, max_tokens=2))
    plan, _ = step(scheduler, now_s := now_s + 1.0)
    assert [run.request_id for run in plan.swapped_out] == ["r"] and not plan.shared
    while scheduler.has_work:
        step(scheduler, now_s := now_s + 1.0)
    assert scheduler.totals.lost_tokens == 0


def test_so_many_prefixes_are_kept_as_the_tables_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_cache, "LEAST_PREFIXES", 2)
    monkeypatch.setattr(prefix_cache, "MAX_TABLE_ENTRIES", 12)
    scheduler = make()
    for num_own, num_kept in ((13, 1), (13, 2), (13, 3), (13, 4), (13, 4), (29, 2)):
        scheduler.add(request(f"{scheduler.totals.prompt_tokens}", 0, num_own, max_tokens=1))
        finish(scheduler)
        assert len(scheduler.cache._unused) == num_kept
    assert scheduler.cached_blocks == 3 + 7, "those used last"


def test_what_others_share_is_not_freed_by_parking() -> None:
    scheduler = parking(capacity=19)
    for name in ("r", "s", "t"):
        scheduler.add(request(name, 20, 1, max_tokens=60))
        step(scheduler)
    for now_s in range(2, 14):
        step(scheduler, float(now_s))
    own = {
        str(seq.request_id): scheduler._ledger.blocks_of(seq.request_id)
        - scheduler.cache.shared_blocks(seq)
        for seq in scheduler._live.values()
    }
    assert scheduler.used_blocks == 5 + sum(own.values()) and max(own.values()) == 4
    # It lacks more than any two of them have for themselves.
    scheduler.add(request("a", 0, 40, max_tokens=1))
    step(scheduler, 14.0)
    assert {name for name, _ in scheduler.drain_preemptions()} == {"r", "s", "t"}


def test_who_waits_wants_only_what_is_not_there() -> None:
    scheduler = make(capacity=12, max_num_seqs=1)
    scheduler.add(request("r", 20, 1))
    step(scheduler)
    scheduler.add(request("a", 20, 4))
    scheduler.add(request("b", 0, 8))
    load = scheduler.load(1, 3, 0.0)
    assert (load.num_waiting, load.head_of_line_blocks) == (2, 6 - 5)
    assert (load.waiting_blocks, load.waiting_tokens) == (1 + 2, 4 + 8)
    finish(scheduler)
    scheduler.add(request("a", 20, 4))
    load = scheduler.load(2, 4, 0.0)
    assert load.head_of_line_blocks == 6, "what nobody shares counts as free"
    assert load.waiting_tokens == 4


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    scheduler = make(max_num_batched_tokens=512)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 130, 10))
    plan, _ = step(scheduler)
    assert [(chunk.request_id, chunk.num_tokens) for chunk in plan.chunks] == [("a", 140)]
    plan, _ = step(scheduler)
    assert starts(plan) == {"a": 140, "b": 128, "c": 128}


def test_nobody_waits_for_little_or_for_what_it_may_not_share() -> None:
    for numbers, salts in (((100, 40), ("", "")), ((130, 10), ("", "x"))):
        scheduler = make(max_num_batched_tokens=512)
        for name, salt in zip("ab", salts, strict=True):
            scheduler.add(request(name, *numbers, salt=salt))
        assert starts(step(scheduler)[0]) == {"a": 0, "b": 0}
    scheduler = make(max_num_batched_tokens=512, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(request(name, 130))
    assert starts(step(scheduler)[0]) == {"a": 0, "b": 0}


def test_who_waits_for_another_does_not_hold_up_a_third() -> None:
    scheduler = make(max_num_batched_tokens=512)
    for request_ in (request("a", 140), request("b", 140), request("c", 0, 20)):
        scheduler.add(request_)
    assert starts(step(scheduler)[0]) == {"a": 0, "c": 0}


def test_whoever_waits_goes_on_alone_when_the_other_is_gone() -> None:
    scheduler = make(max_num_batched_tokens=64)
    for name in ("a", "b"):
        scheduler.add(request(name, 200))
    step(scheduler)
    scheduler.abort(RequestId("a"))
    assert starts(step(scheduler)[0])["b"] == 64, "and has what was computed"


def test_how_long_blocks_stay_and_how_soon_they_are_used_again() -> None:
    """By the leader's clock: nothing is counted of blocks that are still there."""
    scheduler = make(capacity=6)
    totals = scheduler.totals
    scheduler.add(request("a", 8, 1, max_tokens=1))
    step(scheduler, 10.0)
    scheduler.add(request("b", 8, 2, max_tokens=1))
    step(scheduler, 14.0)
    gaps = dict(zip((*RESIDENCY_BOUNDS_S, None), totals.reuse_gaps, strict=True))
    assert gaps[5.0] == 2 and sum(gaps.values()) == 2, "two blocks, 4 s after the first request"
    assert totals.reuse_gap_s == 8.0 and not totals.block_lives
    scheduler.add(request("c", 0, 22, max_tokens=1))
    step(scheduler, 50.0)
    assert sum(totals.block_lives) == sum(totals.block_idles) == 2
    assert totals.block_lived_s == 2 * 40.0 and totals.block_idle_s == 2 * 36.0


def test_preemptions_are_counted_by_request() -> None:
    scheduler = make(capacity=5, watermark=0.0)
    for name in ("a", "b"):
        scheduler.add(request(name, 0, 8, max_tokens=8))
    finish(scheduler)
    totals = scheduler.totals
    assert totals.num_preemptions == totals.ended_preemptions > 0
    assert sum(totals.preemptions) == 2
