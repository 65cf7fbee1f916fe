"""The real engine says transformers' tokens while a pipeline of four parts into two pairs."""

import asyncio
import contextlib
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kunserve.cluster.local import LocalCluster
from kunserve.core.config import OverloadConfig
from kunserve.core.errors import InvalidRequest
from kunserve.core.request import SamplingParams
from tests.e2e.test_engine_transitions import (
    PROMPTS,
    VOCAB,
    Answers,
    config_of,
    greedy_after,
    run,
)
from tests.tiny_models import tiny_model

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
NUM_TOKENS_EACH = 60
NUM_RUNNING = 3


def _num_running(answers: Answers) -> int:
    return sum(len(tokens) < NUM_TOKENS_EACH for tokens in answers.tokens.values())


@pytest.mark.slow
@pytest.mark.timeout(300)  # four instances compute on however few cores there are
def test_tokens_are_those_of_transformers_while_four_become_pairs(tmp_path: Path) -> None:
    num_layers = 9
    model = tiny_model("llama", num_layers)
    model.save_pretrained(tmp_path)
    unit_bytes = 2 * 8 * model.config.num_key_value_heads * 32 * 4
    config = config_of(str(tmp_path), "float32", 4, 24 * num_layers * unit_bytes)
    prompts: dict[str, list[int]] = {}
    # As long as anybody runs there is too much to part whole, and little enough for two pairs.
    steps = OverloadConfig(
        restore_below=1e-9, halve_below=0.8, restore_hold_s=0.0, dwell_s=0.0, link_gbps=1.0
    )

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        async def feed() -> None:
            """Nobody is idle until pairs stand: whole instances come back then."""
            for number in count():
                name = f"x{number}"
                prompts[name] = PROMPTS[f"r{number % len(PROMPTS)}"]
                answers.ask(name, prompts[name], NUM_TOKENS_EACH, GREEDY)
                while _num_running(answers) > NUM_RUNNING:
                    await asyncio.sleep(0.002)

        feeding = asyncio.create_task(feed())
        async with asyncio.timeout(120.0):
            while [len(group.stages) for group in cluster.state().groups] != [2, 2] or (
                4 not in (len(r.groups_before[0].stages) for r in cluster.state().transitions)
            ):
                with contextlib.suppress(InvalidRequest):
                    await cluster.drop(None)
                await asyncio.sleep(0.002)
        feeding.cancel()

    answers = run(replace(config, overload=steps), VOCAB, story)
    for name, prompt in prompts.items():
        assert len(answers.tokens[name]) == NUM_TOKENS_EACH
        assert answers.tokens[name] == greedy_after(model, prompt, answers.tokens[name]), name
