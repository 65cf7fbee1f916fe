import math

import pytest

from kunserve.control.cluster.requests.prompt_share import PromptShare
from kunserve.core.cost import CostCoefficients
from kunserve.policy.drop.worth import LATELY_S
from tests.unit.control.cluster.brain import Brain

COST = CostCoefficients(attention_s=0.0, token_s=1e-3, chunk_s=0.0, shared_s=0.0)


def watched(num_instances: int, cost: CostCoefficients | None = COST) -> tuple[Brain, PromptShare]:
    brain = Brain(num_instances)
    return brain, PromptShare(512, cost, brain.controller.placement)


def test_tokens_are_told_as_time_of_all_instances() -> None:
    """Two instances, of which one computes 600 prompt tokens a second: 0.6 of its time."""
    brain, prompts = watched(2)
    brain.report(1)
    for number in range(200):
        brain.report(0, prompt_tokens=5000 + 60 * number)
        prompts.look(brain.now_s)
        prompts.look(brain.now_s)
    assert prompts.share == pytest.approx(0.3, rel=0.01), "what came before counts nothing"
    brain.now_s += LATELY_S
    prompts.look(brain.now_s)
    assert prompts.share == pytest.approx(0.3 / math.e, rel=0.05), "it fades"


def test_an_instance_that_leads_another_group_goes_on_counting() -> None:
    brain, prompts = watched(2)
    brain.report(1)
    brain.report(0, prompt_tokens=1000)
    prompts.look(brain.now_s)
    brain.controller.force_drop(None, brain.now_s)
    brain.complete()
    brain.report(0, after_s=0.2, prompt_tokens=1100)
    prompts.look(brain.now_s)
    weight = 1.0 - math.exp(-0.2 / LATELY_S)
    assert prompts.share == pytest.approx(weight * 0.25), "100 tokens in 0.2 s"
    brain.report(0, after_s=0.2, prompt_tokens=50)
    prompts.look(brain.now_s)
    assert 0.0 < prompts.share < weight * 0.25, "a counter that begins anew takes nothing away"


def test_where_costs_are_unknown_it_is_never_little() -> None:
    brain, prompts = watched(1, cost=None)
    brain.report(0)
    prompts.look(brain.now_s)
    assert math.isinf(prompts.share)
