"""The scheduler step by step: admission, chunks, preemption, pipelines, handover."""

from collections import deque
from typing import Any

import pytest

from kunserve.control.group.load import PRIOR_OUTPUT_TOKENS, SchedulerTotals
from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.messages import SequenceState, TokenOutput
from kunserve.core.plan import Measured
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.step import LATE, SampledToken, StepPlan, StepResult
from kunserve.policy.batch.batch_form import (
    FormationView,
    Microbatch,
    OngoingFormation,
    form_token_budget,
)

GROUP = GroupId(3)
EOS = 99


def make(
    stages: int = 1, capacity: int = 100, cost: CostCoefficients | None = None, **config: Any
) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | config
    # Prompts are alike here, and shall be computed each by itself.
    config = SchedulerConfig(**({"enable_prefix_caching": False} | limits))
    measured = Measured(cost)
    return Scheduler(config, GROUP, stages, 4, capacity, frozenset({EOS}), 64, measured=measured)


def request(name: str, num_prompt: int, arrival_s: float = 0.0, **sampling: Any) -> Request:
    params = SamplingParams(**({"max_tokens": 4} | sampling))
    prompt = tuple(range(100, 100 + num_prompt))
    return Request(RequestId(name), prompt, params, arrival_s)


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.check()
    return plan


def chunks(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [tuple(chunk) for chunk in plan.chunks]  # type: ignore[misc]


def finish(
    scheduler: Scheduler, plan: StepPlan, token: int = 7, late: tuple[str, ...] = ()
) -> list[TokenOutput]:
    tokens = tuple(
        SampledToken(c.request_id, LATE if c.request_id in late else token, None)
        for c in plan.chunks
        if c.samples
    )
    outputs = scheduler.complete(StepResult(GROUP, plan.step_id, tokens), 1.0)
    scheduler.check()
    return outputs


def drive(scheduler: Scheduler, limit: int = 500) -> list[TokenOutput]:
    """Run everything to its end with as many plans in flight as the scheduler gives."""
    flying: deque[StepPlan] = deque()
    outputs: list[TokenOutput] = []
    for _ in range(limit):
        plan = scheduler.schedule(0.0)
        if plan is not None:
            flying.append(plan)
        elif flying:
            outputs.extend(finish(scheduler, flying.popleft()))
        else:
            break
    assert not scheduler.has_work
    return outputs


def test_a_request_from_prompt_to_end() -> None:
    scheduler = make()
    scheduler.add(request("a", 6, max_tokens=2))
    plan = plan_of(scheduler)
    assert (plan.group_id, plan.released) == (GROUP, ())
    assert chunks(plan) == [("a", 0, 6, True)]
    assert [s.request_id for s in plan.started] == ["a"]
    assert (plan.started[0].num_prompt_tokens, plan.started[0].token_ids) == (6, ())
    assert scheduler.token_ids_of(plan).tolist() == [100, 101, 102, 103, 104, 105]
    assert scheduler.schedule(0.0) is None, "its next token is not known yet"
    assert finish(scheduler, plan) == [
        TokenOutput(RequestId("a"), 0, 7, None, None, computed_s=1.0)
    ]
    plan = plan_of(scheduler)
    assert chunks(plan) == [("a", 6, 1, True)] and plan.started == ()
    assert scheduler.token_ids_of(plan).tolist() == [7]
    assert finish(scheduler, plan, 8) == [
        TokenOutput(RequestId("a"), 1, 8, None, FinishReason.LENGTH)
    ]
    assert scheduler.has_work and scheduler.used_blocks == 0
    plan = plan_of(scheduler)
    assert (plan.released, plan.chunks) == (("a",), ())
    assert finish(scheduler, plan) == [] and not scheduler.has_work


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({"max_tokens": 9}, [7, EOS], FinishReason.STOP),
        ({"max_tokens": 3, "ignore_eos": True}, [7, EOS, 7], FinishReason.LENGTH),
        ({"max_tokens": 9, "stop_token_ids": (8,)}, [7, 8], FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": (8,), "ignore_eos": True}, [8], FinishReason.STOP),
        ({"max_tokens": 9, "min_tokens": 3}, [EOS, EOS, EOS], FinishReason.STOP),
        ({"max_tokens": 1}, [EOS], FinishReason.STOP),
        ({"max_tokens": 99}, [7] * 54, FinishReason.LENGTH),
    ],
)
def test_how_requests_end(
    sampling: dict[str, Any], tokens: list[int], reason: FinishReason
) -> None:
    scheduler = make()
    scheduler.add(request("a", 10, **sampling))
    reasons = [finish(scheduler, plan_of(scheduler), token)[0].finish_reason for token in tokens]
    assert reasons == [None] * (len(tokens) - 1) + [reason]


