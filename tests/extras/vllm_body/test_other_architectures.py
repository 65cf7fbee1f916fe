"""Families that our own engine does not know, whole and in stages, through drops and restores."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest

from kunserve.core.errors import UnsupportedModel
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.engine.body import EngineBody
from kunserve.model.config import read_spec
from kunserve.model.source import resolve_model
from tests.direct_engine import DirectEngine
from tests.running.engines import NEEDS_VLLM, open_engine
from tests.tiny_models import FOREIGN_KINDS, SPARSE_KINDS, VOCAB, save_tiny, save_with_answers

NUM_LAYERS = 4
WHOLE = LayerRange(0, NUM_LAYERS)
NUM_TOKENS = 8
SCORED = SamplingParams(1000, temperature=0.0, num_prompt_logprobs=1)
PROMPTS = [[(length * i + 7) % (VOCAB - 3) + 3 for i in range(length)] for length in (1, 90, 33)]


@pytest.mark.parametrize("kind", FOREIGN_KINDS)
def test_only_the_other_engine_knows_them(kind: str, tmp_path: Path) -> None:
    source = resolve_model(str(save_tiny(tmp_path, kind)))
    with pytest.raises(UnsupportedModel, match="not supported"):
        read_spec(source, "float32")
    spec = read_spec(source, "float32", computed_elsewhere=True)
    assert (spec.num_layers, spec.hidden_size, spec.head_dim) == (NUM_LAYERS, 128, 32)


def stages_of(
    bodies: list[EngineBody], cut: tuple[int, ...]
) -> list[tuple[EngineBody, LayerRange]]:
    return list(zip(bodies, [LayerRange(*ends) for ends in pairwise(cut)], strict=False))


def through_drops(bodies: list[EngineBody]) -> Iterator[DirectEngine]:
    """Whole, dropped to two stages and to three, each restored after it."""
    for cut in ((0, 4), (0, 1, 4), (0, 2, 3, 4)):
        stages = stages_of(bodies, cut)
        for body, keep in stages:
            body.memory.drop(keep)
        yield DirectEngine(stages)
        for body, keep in stages:
            body.memory.reclaim(WHOLE)
            for layers in (LayerRange(0, keep.first), LayerRange(keep.end, NUM_LAYERS)):
                if layers.num_layers:
                    body.load_layers(layers)


@NEEDS_VLLM
@pytest.mark.parametrize("kind", FOREIGN_KINDS)
def test_vllm_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder, expected = save_with_answers(tmp_path, kind, PROMPTS, NUM_TOKENS)
    with ExitStack() as stack:
        bodies = [
            stack.enter_context(closing(open_engine(folder, number, "vllm"))) for number in range(3)
        ]
        for engine in through_drops(bodies):
            for chunk_size in (1000, 16):
                assert engine.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected


@NEEDS_VLLM
@pytest.mark.parametrize("kind", ["stablelm", *SPARSE_KINDS])
def test_vllm_bits_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """Alone, in batches, in chunks and in stages: all log-probabilities, not only the tokens."""
    folder = save_tiny(tmp_path, kind)
    found = []
    with ExitStack() as stack:
        bodies = [
            stack.enter_context(closing(open_engine(folder, number, "vllm", dtype="bfloat16")))
            for number in range(3)
        ]
        for engine in through_drops(bodies):
            found += [said(engine, [PROMPTS], 1000), said(engine, [PROMPTS], 16)]
            found += [said(engine, [[prompt] for prompt in PROMPTS], 1000)]
    assert all(one == found[0] for one in found)


def said(engine: DirectEngine, batches: list[list[list[int]]], chunk_size: int) -> list[object]:
    """Of each prompt the tokens and what was said of those of the prompt."""
    answers = []
    for prompts in batches:
        tokens = engine.generate(prompts, NUM_TOKENS, chunk_size, SCORED)
        scores = [sequence.scores for sequence in engine.last]
        answers += list(zip(tokens, scores, strict=True))
    return answers
