"""What FlashInfer is asked for. A stub does what its documentation says."""

import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.attention import StepBatch
from kunserve.engine.body import EngineBody
from kunserve.model.spec import ModelSpec
from kunserve_extras.flashinfer_ops import FlashInferOps, check_flashinfer
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.ops.table import DeviceBatch, Ops
from tests.direct_engine import DirectEngine
from tests.fakecuda.library import KIB, FakeCuda, build
from tests.specs import model_spec
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")
BLOCK = 4


@dataclass
class Plan:
    q_starts: list[int]
    page_starts: list[int]
    pages: torch.Tensor
    last_lengths: list[int]
    window_left: int


class Wrapper:
    """Both wrappers: pages ``[2, kv_heads, page_size, head_dim]``, causal."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str, use_tensor_cores: bool = False):
        assert kv_layout == "HND" and not workspace.any()
        self.plan_: Plan | None = None

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        plan = self.plan_
        assert plan is not None and q.is_contiguous() and (plan.pages >= 0).all()
        for s, last in enumerate(plan.last_lengths):
            pages = plan.pages[plan.page_starts[s] : plan.page_starts[s + 1]].long()
            k, v = paged_kv_cache[pages].float().permute(1, 2, 0, 3, 4).flatten(2, 3)
            context = k.shape[1] - k.shape[1] // len(pages) + last
            rows = q[plan.q_starts[s] : plan.q_starts[s + 1]].float()
            group = rows.shape[1] // k.shape[0]
            k, v = (one[:, :context].repeat_interleave(group, dim=0) for one in (k, v))
            scores = torch.einsum("qhd,htd->hqt", rows, k) * rows.shape[-1] ** -0.5
            q_at = torch.arange(context - len(rows), context)[:, None]
            k_at = torch.arange(context)
            hidden = k_at > q_at
            if plan.window_left >= 0:
                hidden = hidden | (k_at < q_at - plan.window_left)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            mixed = torch.einsum("hqt,htd->qhd", weights, v)
            out[plan.q_starts[s] : plan.q_starts[s + 1]] = mixed.to(out.dtype)


class Prompts(Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert causal and num_qo_heads % num_kv_heads == 0 and q_data_type == kv_data_type
        starts, lengths = paged_kv_indptr.tolist(), paged_kv_last_page_len.tolist()
        assert max(lengths) <= page_size and min(lengths) > 0
        Wrapper.plans += 1
        self.plan_ = Plan(qo_indptr.tolist(), starts, paged_kv_indices, lengths, window_left)


class Tokens(Wrapper):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *shape: int,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert len(shape) == 4 and q_data_type == kv_data_type
        Wrapper.plans += 1
        rows = list(range(len(last_page_len) + 1))
        starts, lengths = indptr.tolist(), last_page_len.tolist()
        self.plan_ = Plan(rows, starts, indices, lengths, window_left)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Prompts, BatchDecodeWithPagedKVCacheWrapper=Tokens
    )
    monkeypatch.setitem(sys.modules, "flashinfer", stub)
    monkeypatch.setattr("kunserve_extras.flashinfer_ops.WORKSPACE_BYTES", 64)


def batch_of(lengths: list[int], contexts: list[int], num_layers: int) -> StepBatch:
    """Blocks at any place, the first entry as low as it can be."""
    starts = np.cumsum([0, *lengths])
    positions = np.concatenate(
        [np.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)]
    )
    entries = np.random.default_rng(0).permutation(len(contexts) * 8) * num_layers - num_layers
    numbers = (positions, positions, entries.reshape(-1, 8), range(len(contexts)), starts, contexts)
    arrays = [np.array(one, dtype=np.int32) for one in numbers]
    return StepBatch(*arrays, np.zeros(0, dtype=np.int32))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("lengths", "contexts"), [([1, 1, 1], [1, 8, 27]), ([5, 1, 9], [5, 13, 28])]
)
def test_it_reads_what_plain_torch_reads(
    flashinfer: None, window: int | None, lengths: list[int], contexts: list[int]
) -> None:
    spec = model_spec(
        num_layers=3, num_heads=10, num_kv_heads=2, head_dim=64, sliding_window=window
    )
    host = batch_of(lengths, contexts, spec.num_layers)
    batch = DeviceBatch.of(host, BLOCK, CPU)
    torch.manual_seed(0)
    kv = torch.randn(8 * len(contexts) * 3 + 3, 2, 2, BLOCK, 64).to(torch.bfloat16)
    # As a view of the projections, which is not contiguous.
    q = torch.randn(sum(lengths), 14, 64).to(torch.bfloat16)[:, :10]
    plain: Ops = ReferenceOps(spec)
    fast: Ops = FlashInferOps(spec, plain, CPU)
    before = Wrapper.plans
    for layer in range(spec.num_layers):
        expected, got = torch.zeros(2, sum(lengths), spec.q_size, dtype=torch.bfloat16)
        plain.attend(layer, q, kv, batch, expected)
        fast.attend(layer, q, kv, batch, got)
        torch.testing.assert_close(got, expected)
        assert got.any()
    assert Wrapper.plans == before + 1, "one plan serves all layers"
    fast.attend(0, q, kv, DeviceBatch.of(host, BLOCK, CPU), got)
    assert Wrapper.plans == before + 2, "another step needs another one"


def test_what_it_cannot_do_is_said(flashinfer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    good: ModelSpec = model_spec(head_dim=64)
    check_flashinfer(good)
    with pytest.raises(ConfigError, match="no float32"):
        check_flashinfer(model_spec(head_dim=64, dtype="float32"))
    with pytest.raises(ConfigError, match="64, 128, 256 values, and tiny has 32"):
        check_flashinfer(model_spec(head_dim=32))
    with pytest.raises(ConfigError, match="windows that differ by layer"):
        check_flashinfer(model_spec(head_dim=64, sliding_window=8, global_layers=(1,)))
    with pytest.raises(ConfigError, match="capped scores"):
        check_flashinfer(model_spec(head_dim=64, score_cap=50.0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        check_flashinfer(good)


def test_it_is_for_gpus_and_chosen_before_anything_is_read(
    flashinfer: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda()
    model = ModelConfig(model=str(save_tiny(tmp_path, "llama", 2)))
    (tmp_path / "model.safetensors").write_bytes(b"")
    sizes = InstanceConfig(
        memory_bytes=4 << 20, granule_bytes=8 * KIB, block_size=8, attention="flashinfer"
    )
    with pytest.raises(ConfigError, match="flashinfer needs --device cuda"):
        EngineBody(InstanceId(0), model, sizes)
    with pytest.raises(ConfigError, match="has 32; use fused"):
        EngineBody(InstanceId(0), model, sizes, backend=CudaBackend(CPU, build()))


def test_a_body_with_it(flashinfer: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub is as good as plain torch, so the tokens are those of plain torch."""
    monkeypatch.setattr("kunserve_extras.flashinfer_ops._HEAD_DIMS", (32,))
    FakeCuda()
    model = ModelConfig(model=str(save_tiny(tmp_path, "mistral", 2)))
    tokens = []
    for attention in ("fused", "flashinfer"):
        sizes = InstanceConfig(
            memory_bytes=4 << 20, granule_bytes=8 * KIB, block_size=8, attention=attention
        )
        body = EngineBody(InstanceId(0), model, sizes, backend=CudaBackend(CPU, build()))
        with closing(body):
            engine = DirectEngine([(body, LayerRange(0, 2))])
            tokens.append(engine.generate([[5, 6, 7], list(range(3, 33))], 4, 16))
    assert tokens[0] == tokens[1]