def test_prompts_are_chunked_and_mixed_with_decodes() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    finish(scheduler, plan_of(scheduler))
    scheduler.add(request("b", 20))
    scheduler.add(request("c", 5))
    plan = plan_of(scheduler)
    assert chunks(plan) == [("a", 3, 1, True), ("b", 0, 15, False)]
    assert [t.request_id for t in finish(scheduler, plan)] == ["a"]
    assert chunks(plan_of(scheduler)) == [
        ("a", 4, 1, True),
        ("b", 15, 5, True),
        ("c", 0, 5, True),
    ]


def test_the_queue_is_ordered_by_arrival() -> None:
    scheduler = make(max_num_seqs=1)
    for name, arrival in (("late", 2.0), ("early", 1.0), ("tie", 1.0)):
        scheduler.add(request(name, 3, arrival, max_tokens=1))
    assert [output.request_id for output in drive(scheduler)] == ["early", "tie", "late"]


def test_admission_wants_room_for_the_whole_prompt_and_a_watermark() -> None:
    scheduler = make(capacity=10)
    scheduler.add(request("a", 17))
    scheduler.add(request("b", 17))
    scheduler.add(request("c", 1))
    plan = plan_of(scheduler)
    assert chunks(plan) == [("a", 0, 16, False)]
    assert scheduler.used_blocks == 5, "its prompt's blocks are reserved"
    finish(scheduler, plan)
    assert chunks(plan_of(scheduler)) == [("a", 16, 1, True)], "b waits, and c waits behind it"


def test_the_largest_request_is_admitted_when_alone() -> None:
    scheduler = make(capacity=5)
    scheduler.add(request("a", 20, max_tokens=1))
    assert len(drive(scheduler)) == 1
    with pytest.raises(AssertionError, match="never fit"):
        scheduler.add(request("b", 21))


def test_a_request_that_fills_the_pool_ends_by_length() -> None:
    scheduler = make(capacity=2)
    scheduler.add(request("a", 4, max_tokens=50))
    outputs = drive(scheduler)
    assert len(outputs) == 5 and outputs[-1].finish_reason is FinishReason.LENGTH


def preempting(stages: int = 1, max_tokens: int = 4) -> tuple[Scheduler, StepPlan]:
    """Two requests of one full block each in a pool of three: the second must give way."""
    scheduler = make(stages, capacity=3, max_num_batched_tokens=8)
    scheduler.add(request("a", 4, 0.0, max_tokens=8))
    scheduler.add(request("b", 4, 1.0, max_tokens=max_tokens, presence_penalty=0.5))
    plan = plan_of(scheduler)
    assert chunks(plan) == [("a", 0, 4, True), ("b", 0, 4, True)]
    return scheduler, plan


def test_the_latest_arrival_is_preempted_and_keeps_its_place_and_output() -> None:
    scheduler, plan = preempting()
    finish(scheduler, plan)
    scheduler.add(request("c", 1, 2.0))
    # "a" takes the last block; "b" came last: it sits out, keeping its KV.
    for position in range(4, 8):
        plan = plan_of(scheduler)
        assert chunks(plan) == [("a", position, 1, True)]
        finish(scheduler, plan)
    assert scheduler.drain_preemptions() == []
    plan = plan_of(scheduler)
    assert scheduler.drain_preemptions() == [("b", 4)] and scheduler.drain_preemptions() == []
    assert chunks(plan) == [("a", 8, 1, True)] and plan.released == ("b",)
    assert [seq.request_id for seq in scheduler._waiting] == ["b", "c"], "before c"
    load = scheduler.load(1, 3, 0.0)
    assert (load.totals.num_preemptions, load.totals.lost_tokens) == (1, 4)
    outputs = finish(scheduler, plan)
    while not (plan := plan_of(scheduler)).started:
        outputs += finish(scheduler, plan)
    assert plan.released == ("a",)
    assert chunks(plan)[0] == ("b", 0, 5, True), "prompt and output are recomputed"
    assert plan.started[0].token_ids == (100, 101, 102, 103, 7), "history for its penalty"
    outputs += finish(scheduler, plan) + drive(scheduler)
    assert [o.position for o in outputs if o.request_id == "b"] == [1, 2, 3]


