"""What memory held before it was lent changes nothing, not even what is no number as KV."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kunserve.core.layout import LayerRange
from tests.direct_engine import DirectEngine
from tests.running.engines import NEEDS_VLLM, open_engine
from tests.tiny_models import VOCAB, save_with_answers

PROMPTS = [
    np.random.default_rng(length).integers(3, VOCAB, length).tolist() for length in (1, 31, 32, 70)
]
NUM_TOKENS = 40
"""So that answers begin blocks."""


@NEEDS_VLLM
@pytest.mark.parametrize("by_vllm", [False, True])
@pytest.mark.parametrize("chunk_size", [1000, 32, 5])
def test_no_bytes_of_before_are_seen(
    chunk_size: int, by_vllm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_vllm:
        from kunserve_extras.vllm_body import release

        monkeypatch.setattr(release, "_heads", lambda attention: None)
    folder, expected = save_with_answers(tmp_path, "llama", PROMPTS, NUM_TOKENS)
    with closing(open_engine(folder, 0, "vllm")) as body:
        num_units = body.memory.spec.kv_units
        data = np.full(num_units * body.memory.unit_bytes, 0xFF, dtype=np.uint8)
        body.memory.write_units([(0, num_units)], data)
        engine = DirectEngine([(body, LayerRange(0, 4))])
        assert engine.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected
