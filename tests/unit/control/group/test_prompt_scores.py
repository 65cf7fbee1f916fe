"""Which scores of a prompt a scheduler has computed, and what becomes of them."""

from kunserve.control.group.scheduler import Scheduler
from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.prompt_scores import pack_scores
from kunserve.core.request import FinishReason, TokenLogprobs
from kunserve.core.step import SampledToken, StepPlan, StepResult
from tests.unit.control.group.test_scheduler import GROUP, make, plan_of, request

R = RequestId("r")


def scored(plan: StepPlan) -> list[tuple[int, int]]:
    return [(run.first, run.end) for run in plan.scored]


def run(scheduler: Scheduler, plan: StepPlan, broken: bool = False) -> list[TokenOutput]:
    """As the last stage would."""
    tokens = tuple(SampledToken(c.request_id, 7, None) for c in plan.chunks if c.samples)
    found = [
        pack_scores(name, first, 0, [TokenLogprobs(-1.0, 1, ())] * (end - first))
        for name, first, end in plan.scored
    ]
    scores = tuple(None if broken else one for one in found)
    outputs = scheduler.complete(StepResult(GROUP, plan.step_id, tokens, scores), 1.0)
    scheduler.check()
    return outputs


def test_every_chunk_has_its_scores_and_the_last_token_none() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("r", 18, num_prompt_logprobs=2))
    plans = []
    for _ in range(4):
        plans.append(plan_of(scheduler))
        run(scheduler, plans[-1])
        first = [(one.first, one.end) for one in scheduler.take_scores()]
        assert first == scored(plans[-1])
    assert [scored(plan) for plan in plans] == [[(0, 8)], [(8, 16)], [(16, 17)], []]
    assert plans[0].started[0].token_ids == tuple(range(100, 118))


def test_nothing_is_computed_for_who_did_not_ask_or_has_one_token() -> None:
    scheduler = make()
    scheduler.add(request("plain", 6))
    scheduler.add(request("short", 1, num_prompt_logprobs=0))
    plan = plan_of(scheduler)
    assert plan.scored == () and [start.token_ids for start in plan.started] == [(), ()]


def test_a_re_run_computes_the_missing_scores_only() -> None:
    scheduler = make(max_num_batched_tokens=8)
    known = request("r", 18, num_prompt_logprobs=0)
    scheduler.add(type(known)(R, known.prompt_token_ids, known.sampling, 0.0, num_scored=11))
    plans = []
    for _ in range(3):
        plans.append(plan_of(scheduler))
        run(scheduler, plans[-1])
    assert [scored(plan) for plan in plans] == [[], [(11, 16)], [(16, 17)]]


def test_what_a_preempted_request_has_is_handed_over() -> None:
    scheduler = make(stages=2, max_num_batched_tokens=8)
    scheduler.add(request("r", 18, num_prompt_logprobs=0))
    run(scheduler, plan_of(scheduler))
    scheduler._holders._preempt(scheduler._live[R])
    (state,) = scheduler.export()
    assert (state.num_computed, state.request.num_scored) == (0, 8)


def test_scores_computed_twice_are_taken_once() -> None:
    scheduler = make(stages=2, max_num_batched_tokens=8)
    scheduler.add(request("r", 18, num_prompt_logprobs=0))
    before = plan_of(scheduler)
    scheduler._holders._preempt(scheduler._live[R])
    after = plan_of(scheduler)
    assert scored(before) == scored(after) == [(0, 8)]
    run(scheduler, before)
    run(scheduler, after)
    assert [(one.first, one.end) for one in scheduler.take_scores()] == [(0, 8)]


def test_a_row_without_a_finite_logit_ends_its_request_and_no_other() -> None:
    scheduler = make(stages=2)
    scheduler.add(request("good", 3, max_tokens=1))
    scheduler.add(request("r", 5, num_prompt_logprobs=0))
    outputs = run(scheduler, plan_of(scheduler), broken=True)
    assert outputs == [
        TokenOutput(R, 0, None, None, FinishReason.ERROR),
        TokenOutput(RequestId("good"), 0, 7, None, FinishReason.LENGTH, computed_s=1.0),
    ]
    assert scheduler.used_blocks == 0 and scheduler.take_scores() == ()
    assert scheduler.totals.generation_tokens == 1


def test_kv_of_a_prompt_that_cannot_be_scored_is_not_kept() -> None:
    scheduler = make(enable_prefix_caching=True)
    scheduler.add(request("r", 18, num_prompt_logprobs=0))
    (failed,) = run(scheduler, plan_of(scheduler), broken=True)
    assert failed.finish_reason is FinishReason.ERROR
    assert scheduler.cached_blocks == 0


def test_a_step_that_overtakes_another_waits_for_it() -> None:
    """Prefill without a sample needs no output head, so its result may come first."""
    scheduler = make(stages=2, max_num_batched_tokens=8)
    scheduler.add(request("r", 18, num_prompt_logprobs=0))
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert run(scheduler, second) == [] and scheduler.take_scores() == ()
    assert scheduler.num_in_flight == 2
    run(scheduler, first)
    assert [(one.first, one.end) for one in scheduler.take_scores()] == [(0, 8), (8, 16)]
    assert scheduler.num_in_flight == 0


def test_what_the_overtaken_step_ends_has_no_scores_after_it() -> None:
    scheduler = make(stages=2, max_num_batched_tokens=8)
    scheduler.add(request("r", 18, num_prompt_logprobs=0))
    first, second = plan_of(scheduler), plan_of(scheduler)
    run(scheduler, second)
    (failed,) = run(scheduler, first, broken=True)
    assert failed.finish_reason is FinishReason.ERROR and scheduler.take_scores() == ()
    assert scheduler.num_in_flight == 0