def test_a_late_token_is_asked_for_again_by_who_keeps_its_kv_and_who_loses_it() -> None:
    scheduler, plan = preempting(max_tokens=8)
    finish(scheduler, plan)
    scheduler.set_capacity(4)
    for position, late in zip((4, 4, 5, 5), (("b",), (), ("b",), ("b",)), strict=True):
        plan = plan_of(scheduler)
        assert ("b", position, 1, True) in chunks(plan)
        told = [o.position for o in finish(scheduler, plan, late=late) if o.request_id == "b"]
        assert told == ([] if late else [1])
    plan = plan_of(scheduler)
    assert scheduler.drain_preemptions() == [("b", 6)] and plan.released == ("b",)
    assert chunks(plan) == [("a", 8, 1, True)]
    outputs = finish(scheduler, plan)
    while not (plan := plan_of(scheduler)).started:
        outputs += finish(scheduler, plan)
    assert chunks(plan)[0] == ("b", 0, 6, True), "all is recomputed"
    outputs += finish(scheduler, plan) + drive(scheduler)
    assert [o.position for o in outputs if o.request_id == "b"] == [2, 3, 4, 5, 6, 7]


def test_growth_waits_when_preemption_is_not_allowed() -> None:
    scheduler, plan = preempting()
    scheduler.may_preempt = False
    for _ in range(4):
        finish(scheduler, plan)
        plan = plan_of(scheduler)
    finish(scheduler, plan)
    assert scheduler.schedule(0.0) is None and scheduler.drain_preemptions() == []
    could = [scheduler.can_schedule]
    scheduler.set_capacity(4)
    could.append(scheduler.can_schedule)
    assert scheduler.has_work and could == [False, True], "nothing to try until something changes"
    assert chunks(plan_of(scheduler)) == [("a", 8, 1, True)]


def test_a_preempted_request_in_flight_is_recomputed_not_confused() -> None:
    scheduler, first = preempting(stages=2, max_tokens=8)
    assert scheduler.schedule(0.0) is None
    finish(scheduler, first)
    one, two = plan_of(scheduler), scheduler.schedule(0.0)
    assert chunks(one) == [("a", 4, 1, True)] and two is None, "b lacks a block"
    scheduler.set_capacity(4)
    two = plan_of(scheduler)
    assert chunks(two) == [("b", 4, 1, True)]
    for _ in range(3):
        finish(scheduler, one)
        one = plan_of(scheduler)
        finish(scheduler, two)
        two = plan_of(scheduler)
    finish(scheduler, one)
    one = plan_of(scheduler)
    assert scheduler.drain_preemptions() == [("b", 8)]
    assert one.released == ("b",) and finish(scheduler, two) == [], "its token is ignored"


def test_decodes_do_not_pack_into_one_microbatch_after_a_drain() -> None:
    scheduler = make(stages=2)
    for i in range(8):
        scheduler.add(request(str(i), 2, i, max_tokens=20))
    finish(scheduler, plan_of(scheduler))
    assert scheduler.num_in_flight == 0, "all eight are runnable at once"
    one, two = plan_of(scheduler), plan_of(scheduler)
    assert (len(one.chunks), len(two.chunks)) == (4, 4)
    assert scheduler.schedule(0.0) is None, "as many in flight as stages"
    finish(scheduler, one)
    assert {c.request_id for c in plan_of(scheduler).chunks} == set("0123")


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    scheduler = make(stages=2, max_num_batched_tokens=4)
    for name, num_prompt in (("a", 1), ("b", 7), ("c", 1)):
        scheduler.add(request(name, num_prompt, ord(name)))
    finish(scheduler, plan_of(scheduler))
    finish(scheduler, plan_of(scheduler))
    plan = plan_of(scheduler)
    assert chunks(plan) == [("a", 2, 1, True), ("b", 6, 1, True), ("c", 0, 1, True)]


