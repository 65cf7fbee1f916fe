"""A served cluster whose instances have several ranks each, in real processes: tokens are those of
transformers through drops, exchanges, restores, preemption, swapping, and the death of a rank.
"""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import KunServeConfig, OverloadConfig, SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import ConfigError
from kunserve.core.plan import Measured, SwapPlan
from kunserve.core.request import SamplingParams
from kunserve.engine.memory.free_memory import children_of
from kunserve.engine.torch.cuda.cards import STAND_IN
from kunserve.server.start.launch import launch
from tests.e2e.tokens.test_engine_transitions import (
    NUM_TOKENS,
    PROMPTS,
    QUEUED,
    QUEUED_TOKENS,
    Answers,
    config_of,
    drop_to,
    restore_when_it_fits,
    run,
)
from tests.fakecuda.library import build
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


async def kill_a_rank(cluster: LocalCluster, number: int) -> None:
    """Of one instance; its process ends, and another one takes its place."""
    instance = cluster.vitals().pids[number]
    instance_id, pid = instance
    (member, *_) = children_of(pid)
    os.kill(member, signal.SIGKILL)
    async with asyncio.timeout(60.0):
        while cluster.pid_of(instance_id) in (pid, None):
            await asyncio.sleep(0.01)
        while cluster.vitals().num_missing:
            await asyncio.sleep(0.05)
    assert cluster.state().num_deaths == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "num_ranks", "has_devices"),
    [("qwen2", 2, False), ("llama", 4, False), ("qwen3", 2, True)],
)
def test_tokens_are_those_of_transformers_through_everything(
    kind: str, num_ranks: int, has_devices: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over a stand-in for the driver of devices."""
    monkeypatch.setenv("FAKECUDA_GRANULARITY_BYTES", "8192")
    device = STAND_IN + build() if has_devices else "cpu"
    config = config_in(tmp_path, kind, num_ranks, 2, device)

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        names = list(PROMPTS)
        for name in names[:6]:
            answers.ask(name, PROMPTS[name], NUM_TOKENS[name], GREEDY)
        await answers.have(3)
        await drop_to(cluster, 1)
        for name in names[6:]:
            answers.ask(name, PROMPTS[name], NUM_TOKENS[name], GREEDY)
        for name in list(QUEUED)[:8]:
            answers.ask(name, QUEUED[name], QUEUED_TOKENS, GREEDY)
        await answers.have(2)
        await restore_when_it_fits(cluster)
        for name in list(QUEUED)[8:]:
            answers.ask(name, QUEUED[name], QUEUED_TOKENS, GREEDY)
        await kill_a_rank(cluster, 1)
        await drop_to(cluster, 1)

    check_tokens(kind, run(config, VOCAB, story))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_of_a_pipeline_dies(tmp_path: Path) -> None:
    """Its requests are run again, and the other instance loads what it had dropped."""
    config = config_in(tmp_path, "qwen3", 2, 2)

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        for name in PROMPTS:
            answers.ask(name, PROMPTS[name], NUM_TOKENS[name], GREEDY)
        await answers.have(2)
        await drop_to(cluster, 1)
        await answers.have(4)
        await kill_a_rank(cluster, 0)

    check_tokens("qwen3", run(config, VOCAB, story))


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
