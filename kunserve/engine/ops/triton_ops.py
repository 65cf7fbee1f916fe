"""The operations by our own Triton kernels."""

import torch
import triton

from kunserve.core.model_spec import ModelSpec
from kunserve.engine.ops.table import DeviceBatch
from kunserve.engine.triton.attention import attention_kernel
from kunserve.engine.triton.rows import (
    place_kernel,
    rms_norm_kernel,
    rotate_kernel,
    silu_mul_kernel,
)

_LEAST_ROWS = 16
"""Tensor cores multiply tiles of at least so many rows."""
_KEYS = 32
_SILU_PIECE = 1024


class TritonOps:
    """Implements ``Ops`` for a model on a CUDA device, or in Triton's interpreter."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._group = spec.num_heads // spec.num_kv_heads
        self._queries = max(1, _LEAST_ROWS // triton.next_power_of_2(self._group))
        rows = triton.next_power_of_2(self._queries * self._group)
        self._rows = max(_LEAST_ROWS, rows)
        self._head_pad = max(_LEAST_ROWS, triton.next_power_of_2(spec.head_dim))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """See ``Ops``."""
        width = x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        strides = (x.stride(0), x.stride(-2), out.stride(0), out.stride(-2))
        pad = triton.next_power_of_2(width)
        rms_norm_kernel[(len(x), heads)](x, weight, out, *strides, eps, WIDTH=width, PAD=pad)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Ops``."""
        num, width = out.shape
        strides = gate_up.stride(0), out.stride(0)
        grid = (num, triton.cdiv(width, _SILU_PIECE))
        silu_mul_kernel[grid](gate_up, out, *strides, WIDTH=width, PIECE=_SILU_PIECE)

    def rotate(self, heads: torch.Tensor, angles: torch.Tensor) -> None:
        """See ``Ops``."""
        num, num_heads, head_dim = heads.shape
        half = head_dim // 2
        pad = triton.next_power_of_2(half)
        strides = heads.stride(0), heads.stride(1)
        rotate_kernel[(num, num_heads)](heads, angles, *strides, HALF=half, PAD=pad)

    def place(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch
    ) -> None:
        """See ``Ops``."""
        assert k.stride() == v.stride() and k.stride(1) == k.shape[2], (k.stride(), v.stride())
        num, kv_heads, head_dim = k.shape
        place_kernel[(num, kv_heads)](
            k,
            v,
            kv,
            batch.entries,
            batch.offsets,
            k.stride(0),
            layer + self._spec.num_layers,
            KV_HEADS=kv_heads,
            BLOCK_SIZE=kv.shape[3],
            HEAD_DIM=head_dim,
            PAD=triton.next_power_of_2(head_dim),
        )

    def attend(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        """See ``Ops``."""
        assert q.stride(1) == q.shape[2], q.stride()
        num_seqs, max_blocks = batch.tables.shape
        tiles = len(q) // self._queries + num_seqs
        attention_kernel[(tiles, self._spec.num_kv_heads)](
            q,
            kv,
            out,
            batch.tables,
            batch.q_starts,
            batch.context_lens,
            num_seqs,
            max_blocks,
            q.stride(0),
            out.stride(0),
            layer + self._spec.num_layers,
            self._spec.head_dim**-0.5,
            self._spec.sliding_window or 0,
            KV_HEADS=self._spec.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._spec.head_dim,
            HEAD_PAD=self._head_pad,
            BLOCK_SIZE=kv.shape[3],
            QUERIES=self._queries,
            ROWS=self._rows,
            KEYS=_KEYS,
        )
