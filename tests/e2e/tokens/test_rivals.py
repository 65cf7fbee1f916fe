"""What ``drop`` is compared with makes the same tokens: a tiny model in real processes."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import ClusterConfig, OverloadConfig
from kunserve.core.request import SamplingParams
from tests.e2e.tokens.asked_cluster import NUM_TOKENS, PROMPTS, Answers, config_of, run
from tests.tiny_models import VOCAB, greedy_after, tiny_model

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
FIRST_CHUNK = {"scheduler_reserve_full_isl": False, "max_num_batched_tokens": 16}
"""Requests are admitted when their first chunk fits, and thrown out half-way."""


@pytest.mark.parametrize(
    ("policy", "cluster_config", "limits"),
    [
        ("migrate", ClusterConfig(num_instances=2, dispatch_policy="round-robin"), {}),
        ("recompute", ClusterConfig(num_instances=2, pipeline_stages=2), {}),
        ("recompute", ClusterConfig(num_instances=2), FIRST_CHUNK),
        ("recompute", ClusterConfig(num_instances=2, pipeline_stages=2), FIRST_CHUNK),
    ],
)
def test_tokens_are_those_of_transformers(
    policy: str, cluster_config: ClusterConfig, limits: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model("llama", 4)
    model.save_pretrained(tmp_path)
    unit_bytes = 2 * 8 * model.config.num_key_value_heads * 32 * 4
    config = config_of(str(tmp_path), "float32", 2, 24 * 4 * unit_bytes)
    config = replace(
        config,
        scheduler=replace(config.scheduler, **limits),
        overload=OverloadConfig(policy=policy),  # type: ignore[arg-type]
        cluster=cluster_config,
    )

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        async with asyncio.timeout(60.0):
            while not all(
                len(group.stages) == cluster_config.pipeline_stages
                for group in cluster.state().groups
            ):
                await asyncio.sleep(0.01)
        for name, prompt in PROMPTS.items():
            answers.ask(name, prompt, NUM_TOKENS[name], GREEDY)
        await answers.all()
        assert len(cluster.state().groups) == 2 // cluster_config.pipeline_stages

    answers = run(config, VOCAB, story)
    for name, prompt in PROMPTS.items():
        assert len(answers.tokens[name]) == NUM_TOKENS[name]
        assert answers.tokens[name] == greedy_after(model, prompt, answers.tokens[name]), name


def test_an_instance_that_leaves_gives_its_requests_away(tmp_path: Path) -> None:
    """Of two ranks: one alone makes all tokens before anybody has looked."""
    num_ranks = 2
    model = tiny_model("llama", 4)
    model.save_pretrained(tmp_path)
    kv_heads = max(num_ranks, model.config.num_key_value_heads)
    config = config_of(str(tmp_path), "float32", 2, 400 * 4 * 2 * 8 * kv_heads * 32 * 4)
    config = replace(
        config,
        cluster=ClusterConfig(num_instances=2, dispatch_policy="round-robin"),
        instance=replace(config.instance, tensor_parallel_size=num_ranks),
    )
    prompts = dict(list(PROMPTS.items())[:4])

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        for name, prompt in prompts.items():
            answers.ask(name, prompt, 400, GREEDY)
        await answers.have(2)
        await cluster.scale(1)
        async with asyncio.timeout(60.0):
            while len(cluster.state().groups) > 1:
                await asyncio.sleep(0.01)
        assert cluster._controller.balance.num_moved > 0
        await answers.all()
        assert cluster.state().num_rerun == 0

    answers = run(config, VOCAB, story)
    for name, prompt in prompts.items():
        assert answers.tokens[name] == greedy_after(model, prompt, answers.tokens[name]), name
