"""How many threads attend in a step is chosen by its size, so it must change no bit."""

from contextlib import closing
from pathlib import Path

import pytest

from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from tests.direct_engine import DirectEngine
from tests.running.engines import NEEDS_VLLM, open_engine
from tests.tiny_models import VOCAB, save_tiny

PROMPTS = [[(11 * i * i + length) % (VOCAB - 3) + 3 for i in range(length)] for length in (300, 77)]
SCORED = SamplingParams(1000, temperature=0.0, num_prompt_logprobs=1)


@NEEDS_VLLM
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_bits_with_one_thread_and_with_three(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kunserve_extras.vllm_body import decoder, release

    monkeypatch.setattr(release, "_heads", lambda attention: None)  # vLLM's kernels attend
    folder, found = save_tiny(tmp_path, "llama"), []
    with closing(open_engine(folder, 0, "vllm", dtype=dtype, num_threads=3)) as body:
        engine = DirectEngine([(body, LayerRange(0, 4))])
        for most_alone in (0, 1 << 40, decoder._ALONE):
            monkeypatch.setattr(decoder, "_ALONE", most_alone)
            for chunk_size in (1000, 64):
                tokens = engine.generate(PROMPTS, 6, chunk_size, SCORED)
                found.append((tokens, [sequence.scores for sequence in engine.last]))
    assert all(one == found[0] for one in found)
