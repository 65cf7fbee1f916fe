"""The real body swaps and parks: a tiny float32 model's tokens are still those of transformers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import OverloadConfig, SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.plan import Measured, SwapPlan
from kunserve.core.request import SamplingParams
from tests.e2e.tokens.asked_cluster import (
    NUM_TOKENS,
    PROMPTS,
    SEEDED,
    Answers,
    config_of,
    run,
)
from tests.tiny_models import VOCAB, greedy_after, tiny_model

SWAP = OverloadConfig(policy="swap")
PARK = OverloadConfig(policy="park", max_park_s=0.02)
COST = CostCoefficients(attention_s=0.0, token_s=1e-4, chunk_s=1e-4, shared_s=1e-4)


@pytest.mark.parametrize("overload", [SWAP, PARK], ids=["swap", "park"])
def test_tokens_are_those_of_transformers_through_host_memory(
    overload: OverloadConfig, tmp_path: Path
) -> None:
    model = tiny_model("llama", 4)
    model.save_pretrained(tmp_path)
    unit_bytes = 2 * 8 * model.config.num_key_value_heads * 32 * 4
    config = replace(
        config_of(str(tmp_path), "float32", 1, 24 * 4 * unit_bytes),
        scheduler=SchedulerConfig(max_num_batched_tokens=48),
        overload=overload,
    )
    measured = Measured(COST, SwapPlan.of(overload, 1e8, None))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        for name, prompt in PROMPTS.items():
            answers.ask(name, prompt, NUM_TOKENS[name], greedy)
        if overload is SWAP:
            answers.ask("seeded", PROMPTS["r1"], 60, SEEDED)
        await answers.all()
        async with asyncio.timeout(10.0):
            while not cluster.state().loads[0].totals.num_preemptions:
                await asyncio.sleep(0.01)
        load = cluster.state().loads[0]
        assert load.totals.lost_tokens == 0, "swapped, not thrown away"
        assert load.totals.swapped_out_blocks and sum(load.totals.pauses) > 0

    async def alone(cluster: LocalCluster, answers: Answers) -> None:
        answers.ask("seeded", PROMPTS["r1"], 60, SEEDED)

    answers = run(config, VOCAB, story, measured=measured)
    for name, prompt in PROMPTS.items():
        assert len(answers.tokens[name]) == NUM_TOKENS[name]
        assert answers.tokens[name] == greedy_after(model, prompt, answers.tokens[name]), name
    if overload is not SWAP:
        return
    seeded = run(config, VOCAB, alone, measured=measured)
    assert answers.tokens["seeded"] == seeded.tokens["seeded"]
    assert answers.scores["seeded"] == seeded.scores["seeded"]