def test_chunks_of_one_prompt_follow_each_other_in_flight() -> None:
    scheduler = make(stages=3)
    scheduler.add(request("a", 40))
    plans = [plan_of(scheduler) for _ in range(3)]
    assert [chunks(plan)[0] for plan in plans] == [
        ("a", 0, 16, False),
        ("a", 16, 16, False),
        ("a", 32, 8, True),
    ]
    assert [len(finish(scheduler, plan)) for plan in plans] == [0, 0, 1]


def test_nobody_starves_when_decodes_exceed_the_budget() -> None:
    scheduler = make(max_num_batched_tokens=2)
    for i in range(5):
        scheduler.add(request(str(i), 1, i, max_tokens=30))
    counts: dict[str, int] = {}
    for _ in range(30):
        for output in finish(scheduler, plan_of(scheduler)):
            counts[output.request_id] = counts.get(output.request_id, 0) + 1
    # Decodes come first, so later prompts wait; those that decode take turns.
    assert counts["0"] == counts["1"]


def test_who_is_beyond_the_largest_number_takes_turns() -> None:
    """Where groups part, more may run on one side than steps hold."""
    scheduler = make(max_num_seqs=2)
    scheduler.adopt([handed_over(name, 3, (1,), 3) for name in "abc"])
    counts = dict.fromkeys("abc", 0)
    for _ in range(8):
        for output in finish(scheduler, plan_of(scheduler)):
            counts[output.request_id] += 1
    assert min(counts.values()) == 4


@pytest.mark.parametrize("stages", [1, 2])
def test_abort_in_every_state(stages: int) -> None:
    scheduler = make(stages, max_num_seqs=1)
    for name in "abc":
        scheduler.add(request(name, 20, ord(name)))
    assert scheduler.abort(RequestId("c")), "waiting"
    plan = plan_of(scheduler)
    assert scheduler.abort(RequestId("a")), "mid-prompt, in flight"
    assert not scheduler.abort(RequestId("a"))
    assert finish(scheduler, plan) == []
    plan = plan_of(scheduler)
    assert plan.released == ("a",) and chunks(plan) == [("b", 0, 16, False)]
    last = plan_of(scheduler) if stages == 2 else None
    assert finish(scheduler, plan) == []
    last = last or plan_of(scheduler)
    assert chunks(last) == [("b", 16, 4, True)]
    assert scheduler.abort(RequestId("b")), "awaiting its token"
    assert scheduler.used_blocks == 0
    assert finish(scheduler, last) == [], "the late token is ignored"
    assert plan_of(scheduler).released == ("b",)


def test_a_rerun_request_goes_on_where_it_was() -> None:
    scheduler = make()
    old = request("a", 3, max_tokens=4, frequency_penalty=0.1)
    scheduler.add(Request(old.request_id, old.prompt_token_ids, old.sampling, 0.0, (5, 6)))
    plan = plan_of(scheduler)
    assert scheduler.token_ids_of(plan).tolist() == [100, 101, 102, 5, 6]
    assert plan.started[0].token_ids == (100, 101, 102, 5, 6)
    assert [output.position for output in finish(scheduler, plan) + drive(scheduler)] == [2, 3]


def handed_over(name: str, num_prompt: int, output: tuple[int, ...], computed: int) -> Any:
    return SequenceState(request(name, num_prompt, max_tokens=9), output, computed, 0, 2)


def test_handover_to_another_leader() -> None:
    scheduler = make()
    scheduler.add(request("a", 6, 0.0))
    scheduler.add(request("b", 30, 1.0))
    scheduler.add(request("c", 50, 2.0))
    finish(scheduler, plan_of(scheduler))
    states = scheduler.export()
    assert [(s.request.request_id, s.num_computed, s.num_blocks) for s in states] == [
        ("a", 6, 2),
        ("b", 10, 3),
        ("c", 0, 0),
    ]
    assert states[0].output_token_ids == (7,)
    assert not scheduler.has_work and scheduler.used_blocks == 0
    taker = make(stages=2)
    taker.adopt(states, {RequestId("a")})
    taker.check()
    assert taker.load(1, 0, 0.0).num_stalled == 1
    plan = plan_of(taker)
    assert [s.request_id for s in plan.started] == ["b"]
    assert chunks(plan) == [("b", 10, 16, False)], "a may not run yet"
    taker.resume(RequestId("a"))
    taker.resume(RequestId("gone"))
    plan = plan_of(taker)
    assert [s.request_id for s in plan.started] == ["a", "c"]
    assert chunks(plan) == [("a", 6, 1, True), ("b", 26, 4, True), ("c", 0, 11, False)]


