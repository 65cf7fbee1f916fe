"""Guesses in a scheduler: which chunks have them, and what becomes of right and wrong ones."""

from typing import Any

import pytest

from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig, SpeculativeConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Measured
from kunserve.core.request import FinishReason, Request, SamplingParams, StructuredOutput
from kunserve.core.step import SampledToken, StepPlan, StepResult

GROUP, EOS, BLOCK = GroupId(0), 99, 8
CHEAP = CostCoefficients(attention_s=0.0, token_s=1e-6, chunk_s=1.0, shared_s=1.0)
"""Every row but the first costs nothing."""
COUNT = tuple(range(10, 16))
"""A prompt that says it twice, so that the lookup knows what comes."""


def make(stages: int = 1, capacity: int = 50, **config: Any) -> Scheduler:
    settings = {"speculative_config": SpeculativeConfig(num_speculative_tokens=4)}
    return Scheduler(
        SchedulerConfig(8, 64, **(settings | config)),
        GROUP,
        stages,
        BLOCK,
        capacity,
        frozenset({EOS}),
        64,
        measured=Measured(CHEAP),
    )


def request(name: str = "a", prompt: tuple[int, ...] = (*COUNT, 7), **sampling: Any) -> Request:
    return Request(
        RequestId(name), prompt, SamplingParams(**({"max_tokens": 30} | sampling)), float(ord(name))
    )


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.check()
    return plan


def finish(
    scheduler: Scheduler, plan: StepPlan, *tokens: int | None, name: str = "a"
) -> list[TokenOutput]:
    """The step gives these tokens to one request."""
    assert len(tokens) == plan.num_sampled
    sampled = tuple(SampledToken(RequestId(name), token, None) for token in tokens)
    outputs = scheduler.complete(StepResult(GROUP, plan.step_id, sampled), 0.0)
    scheduler.check()
    return outputs


def begun(scheduler: Scheduler, **sampling: Any) -> None:
    """A request whose output begins as its prompt did: 10, 11."""
    scheduler.add(request(**sampling))
    finish(scheduler, plan_of(scheduler), 10)
    finish(scheduler, plan_of(scheduler), 11)


def test_a_decode_has_guesses_behind_it() -> None:
    scheduler = make()
    begun(scheduler)
    plan = plan_of(scheduler)
    (chunk,) = plan.chunks
    assert chunk == (RequestId("a"), 8, 4, 4) and chunk.num_guesses == 3
    assert scheduler.token_ids_of(plan).tolist() == [11, 12, 13, 14]
    assert [row.num_before for row in plan.sampled_rows] == [9, 10, 11, 12]


def test_right_guesses_give_several_tokens_in_order() -> None:
    scheduler = make()
    begun(scheduler)
    outputs = finish(scheduler, plan_of(scheduler), 12, 13, 14, 15)
    assert [(one.position, one.token_id) for one in outputs] == [
        (2, 12),
        (3, 13),
        (4, 14),
        (5, 15),
    ]
    load = scheduler.load(1, 1, 0.0)
    done = load.totals
    assert (done.num_drafts, done.num_draft_tokens, done.num_accepted_tokens) == (1, 3, 3)
    assert done.generation_tokens == 6 and done.prompt_tokens == 7
    assert plan_of(scheduler).chunks[0].start == 12, "KV of the right ones is there"


def test_what_comes_after_a_wrong_guess_is_not_taken() -> None:
    scheduler = make()
    begun(scheduler)
    outputs = finish(scheduler, plan_of(scheduler), 12, 50, 14, None)
    assert [one.token_id for one in outputs] == [12, 50]
    assert scheduler.load(1, 1, 0.0).totals.num_accepted_tokens == 1
    plan = plan_of(scheduler)
    assert plan.chunks[0] == (RequestId("a"), 10, 1, 1), "its place is computed again"
    assert scheduler.token_ids_of(plan).tolist() == [50]


def test_guesses_end_with_the_block() -> None:
    scheduler = make()
    scheduler.add(request(prompt=(*COUNT, 7, *COUNT)))
    finish(scheduler, plan_of(scheduler), 7)
    plan = plan_of(scheduler)
    assert plan.chunks[0] == (RequestId("a"), 13, 3, 3), "up to token 16"
    assert scheduler.used_blocks == 2


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({"max_tokens": 4}, [12, 13], FinishReason.LENGTH),
        ({"stop_token_ids": (13,)}, [12, 13], FinishReason.STOP),
    ],
)
def test_the_end_among_guesses(
    sampling: dict[str, Any], tokens: list[int], reason: FinishReason
) -> None:
    scheduler = make()
    begun(scheduler, **sampling)
    plan = plan_of(scheduler)
    right = (12, 13, 14, 15)[: plan.num_sampled]
    outputs = finish(scheduler, plan, *right)
    assert [one.token_id for one in outputs] == tokens
    assert [one.finish_reason for one in outputs] == [None, reason]
    finish(scheduler, plan_of(scheduler))
    assert not scheduler.has_work


def test_no_more_is_guessed_than_may_come() -> None:
    scheduler = make()
    begun(scheduler, max_tokens=4)
    assert plan_of(scheduler).chunks[0].num_guesses == 1
    other = make()
    begun(other, max_tokens=3)
    assert plan_of(other).chunks[0].num_guesses == 0


def test_a_token_that_cannot_be_chosen_ends_the_request() -> None:
    scheduler = make()
    begun(scheduler)
    outputs = finish(scheduler, plan_of(scheduler), 12, None, 14, 15)
    assert [one.finish_reason for one in outputs] == [None, FinishReason.ERROR]


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"bad_words": ((1, 2),)},
        {"structured": StructuredOutput("regex", "a*")},
    ],
)
def test_who_depends_on_earlier_outputs_gets_no_guesses(sampling: dict[str, Any]) -> None:
    scheduler = make()
    begun(scheduler, **sampling)
    assert plan_of(scheduler).chunks[0].num_guesses == 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"num_logprobs": 2},
        {"min_tokens": 9},
        {"logit_bias": ((1, 2.0),)},
        {"allowed_token_ids": (1, 2)},
        {"bad_words": ((5,),)},
    ],
)
def test_everybody_else_gets_some(sampling: dict[str, Any]) -> None:
    scheduler = make()
    begun(scheduler, **sampling)
    assert plan_of(scheduler).chunks[0].num_guesses == 3


def test_a_step_with_prompts_has_no_guesses() -> None:
    scheduler = make()
    begun(scheduler)
    scheduler.add(request("b", prompt=(1, 2, 3)))
    plan = plan_of(scheduler)
    assert [chunk.num_sampled for chunk in plan.chunks] == [1, 1]


def test_nothing_is_guessed_without_the_flag() -> None:
    scheduler = make(speculative_config=None)
    begun(scheduler)
    assert plan_of(scheduler).chunks[0] == (RequestId("a"), 8, 1, 1)


def test_guesses_in_flight_of_a_request_that_is_gone() -> None:
    scheduler = make(stages=2)
    begun(scheduler)
    plan = plan_of(scheduler)
    scheduler.abort(RequestId("a"))
    assert finish(scheduler, plan, 12, 13, 14, 15) == []
    assert scheduler.load(1, 1, 0.0).totals.num_drafts == 0
