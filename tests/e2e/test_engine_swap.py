"""The real body swaps: a tiny float32 model's tokens are those of transformers all the same."""

import asyncio
from dataclasses import replace
from pathlib import Path

from kunserve.cluster.local import LocalCluster
from kunserve.core.config import OverloadConfig, SchedulerConfig, SwapConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.request import SamplingParams
from tests.e2e.test_engine_transitions import (
    NUM_TOKENS,
    PROMPTS,
    SEEDED,
    Answers,
    config_of,
    run,
)
from tests.tiny_models import VOCAB, expected_tokens, tiny_model

COST = CostCoefficients(attention_s=0.0, token_s=1e-4, chunk_s=1e-4, shared_s=1e-4)


def test_tokens_are_those_of_transformers_through_host_memory(tmp_path: Path) -> None:
    model = tiny_model("llama", 4)
    model.save_pretrained(tmp_path)
    unit_bytes = 2 * 8 * model.config.num_key_value_heads * 32 * 4
    config = replace(
        config_of(str(tmp_path), "float32", 1, 24 * 4 * unit_bytes),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=48, cost=COST, swap=SwapConfig(host_bytes_per_s=1e8)
        ),
        overload=OverloadConfig(policy="swap"),
    )
    greedy = SamplingParams(max_tokens=1, temperature=0.0)

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        for name, prompt in PROMPTS.items():
            answers.ask(name, prompt, NUM_TOKENS[name], greedy)
        answers.ask("seeded", PROMPTS["r1"], 60, SEEDED)
        await answers.all()
        async with asyncio.timeout(10.0):
            while not cluster.state().loads[0].num_preemptions:
                await asyncio.sleep(0.01)
        assert cluster.state().loads[0].lost_tokens == 0, "swapped, not thrown away"

    async def alone(cluster: LocalCluster, answers: Answers) -> None:
        answers.ask("seeded", PROMPTS["r1"], 60, SEEDED)

    answers = run(config, VOCAB, story)
    for name, prompt in PROMPTS.items():
        assert answers.tokens[name] == expected_tokens(model, prompt, NUM_TOKENS[name]), name
    seeded = run(config, VOCAB, alone)
    assert answers.tokens["seeded"] == seeded.tokens["seeded"]
    assert answers.scores["seeded"] == seeded.scores["seeded"]
