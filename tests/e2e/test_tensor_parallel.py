"""Instances of several ranks: greedy tokens in float32 are those of transformers, whatever is
dropped, restored, moved and swapped in between; and nobody outlives a rank.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kunserve.control.instance.body import HostCopy, UnitCopy
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.ranks.backend import RankedBackend
from kunserve.model.source import resolve_model
from tests.direct_engine import DirectEngine
from tests.forked_ranks import fork_member
from tests.tiny_models import VOCAB, expected_tokens, tiny_model

NUM_LAYERS = 4
NUM_TOKENS = 8
WHOLE = LayerRange(0, NUM_LAYERS)
HALVES = (LayerRange(0, 2), LayerRange(2, 4))
PROMPTS = [
    np.random.default_rng(length).integers(3, VOCAB, length).tolist() for length in (1, 7, 40)
]


def open_ranks(
    folder: Path,
    num_ranks: int,
    number: int = 0,
    *,
    dtype: str = "float32",
    num_threads: int = 1,
    scheduler: SchedulerConfig | None = None,
) -> EngineBody:
    model = ModelConfig(model=str(folder), dtype=dtype)  # type: ignore[arg-type]
    source = resolve_model(str(folder))
    config = InstanceConfig(
        memory_bytes=4 << 20,
        granule_bytes=8192,
        block_size=8,
        tensor_parallel_size=num_ranks,
        num_threads=num_threads,
    )
    backend = RankedBackend(model, source, num_ranks, start=fork_member)
    return EngineBody(InstanceId(number), model, config, source, scheduler, backend)


@pytest.fixture(scope="module", params=["llama3", "qwen2", "qwen3", "phi3"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A model folder, and what transformers generates from it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param, NUM_LAYERS)
    model.save_pretrained(folder)
    return folder, [expected_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("num_ranks", [2, 4])  # with four, each KV head is two ranks'
def test_tokens_of_transformers(saved: tuple[Path, list[list[int]]], num_ranks: int) -> None:
    folder, expected = saved
    with closing(open_ranks(folder, num_ranks)) as body:
        for chunk_size in (1000, 5):
            engine = DirectEngine([(body, WHOLE)])
            assert engine.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected
        body.check()
