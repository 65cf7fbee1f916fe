"""Matrices that our kernels do not know: a batch may change bits, but not how likely a text is."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from tests.direct_engine import DirectEngine
from tests.running.engines import NEEDS_VLLM, open_engine
from tests.tiny_models import VOCAB, prompt_logprobs, tiny_model

PROMPTS = [[(7 * i * i + length) % (VOCAB - 3) + 3 for i in range(length)] for length in (70, 41)]
SCORED = SamplingParams(1000, temperature=0.0, num_prompt_logprobs=1)
NEAR = {"float32": 1e-4, "bfloat16": 0.05}
"""Mean log-probability of a token. Of bfloat16, whose steps are 1/256, one text of 109 tokens
through four layers of random weights, whose logits reach about 10."""


@NEEDS_VLLM
@pytest.mark.parametrize("dtype", NEAR)
def test_vllm_says_the_same_of_a_text(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kunserve_extras.vllm_body import release

    monkeypatch.setattr(release, "is_known", lambda weight: False)
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    expected = [value for prompt in PROMPTS for value in prompt_logprobs(model, prompt)]
    with ExitStack() as stack, caplog.at_level("INFO"):
        bodies = [
            stack.enter_context(closing(open_engine(tmp_path, number, "vllm", dtype=dtype)))
            for number in range(2)
        ]
        assert "batches and drops may change a token" in caplog.text
        whole = [(bodies[0], LayerRange(0, 4))]
        ways = [nll(DirectEngine(whole), chunk_size) for chunk_size in (1000, 9)]
        stages = [(bodies[0], LayerRange(0, 2)), (bodies[1], LayerRange(2, 4))]
        for body, keep in stages:
            body.memory.drop(keep)
        ways.append(nll(DirectEngine(stages), 16))
    reference = -sum(expected) / len(expected)
    assert all(abs(way - reference) < NEAR[dtype] for way in ways), (ways, reference)


def nll(engine: DirectEngine, chunk_size: int) -> float:
    """Per token of the prompts."""
    engine.generate(PROMPTS, 1, chunk_size, SCORED)
    said = [row.logprob for sequence in engine.last for row in sequence.scores]
    assert len(said) == sum(len(prompt) - 1 for prompt in PROMPTS)
    return -sum(said) / len(said)
