"""The checklist of docs/models.md: what a model has to pass that the engine is said to serve."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from tests.direct_engine import DirectEngine
from tests.fakecuda.library import KIB, FakeCuda, build
from tests.tape import TapeRecorder
from tests.tiny_models import GEMMAS, KINDS, MORE_KINDS, VOCAB, expected_tokens, tiny_model

NUM_LAYERS = 3
NUM_TOKENS = 8
PROMPTS = [[(length * i + 7) % (VOCAB - 3) + 3 for i in range(length)] for length in (1, 90)]
CUTS = [(0, 1, 3), (0, 2, 3), (0, 1, 2, 3)]


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.left() == {}


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_tokens_of_transformers_on_both_engines_and_in_any_cut(
    kind: str, tmp_path: Path, fake: FakeCuda
) -> None:
    model = tiny_model(kind, NUM_LAYERS)
    model.save_pretrained(tmp_path)
    expected = [expected_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    # Attention of a recorded step is over all positions that there may be.
    settings = ModelConfig(model=str(tmp_path), dtype="float32", max_model_len=104)
    memory = InstanceConfig(memory_bytes=4 << 20, granule_bytes=8 * KIB, block_size=8)
    most = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48)
    with ExitStack() as stack:
        bodies: list[EngineBody] = [
            stack.enter_context(closing(EngineBody(InstanceId(number), settings, memory)))
            for number in range(3)
        ]
        for cut in CUTS:
            ranges = [LayerRange(*ends) for ends in pairwise(cut)]
            stages = list(zip(bodies, ranges, strict=False))
            for body, keep in stages:
                body.memory.drop(keep)
            assert DirectEngine(stages).generate(PROMPTS, NUM_TOKENS, 16) == expected
            for body, keep in stages:
                missing = [LayerRange(0, keep.first), LayerRange(keep.end, NUM_LAYERS)]
                body.memory.reclaim(LayerRange(0, NUM_LAYERS))
                for layers in missing:
                    if layers.first < layers.end:
                        body.load_layers(layers)
        backend = CudaBackend(torch.device("cpu"), build(), TapeRecorder())
        body = EngineBody(InstanceId(9), settings, memory, scheduler=most, backend=backend)
        whole = [(stack.enter_context(closing(body)), LayerRange(0, NUM_LAYERS))]
        assert DirectEngine(whole).generate(PROMPTS, NUM_TOKENS, 16) == expected


def test_every_kind_differs_from_every_other() -> None:
    """Else a checklist that it passes would prove nothing about what is special about it."""
    kinds = (*KINDS, *MORE_KINDS)
    configs = [tiny_model(kind, 1).config.to_diff_dict() for kind in kinds]
    assert len({str(sorted(config.items(), key=str)) for config in configs}) == len(kinds)


@pytest.mark.parametrize("kind", GEMMAS)
def test_threads_and_batches_change_no_bit_of_gemma(kind: str, tmp_path: Path) -> None:
    """In bfloat16: norms of what is added need no barrier, because a thread keeps its rows."""
    tiny_model(kind, NUM_LAYERS).save_pretrained(tmp_path)
    settings = ModelConfig(model=str(tmp_path), dtype="bfloat16")
    found = []
    for num_threads, chunk_size in ((1, 16), (3, 200), (2, 7)):
        memory = InstanceConfig(
            memory_bytes=4 << 20, granule_bytes=8 * KIB, block_size=8, num_threads=num_threads
        )
        body = EngineBody(InstanceId(0), settings, memory)
        with closing(body):
            engine = DirectEngine([(body, LayerRange(0, NUM_LAYERS))])
            tokens = engine.generate(PROMPTS, NUM_TOKENS, chunk_size)
            kv = body.memory.unit_view(0, 12 * NUM_LAYERS).copy()
        found.append((tokens, kv))
    assert all(tokens == found[0][0] for tokens, _ in found)
    assert all((kv == found[0][1]).all() for _, kv in found)
