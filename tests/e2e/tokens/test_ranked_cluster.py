"""A served cluster whose instances have several ranks each: tokens through host memory, and what
is refused; ``test_tokens_through_a_drop`` has its drops and the deaths of its ranks.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import KunServeConfig, OverloadConfig, SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import ConfigError
from kunserve.core.plan import Measured, SwapPlan
from kunserve.core.request import SamplingParams
from kunserve.server.start.launch import launch
from tests.e2e.tokens.asked_cluster import (
    NUM_TOKENS,
    PROMPTS,
    QUEUED,
    QUEUED_TOKENS,
    Answers,
    config_of,
    run,
)
from tests.tiny_models import VOCAB, greedy_after, prompt_logprobs, tiny_model

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
NUM_LAYERS = 5


def ranked(config: KunServeConfig, num_ranks: int) -> KunServeConfig:
    instance = replace(config.instance, tensor_parallel_size=num_ranks)
    return replace(config, instance=instance)


def config_in(
    folder: Path, kind: str, num_ranks: int, num_instances: int, device: str = "cpu"
) -> KunServeConfig:
    """Memory for 192 tokens in each instance: some are preempted."""
    model = tiny_model(kind, NUM_LAYERS)
    model.save_pretrained(folder)
    kv_heads = max(num_ranks, model.config.num_key_value_heads)
    kv_bytes = 24 * NUM_LAYERS * 2 * 8 * kv_heads * 32 * 4
    config = config_of(str(folder), "float32", num_instances, kv_bytes, device=device)
    return ranked(config, num_ranks)


def check_tokens(kind: str, answers: Answers) -> None:
    model = tiny_model(kind, NUM_LAYERS)
    for name, prompt in (PROMPTS | QUEUED).items():
        if name in answers.tokens:
            tokens = answers.tokens[name]
            assert len(tokens) == NUM_TOKENS.get(name, QUEUED_TOKENS)
            assert tokens == greedy_after(model, prompt, tokens), name
            scores = [row.logprob for row in answers.scores[name]]
            assert scores == pytest.approx(prompt_logprobs(model, prompt), abs=1e-3), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_through_host_memory(tmp_path: Path) -> None:
    overload = OverloadConfig(policy="swap")
    cost = CostCoefficients(attention_s=0.0, token_s=1e-4, chunk_s=1e-4, shared_s=1e-4)
    config = replace(
        config_in(tmp_path, "llama3", 2, 1),
        scheduler=SchedulerConfig(max_num_batched_tokens=48),
        overload=overload,
    )
    measured = Measured(cost, SwapPlan.of(overload, 1e8, None))

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        for name in PROMPTS:
            answers.ask(name, PROMPTS[name], NUM_TOKENS[name], GREEDY)
        await answers.all()
        async with asyncio.timeout(10.0):
            while not cluster.state().loads[0].totals.swapped_out_blocks:
                await asyncio.sleep(0.01)

    check_tokens("llama3", run(config, VOCAB, story, measured=measured))


def test_what_cannot_be_parted_is_refused_before_anything_is_started() -> None:
    config = ranked(config_of("smollm2-135m", "float32", 1, 64 << 20), 2)
    with pytest.raises(ConfigError, match="9 attention heads, which it does not divide; .* over 3"):
        asyncio.run(launch(config))
