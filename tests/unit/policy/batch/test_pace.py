"""How large steps are, and how often decodes run, under an objective for TPOT."""

from dataclasses import replace
from typing import Any

import pytest

from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch.batch_form import (
    CHUNK_TOKENS,
    FormationView,
    PromptWork,
    form_token_budget,
)
from kunserve.policy.batch.cost import batch_cost, decode_cost
from kunserve.policy.batch.lookahead import Lookahead, form_all, form_lookahead
from kunserve.policy.batch.pace import Pace, PaceView, choose_pace

GPU = CostCoefficients(6e-9, 1.05e-4, 0.016, 0.016, 1.4e-7, 5.7e-5)
"""Qwen2.5-14B on an A800: 2,048 tokens take 0.23 s."""
CPU = CostCoefficients(3.1e-7, 4.9e-4, 6.7e-3, 6.7e-3, 9.6e-7, 1.6e-4)
"""SmolLM2-135M on one core: 512 tokens take 0.26 s."""


def view(**fields: Any) -> PaceView:
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 4096,
        "num_queued_tokens": 16_384,
        "prefix": 0,
        "num_decodes": 50,
        "num_context_tokens": 100_000,
        "num_stages": 1,
        "is_memory_short": False,
    }
    return PaceView(**(defaults | fields))


@pytest.mark.parametrize("cost", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("slo_s", [0.3, 0.4])
@pytest.mark.parametrize("prefix", [0, 4000])
@pytest.mark.parametrize("is_calm", [False, True])
def test_a_step_takes_the_objective_and_half_of_it_where_few_queue(
    cost: CostCoefficients, slo_s: float, prefix: int, is_calm: bool
) -> None:
    queued = 50 if is_calm else 16_384
    now = view(prefix=prefix, num_queued_tokens=queued, num_decodes=10, num_context_tokens=20_000)
    prompt = choose_pace(now, slo_s, cost).max_num_tokens - 10
    took_s = batch_cost(cost, [2000] * 10 + [prefix], [1] * 10 + [prompt], [1] * 11)
    asked_s = slo_s / 2 if is_calm else slo_s
    assert 0.85 * asked_s < took_s < 1.01 * asked_s


def test_steps_grow_with_the_queue() -> None:
    queues = (100, 2000, 4000, 6000, 50_000)
    sizes = [choose_pace(view(num_queued_tokens=n), 0.5, GPU).max_num_tokens for n in queues]
    calm, full = sizes[0], sizes[-1]
    assert sizes == [calm, calm, 2050, 3050, full] and calm < 2050 and full > 3050


@pytest.mark.parametrize("slo_s", [0.2, 10.0])
def test_the_users_limit_stands(slo_s: float) -> None:
    assert choose_pace(view(max_num_batched_tokens=512), slo_s, GPU).max_num_tokens == 512


def test_short_memory_keeps_decodes_fast() -> None:
    calm = choose_pace(view(num_queued_tokens=0), 0.5, GPU)
    assert choose_pace(view(is_memory_short=True), 0.5, GPU) == calm
    assert choose_pace(view(is_memory_short=True), 5.0, GPU).decode_rounds == 1


@pytest.mark.parametrize("queued", [0, 16_384])
def test_prompts_go_on_where_decodes_take_half_of_the_objective(queued: int) -> None:
    """A prompt that stood still would hold its memory, and memory would stay short."""
    busy = view(num_decodes=256, num_context_tokens=512_000, num_queued_tokens=queued)
    fixed_s = decode_cost(GPU, 256, 512_000) + GPU.shared_s
    assert fixed_s > 0.2 / 2
    for is_short in (False, True):
        size = choose_pace(replace(busy, is_memory_short=is_short), 0.2, GPU).max_num_tokens
        assert size - 256 >= 0.9 * (0.2 - fixed_s) / 4 / GPU.token_s


def test_an_objective_that_decodes_alone_exceed_leaves_prompts_a_chunk() -> None:
    assert choose_pace(view(num_decodes=300), 0.001, CPU) == Pace(300 + CHUNK_TOKENS, 1)


def test_decodes_skip_steps_that_may_not_be_larger() -> None:
    rounds = [choose_pace(view(), slo_s, GPU).decode_rounds for slo_s in (0.4, 0.6, 1.1, 9.0)]
    assert rounds == [1, 1, 2, 4], "a full step takes 0.5 s, and the queue has four"


def test_nobody_skips_steps_that_no_prompt_needs() -> None:
    assert choose_pace(view(num_queued_tokens=4000), 9.0, GPU).decode_rounds == 1


def form_view(**fields: Any) -> FormationView:
    defaults: dict[str, Any] = {
        "decodes": [500] * 60,
        "prompts": [PromptWork(0, 3000)] * 4,
        "num_decodes_in_flight": 0,
        "num_in_flight": 0,
        "num_stages": 1,
        "max_num_tokens": 512,
        "max_num_seqs": 256,
    }
    return FormationView(**(defaults | fields))


@pytest.mark.parametrize(("rounds", "num_decodes"), [(1, 60), (2, 30), (4, 15), (7, 9)])
def test_a_round_in_so_many_decodes_run(rounds: int, num_decodes: int) -> None:
    batch = form_token_budget(form_view(decode_rounds=rounds))
    assert len(batch.decodes) == num_decodes
    assert batch.prompts[0].num_tokens == 512 - num_decodes, "prompts get their place"


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_microbatches_of_a_pipeline_stay_equal(rounds: int, num_stages: int) -> None:
    how = Lookahead(GPU, 64)
    now = form_view(decode_rounds=rounds, num_stages=num_stages)
    assert form_all(now, how).imbalance < 1.05
    batch, _ = form_lookahead(now, None, how)
    assert len(batch.decodes) == pytest.approx(60 / num_stages / rounds, abs=2)
