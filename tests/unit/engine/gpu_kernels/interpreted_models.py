"""Whole models over the Triton kernels in Triton's interpreter: tokens of transformers.

``test_triton`` runs this file as it does ``interpreted_kernels``.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.triton_ops.ops import TritonOps
from tests.direct_engine import DirectEngine
from tests.fakecuda.library import KIB, FakeCuda, build
from tests.tiny_models import GEMMAS, VOCAB, expected_tokens, tiny_model
from tests.unit.engine.gpu_kernels.interpreted_kernels import CPU


@pytest.mark.parametrize("kind", ["mistral", "qwen3", *GEMMAS, "qwen2_moe", "qwen3_moe"])
def test_a_whole_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window, norms of heads, all of Gemma, experts; over a stand-in for the driver."""
    monkeypatch.setattr(CudaBackend, "open_ops", lambda _, spec, config: TritonOps(spec))
    model = tiny_model(kind, 2)
    model.save_pretrained(tmp_path)
    prompts = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (3, 30)]
    FakeCuda()
    body = EngineBody(
        InstanceId(0),
        ModelConfig(model=str(tmp_path), dtype="float32"),
        InstanceConfig(memory_bytes=4 << 20, granule_bytes=8 * KIB, block_size=8),
        backend=CudaBackend(CPU, build()),
    )
    with closing(body):
        engine = DirectEngine([(body, LayerRange(0, 2))])
        expected = [expected_tokens(model, prompt, 3) for prompt in prompts]
        assert engine.generate(prompts, 3, 16) == expected
