"""The real body swaps and parks: a tiny float32 model's tokens are still those of transformers.

On a device KV goes to pinned memory beside steps, by copies that the stand-in makes as late as it
may.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import KunServeConfig, OverloadConfig, SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.plan import Measured, SwapPlan
from kunserve.core.request import SamplingParams
from kunserve_extras.torch_body.cuda.cards import STAND_IN
from tests.e2e.tokens.asked_cluster import (
    NUM_TOKENS,
    PROMPTS,
    SEEDED,
    Answers,
    config_of,
    run,
)
from tests.fakecuda.library import MIB, build
from tests.running import early_instance
from tests.running.forking import ForkingLauncher
from tests.tiny_models import VOCAB, greedy_after, tiny_model

SWAP = OverloadConfig(policy="swap")
PARK = OverloadConfig(policy="park", max_park_s=0.02)
COST = CostCoefficients(attention_s=0.0, token_s=1e-4, chunk_s=1e-4, shared_s=1e-4)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
POLICIES = pytest.mark.parametrize("overload", [SWAP, PARK], ids=["swap", "park"])


def config_in(
    folder: Path, overload: OverloadConfig, host_bytes: int | None, device: str = "cpu"
) -> tuple[Any, KunServeConfig, Measured]:
    """A saved model, and how it is served with too little memory."""
    model = tiny_model("llama", 4)
    model.save_pretrained(folder)
    unit_bytes = 2 * 8 * model.config.num_key_value_heads * 32 * 4
    config = replace(
        config_of(str(folder), "float32", 1, 24 * 4 * unit_bytes, device=device),
        scheduler=SchedulerConfig(max_num_batched_tokens=48),
        overload=overload,
    )
    return model, config, Measured(COST, SwapPlan.of(overload, 1e8, host_bytes))


async def all_of_it(cluster: LocalCluster, answers: Answers) -> None:
    for name, prompt in PROMPTS.items():
        answers.ask(name, prompt, NUM_TOKENS[name], GREEDY)
    await answers.all()
    async with asyncio.timeout(10.0):
        while not cluster.state().loads[0].totals.num_preemptions:
            await asyncio.sleep(0.01)
    load = cluster.state().loads[0]
    assert load.totals.lost_tokens == 0, "swapped, not thrown away"
    assert load.totals.swapped_out_blocks and sum(load.totals.pauses) > 0


def wrong_ones(model: Any, answers: Answers) -> list[str]:
    """Answers of another length, or with other tokens than those of transformers."""
    return [
        name
        for name, prompt in PROMPTS.items()
        if len(answers.tokens[name]) != NUM_TOKENS[name]
        or answers.tokens[name] != greedy_after(model, prompt, answers.tokens[name])
    ]


@POLICIES
def test_tokens_are_those_of_transformers_through_host_memory(
    overload: OverloadConfig, tmp_path: Path
) -> None:
    model, config, measured = config_in(tmp_path, overload, None)

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        if overload is SWAP:
            answers.ask("seeded", PROMPTS["r1"], 60, SEEDED)
        await all_of_it(cluster, answers)

    async def alone(cluster: LocalCluster, answers: Answers) -> None:
        answers.ask("seeded", PROMPTS["r1"], 60, SEEDED)

    answers = run(config, VOCAB, story, measured=measured)
    assert wrong_ones(model, answers) == []
    if overload is not SWAP:
        return
    seeded = run(config, VOCAB, alone, measured=measured)
    assert answers.tokens["seeded"] == seeded.tokens["seeded"]
    assert answers.scores["seeded"] == seeded.scores["seeded"]


@POLICIES
def test_so_they_are_on_a_device(
    overload: OverloadConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKECUDA_GRANULARITY_BYTES", "8192")
    model, config, measured = config_in(tmp_path, overload, 2 * MIB, STAND_IN + build())
    assert wrong_ones(model, run(config, VOCAB, all_of_it, measured=measured)) == []


def test_they_are_not_if_a_request_goes_on_before_its_kv_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would show nothing."""
    monkeypatch.setenv("FAKECUDA_GRANULARITY_BYTES", "8192")
    model, config, measured = config_in(tmp_path, SWAP, 2 * MIB, STAND_IN + build())
    early = ForkingLauncher((early_instance.__file__,))
    assert wrong_ones(model, run(config, VOCAB, all_of_it, early, measured)) != []
