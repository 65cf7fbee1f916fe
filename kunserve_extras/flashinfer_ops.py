"""Attention by FlashInfer, where it is installed: to compare with, or to use if it is faster.

A unit is its page, and the layers of a block are consecutive units. So layer l reads the same page
numbers from the l-th unit on, and one plan serves all layers of a step.
"""

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.errors import ConfigError
from kunserve.core.kv_blocks import KvBlocks
from kunserve.engine.attention import TORCH_DTYPES, StepBatch
from kunserve.engine.step_batch import entries_of
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.table import DeviceBatch, Ops

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for its partial sums."""
_HEAD_DIMS = (64, 128, 256)
_LAYOUT = "HND"
"""Of a page: K and V, heads, tokens, values."""


def check_flashinfer(spec: ModelSpec) -> None:
    """Raise ConfigError unless FlashInfer is installed and has kernels for the model."""
    try:
        importlib.import_module("flashinfer")
    except Exception as error:
        # It looks for compilers and devices while it is imported, and fails in many ways.
        raise ConfigError(
            f"--attention-backend flashinfer needs: pip install flashinfer-python ({error})"
        ) from error
    if spec.dtype == "float32":
        raise ConfigError("--attention-backend flashinfer has no float32; use bfloat16 or float16")
    if spec.head_dim not in _HEAD_DIMS:
        raise ConfigError(
            f"--attention-backend flashinfer has heads of {', '.join(map(str, _HEAD_DIMS))} "
            f"values, and {spec.name} has {spec.head_dim}; use fused"
        )
    if spec.global_layers or spec.score_cap is not None:
        what = "windows that differ by layer" if spec.global_layers else "capped scores"
        raise ConfigError(
            f"--attention-backend flashinfer is given one plan for all layers, without {what}, "
            f"which {spec.name} has; use fused"
        )


class FlashInferOps:
    """Implements ``Ops``; ``rest`` does all but attention. Steps cannot be recorded."""

    def __init__(self, spec: ModelSpec, rest: Ops, device: torch.device) -> None:
        flashinfer: Any = importlib.import_module("flashinfer")
        self._spec = spec
        self._device = device
        self._prompts, self._tokens = (
            wrapper(
                torch.zeros(WORKSPACE_BYTES // 2, dtype=torch.uint8, device=device), _LAYOUT, **more
            )
            for wrapper, more in (
                (flashinfer.BatchPrefillWithPagedKVCacheWrapper, {}),
                # Its kernels without tensor cores lack the groups of 5 and 7 heads.
                (flashinfer.BatchDecodeWithPagedKVCacheWrapper, {"use_tensor_cores": True}),
            )
        )
        self._planned: DeviceBatch | None = None
        self._wrapper: Any = None
        self.rms_norm = rest.rms_norm
        self.gate_mul = rest.gate_mul
        self.place = rest.place
        self.route = rest.route
        self.run_experts = rest.run_experts
        self.sum_experts = rest.sum_experts
        self.product = rest.product
        self.product_sizes = rest.product_sizes

    def attend(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        """See ``Ops``."""
        if self._planned is not batch:
            assert batch.host is not None, "a plan is made on the host"
            self._wrapper = self._plan(batch.host, kv.shape[3])
            self._planned = batch
        # ``kv`` begins num_layers units below unit 0, so no page number is negative.
        self._wrapper.run(q.contiguous(), kv[layer:], out=out.view(q.shape))

    def _plan(self, batch: StepBatch, block_size: int) -> Any:
        spec, num_blocks = self._spec, -(-batch.context_lens // block_size)
        starts = np.zeros(len(num_blocks) + 1, dtype=np.int32)
        np.cumsum(num_blocks, out=starts[1:])
        pages = entries_of(batch, KvBlocks(block_size)) + np.int32(spec.num_layers)
        lengths = batch.context_lens - (num_blocks - 1) * block_size
        of_pages = [_tensor(starts), _tensor(pages).to(self._device), _tensor(lengths)]
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size)
        options = {
            # It counts the tokens before the query, we count the query too.
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "q_data_type": TORCH_DTYPES[spec.dtype],
            "kv_data_type": TORCH_DTYPES[spec.dtype],
        }
        if batch.num_tokens == len(batch.rows):
            self._tokens.plan(*of_pages, *shape, **options)
            return self._tokens
        self._prompts.plan(_tensor(batch.q_starts), *of_pages, *shape, causal=True, **options)
        return self._prompts


def _tensor(array: npt.NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
