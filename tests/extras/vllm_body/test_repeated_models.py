"""Which families' layers are repeated, and what a body does with layers that come out otherwise."""

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kunserve.core.config import SchedulerConfig
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.engine.body import EngineBody
from tests.direct_engine import DirectEngine
from tests.running.engines import NEEDS_VLLM, open_engine
from tests.tiny_models import FOREIGN_KINDS, VOCAB, save_tiny

WHOLE = LayerRange(0, 4)
PROMPTS = [[(7 * i + length) % (VOCAB - 3) + 3 for i in range(length)] for length in (3, 40, 21)]
SCORED = SamplingParams(1000, temperature=0.0, num_prompt_logprobs=1)


def refusals(body: EngineBody) -> set[str | None]:
    return {layer.refusal for layer in body._decoder._repeated}  # type: ignore[attr-defined]


def said(body: EngineBody) -> object:
    """In steps of few rows and of many; with each number of rows again and again."""
    engine = DirectEngine([(body, WHOLE)])
    found: list[object] = []
    for chunk_size in (5, 5, 30, 1000):  # of 30: a step of as many rows as are repeated
        found.append(engine.generate(PROMPTS, 10, chunk_size, SCORED))
        found.append([sequence.scores for sequence in engine.last])
    return found


@NEEDS_VLLM
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind", [*FOREIGN_KINDS, "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3"]
)
def test_dense_families_are_repeated_to_the_bit(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, kind)
    with closing(open_engine(folder, 0, "vllm", dtype=dtype)) as body:
        repeated = said(body)
        assert refusals(body) == {None}
        for layer in body._decoder._repeated:  # type: ignore[attr-defined]
            assert layer._written
            layer.is_plain = True
        assert said(body) == repeated


@NEEDS_VLLM
def test_a_layer_that_chooses_experts_runs_as_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path, "qwen2_moe")
    with caplog.at_level(logging.INFO):
        body = open_engine(folder, 0, "vllm", scheduler=SchedulerConfig())
    with closing(body):
        assert refusals(body) == {"aten::topk"}
    assert "run as Python in every step: aten::topk" in caplog.text


@NEEDS_VLLM
def test_a_body_finds_that_what_is_repeated_is_something_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kunserve_extras.vllm_body import repeats

    folder = save_tiny(tmp_path, "llama")
    with closing(open_engine(folder, 0, "vllm", scheduler=SchedulerConfig())) as body:
        expected = said(body)
    monkeypatch.setitem(repeats._GIVES, "aten::add", torch.sub)
    with caplog.at_level(logging.INFO):
        body = open_engine(folder, 0, "vllm", scheduler=SchedulerConfig())
    with closing(body):
        assert "not what the layers' code gives" in caplog.text
        assert said(body) == expected
