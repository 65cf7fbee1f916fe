"""What ``drop`` is compared with makes the same tokens: a tiny model in real processes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import ClusterConfig, OverloadConfig
from kunserve.core.request import SamplingParams
from tests.e2e.tokens.test_engine_transitions import NUM_TOKENS, PROMPTS, Answers, config_of, run
from tests.tiny_models import VOCAB, greedy_after, tiny_model

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.mark.parametrize(
    ("policy", "cluster_config"),
    [
        ("migrate", ClusterConfig(num_instances=2, dispatch_policy="round-robin")),
        ("recompute", ClusterConfig(num_instances=2, pipeline_stages=2)),
    ],
)
def test_tokens_are_those_of_transformers(
    policy: str, cluster_config: ClusterConfig, tmp_path: Path
) -> None:
    model = tiny_model("llama", 4)
    model.save_pretrained(tmp_path)
    unit_bytes = 2 * 8 * model.config.num_key_value_heads * 32 * 4
    config = replace(
        config_of(str(tmp_path), "float32", 2, 24 * 4 * unit_bytes),
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