def test_adopted_kv_may_exceed_the_capacity_and_a_prompt_then_waits() -> None:
    scheduler = make(capacity=4)
    scheduler.may_preempt = False
    scheduler.adopt([handed_over("a", 30, (), 10), handed_over("b", 7, (1,), 7)])
    assert scheduler.used_blocks == 5
    plan = plan_of(scheduler)
    assert chunks(plan) == [("b", 7, 1, True)], "b needs no block, a needs five more"
    finish(scheduler, plan)
    assert scheduler.schedule(0.0) is None
    scheduler.set_capacity(12)
    assert [c[0] for c in chunks(plan_of(scheduler))] == ["b", "a"]


def test_load_report() -> None:
    totals = SchedulerTotals()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False),
        GROUP,
        1,
        4,
        100,
        frozenset({EOS}),
        4096,
        totals,
    )
    scheduler.add(request("a", 8, 0.0, max_tokens=9))
    scheduler.add(request("b", 6, 1.0, max_tokens=1000))
    scheduler.add(request("c", 1, 2.0, max_tokens=1))
    finish(scheduler, plan_of(scheduler))
    load = scheduler.load(5, 17, 3.0)
    assert (load.group_id, load.sequence_number, load.num_received) == (GROUP, 5, 17)
    assert (load.num_running, load.num_waiting, load.num_stalled) == (1, 2, 0)
    assert (load.used_blocks, load.capacity_blocks) == (2, 100)
    assert load.growth_blocks == 2, "nine tokens at most, the last one's KV is not stored"
    assert (load.head_of_line_blocks, load.waiting_blocks, load.waiting_tokens) == (2, 3, 7)
    assert load.demand_blocks == 6
    assert (load.totals.prompt_tokens, load.totals.generation_tokens) == (8, 1)
    assert load.largest_request_blocks == 252
    assert load.largest_expected_blocks == 66, "6 tokens and 255 more: the mean of any chat"
    assert load.stuck_s == 2.0, "the step was completed at 1.0"
    drive(scheduler, limit=3000)
    load = scheduler.load(6, 17, 9.0)
    assert load.stuck_s == 0.0 and load.demand_blocks == 0 and load.largest_request_blocks == 0
    assert totals.mean_output_tokens != PRIOR_OUTPUT_TOKENS


def test_growth_is_expected_from_what_finished() -> None:
    scheduler = make(capacity=1000)
    scheduler.totals.mean_output_tokens = 21.0
    scheduler.add(request("a", 8, max_tokens=40))
    finish(scheduler, plan_of(scheduler))
    assert scheduler.load(1, 1, 0.0).growth_blocks == 5, "28 tokens in 7 blocks, 2 there"


def test_steps_of_another_group_are_a_bug() -> None:
    scheduler = make()
    scheduler.add(request("a", 1))
    plan = plan_of(scheduler)
    with pytest.raises(AssertionError):
        scheduler.complete(StepResult(GroupId(4), plan.step_id, ()), 0.0)


@pytest.mark.parametrize(("num_requests", "has_backlog"), [(2, False), (3, True)])
def test_formation_is_told_that_more_wait_than_memory_admits(
    num_requests: int, has_backlog: bool
) -> None:
    seen: list[FormationView] = []

    def note(view: FormationView, ongoing: OngoingFormation | None) -> tuple[Microbatch, None]:
        seen.append(view)
        return form_token_budget(view), None

    scheduler = Scheduler(SchedulerConfig(), GROUP, 2, 4, 17, frozenset({EOS}), 64, form_batch=note)
    for i in range(num_requests):
        scheduler.add(request(str(i), 30))  # 8 of 17 blocks
    scheduler.schedule(0.0)
    assert seen[0].has_backlog is has_backlog and len(seen[0].prompts) == 2


