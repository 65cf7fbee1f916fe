"""KV of layers with a window in a ring: the tokens are those of ``transformers`` all the same."""

import asyncio
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import (
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
)
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import InstanceId
from kunserve.core.kv_blocks import ring_of
from kunserve.core.layout import LayerRange
from kunserve.core.plan import Measured, SwapPlan
from kunserve.engine.backend import CpuBackend
from kunserve.engine.body import EngineBody
from kunserve.model.config import read_spec
from kunserve.model.source import resolve_model
from kunserve.server.start.plan import find_ring
from tests.direct_engine import DirectEngine
from tests.e2e.tokens.asked_cluster import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    Answers,
    config_of,
    run,
)
from tests.tiny_models import GEMMAS, VOCAB, expected_tokens, greedy_after, tiny_model
from tests.unit.engine.reference_attention import ReferenceBackend

NUM_LAYERS = 5
STEP_TOKENS = 16
RING = ring_of(24, 2, 8, STEP_TOKENS)
"""Of 48 tokens: the long prompts write it over three times."""
LONG = [[(length * i + 7) % (VOCAB - 3) + 3 for i in range(length)] for length in (1, 90, 170)]
COST = CostCoefficients(attention_s=0.0, token_s=1e-4, chunk_s=1e-4, shared_s=1e-4)
KV_BYTES = 24 * NUM_LAYERS * 2 * 8 * 2 * 32 * 4


@pytest.mark.parametrize("kind", GEMMAS)
def test_prompts_of_many_windows_in_any_cut_between_periods(kind: str, tmp_path: Path) -> None:
    """In chunks, with guesses taken back, and by the plain torch attention."""
    model = tiny_model(kind, NUM_LAYERS)
    model.save_pretrained(tmp_path)
    expected = [expected_tokens(model, prompt, 12) for prompt in LONG]
    settings = ModelConfig(model=str(tmp_path), dtype="float32")
    memory = InstanceConfig(memory_bytes=4 << 20, granule_bytes=8192, block_size=8)

    def guess(tokens: list[int]) -> list[int]:
        return [tokens[-1] % 7 + 3, 5, 9, 4]

    with ExitStack() as stack:
        bodies = [
            stack.enter_context(
                closing(
                    EngineBody(InstanceId(number), settings, config, backend=backend, ring=RING)
                )
            )
            for number, (config, backend) in enumerate(
                (
                    (memory, CpuBackend()),
                    (replace(memory, num_threads=2), CpuBackend()),
                    (memory, ReferenceBackend()),
                )
            )
        ]
        for body in bodies[::2]:
            whole = DirectEngine([(body, LayerRange(0, NUM_LAYERS))])
            assert whole.generate(LONG, 12, STEP_TOKENS) == expected
        for cut in ((0, 2, 5), (0, 2, 4, 5)):
            stages = [
                (body, LayerRange(*ends)) for body, ends in zip(bodies, pairwise(cut), strict=False)
            ]
            engine = DirectEngine(stages)
            assert engine.generate(LONG, 12, 7, guess=guess) == expected


def ringed(config: KunServeConfig) -> KunServeConfig:
    """As a start makes it from its flag."""
    limits = replace(
        config.scheduler,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
    )
    instance = replace(config.instance, disable_hybrid_kv_cache_manager=False)
    asked = replace(config, scheduler=limits, instance=instance)
    spec = read_spec(resolve_model(config.model.model, config.model.load_format), "float32")
    assert find_ring(asked, spec) == RING
    return asked


@pytest.mark.slow
@pytest.mark.parametrize(
    "overload",
    [OverloadConfig(policy="swap"), OverloadConfig(policy="park", max_park_s=0.02)],
    ids=["swap", "park"],
)
def test_through_host_memory(overload: OverloadConfig, tmp_path: Path) -> None:
    model = tiny_model("gemma3", NUM_LAYERS)
    model.save_pretrained(tmp_path)
    config = replace(config_of(str(tmp_path), "float32", 1, KV_BYTES * 2 // 3), overload=overload)
    config = ringed(config)
    measured = Measured(COST, SwapPlan.of(overload, 1e8, None), RING)

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        for name, prompt in PROMPTS.items():
            answers.ask(name, prompt, NUM_TOKENS[name], GREEDY)
        await answers.all()
        async with asyncio.timeout(10.0):
            while not cluster.state().loads[0].totals.num_preemptions:
                await asyncio.sleep(0.01)
        assert cluster.state().loads[0].totals.lost_tokens == 0

    answers = run(config, VOCAB, story, measured=measured)
    for name, prompt in PROMPTS.items():
        assert answers.tokens[name] == greedy_after(model, prompt, answers.tokens[name]), name