@pytest.mark.parametrize(
    ("stages", "lookahead", "num_prompt", "sizes"),
    [
        (2, True, 40, [13, 13, 14]),
        (2, False, 40, [32, 8]),
        (1, True, 40, [32, 8]),
        (2, True, 20, [20]),
    ],
    ids=["pipeline with a queue", "switched off", "one stage", "too little to balance"],
)
def test_lookahead_is_used_in_pipelines_with_a_queue(
    stages: int, lookahead: bool, num_prompt: int, sizes: list[int]
) -> None:
    limits = {"max_num_batched_tokens": 32, "min_microbatch_tokens": 4, "lookahead": lookahead}
    scheduler = make(stages, **limits)
    scheduler.add(request("a", num_prompt))
    found: list[int] = []
    while sum(found) < num_prompt:
        plan = plan_of(scheduler)
        found.append(plan.num_tokens)
        finish(scheduler, plan)
    assert found == sizes


@pytest.mark.parametrize("stages", [1, 2])
def test_a_request_without_a_token_ends_with_an_error_and_alone(stages: int) -> None:
    scheduler = make(stages)
    scheduler.add(request("good", 3, max_tokens=3))
    scheduler.add(request("bad", 5, 0.0, max_tokens=9))
    outputs: list[TokenOutput] = []
    while scheduler.has_work:
        plans = [plan for plan in (scheduler.schedule(0.0) for _ in range(stages)) if plan]
        for plan in plans:
            tokens = tuple(
                SampledToken(
                    c.request_id, 7 if c.request_id == "good" or c.start == 0 else None, None
                )
                for c in plan.chunks
                if c.samples
            )
            outputs += scheduler.complete(StepResult(GROUP, plan.step_id, tokens), 1.0)
            scheduler.check()
    assert [output for output in outputs if output.request_id == "bad"] == [
        TokenOutput(RequestId("bad"), 0, 7, None, None, computed_s=1.0),
        TokenOutput(RequestId("bad"), 1, None, None, FinishReason.ERROR),
    ]
    good = [output for output in outputs if output.request_id == "good"]
    assert [o.finish_reason for o in good] == [None, None, FinishReason.LENGTH]
    assert scheduler.totals.generation_tokens == 4
    assert scheduler.used_blocks == 0


def test_only_what_waits_without_kv_is_given_back() -> None:
    scheduler = make(capacity=8, max_num_seqs=1)
    for name in ("runs", "waits", "waits too"):
        scheduler.add(request(name, 4))
    scheduler.schedule(0.0)
    names = [RequestId(name) for name in ("runs", "waits too", "unknown", "waits")]
    assert scheduler.give_back(names) == ("waits too", "waits")
    scheduler.check()
    assert scheduler.load(0, 0, 0.0).num_waiting == 0
    scheduler.add(request("waits", 4))
    scheduler.check()


COST = CostCoefficients(0.0, 0.01, 0.05, 0.05)


def queue_behind_decodes(stages: int, **config: Any) -> Scheduler:
    """Four that decode, and a long queue of prompts."""
    scheduler = make(stages, max_num_seqs=32, cost=COST, **config)
    for i in range(4):
        scheduler.add(request(f"d{i}", 3, max_tokens=40))
    for _ in range(2):
        finish(scheduler, plan_of(scheduler))
    for i in range(2):
        scheduler.add(request(f"p{i}", 58, 1.0))
    return scheduler


@pytest.mark.parametrize(("tpot_slo_s", "period"), [(None, 1), (0.2, 1), (0.6, 2), (0.9, 4)])
def test_decodes_take_turns_while_prompts_queue(tpot_slo_s: float | None, period: int) -> None:
    scheduler = queue_behind_decodes(1, tpot_slo_s=tpot_slo_s)
    ran: list[set[str]] = []
    for _ in range(4):
        plan = plan_of(scheduler)
        ran.append({name for name, _, _, _ in chunks(plan) if name.startswith("d")})
        finish(scheduler, plan)
    for first in range(4 - period + 1):
        turns = [name for step in ran[first : first + period] for name in step]
        assert sorted(turns) == ["d0", "d1", "d2", "d3"], "everybody once in a period"


def test_no_decode_waits_for_prompts_where_memory_is_short() -> None:
    scheduler = queue_behind_decodes(1, capacity=20, tpot_slo_s=0.9)
    names = [name for name, _, _, _ in chunks(plan_of(scheduler))]
    assert {"d0", "d1", "d2", "d3"} <= set(names)
