"""The operations by our own Triton kernels."""

import logging

import torch
import triton

from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.table import DeviceBatch, HeadNorms, Heads
from kunserve_extras.torch_body.quantised import QuantisedMatrix
from kunserve_extras.triton_ops.attention import attention_kernel, join_kernel, part_kernel
from kunserve_extras.triton_ops.expert_ops import ExpertOps
from kunserve_extras.triton_ops.packed import packed_kernel
from kunserve_extras.triton_ops.packed_tiles import PRODUCT_TOKENS, product_tile
from kunserve_extras.triton_ops.recorder import TorchRecorder
from kunserve_extras.triton_ops.rows import gate_mul_kernel, place_kernel, rms_norm_kernel
from kunserve_extras.triton_ops.tiles import LEAST_PART_KEYS, AttentionTiles, tiles_for

__all__ = ["TorchRecorder", "TritonOps", "place_warps"]

logger = logging.getLogger(__name__)

_LEAST_PAD = 16
"""Tensor cores multiply tiles of at least so many columns."""
_GATE_PIECE = 1024
_PROGRAMS = 264
"""As many keep a large device busy (two on each processor of an H200). Bits do not depend on it."""


def place_warps(group_pad: int, pad: int) -> int:
    """So that a thread turns 16 bytes of a group's queries in half precision, or more."""
    return max(1, min(4, group_pad * pad // 256))


class TritonOps(ExpertOps):
    """Implements ``Ops`` for a model on a CUDA device, or in Triton's interpreter."""

    product_sizes: tuple[int, ...] = PRODUCT_TOKENS

    def __init__(self, spec: ModelSpec, tiles: AttentionTiles | None = None) -> None:
        super().__init__(spec)
        self._group = spec.num_heads // spec.num_kv_heads
        self._head_pad = max(_LEAST_PAD, triton.next_power_of_2(spec.head_dim))
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self._tiles = tiles or tiles_for(spec, device_name)
        self._has_joined = False
        logger.info("attention on %s by %s", device_name or "no device", self._tiles)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """See ``Ops``."""
        width = x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        strides = (x.stride(0), x.stride(-2), out.stride(0), out.stride(-2))
        pad = triton.next_power_of_2(width)
        rms_norm_kernel[(len(x), heads)](
            x, weight, out, *strides, eps, WIDTH=width, PAD=pad, OFFSET=self._spec.has_offset_norms
        )

    def gate_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Ops``."""
        num, width = out.shape
        strides = gate_up.stride(0), out.stride(0)
        grid = (num, triton.cdiv(width, _GATE_PIECE))
        gate_mul_kernel[grid](
            gate_up, out, *strides, WIDTH=width, PIECE=_GATE_PIECE, GELU=self._spec.has_gelu
        )

    def product(
        self,
        x: torch.Tensor,
        weight: QuantisedMatrix,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        adds: bool,
    ) -> None:
        """See ``Ops``. A launch for each part."""
        assert x.is_contiguous() and out.stride(1) == 1, (x.stride(), out.stride())
        first = 0
        for part in weight.parts:
            rows = slice(first, first + part.num_rows)
            own = x if bias is None else bias[rows]
            tile = product_tile(len(x), part, self._spec.dtype)
            grid = (triton.cdiv(part.num_rows, tile.rows), triton.cdiv(len(x), tile.tokens))
            packed_kernel[grid](
                x,
                part.values,
                part.scales,
                own,
                out[:, rows],
                len(x),
                part.num_rows,
                out.stride(0),
                COLUMNS=part.num_columns,
                GROUP=part.group,
                BITS=part.form.bits,
                FLOATS=part.form.is_e4m3,
                BIAS=bias is not None,
                ADDS=adds,
                ROWS=tile.rows,
                TOKENS=tile.tokens,
                STEP=tile.step,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
            first += part.num_rows

    def place(
        self,
        layer: int,
        heads: Heads,
        norms: HeadNorms | None,
        angles: torch.Tensor,
        kv: torch.Tensor,
        batch: DeviceBatch,
    ) -> None:
        """See ``Ops``."""
        q, k, v = heads
        num, kv_heads, head_dim = k.shape
        strides = q.stride()
        assert strides == k.stride() == v.stride() and strides[1] == head_dim, strides
        group_pad = triton.next_power_of_2(self._group)
        pad = triton.next_power_of_2(head_dim // 2)
        q_norm, k_norm = norms or (q, k)
        place_kernel[(num, kv_heads)](
            q,
            k,
            v,
            q_norm,
            k_norm,
            angles,
            kv,
            batch.entries,
            batch.offsets,
            strides[0],
            layer + self._spec.num_layers,
            self._spec.rms_eps,
            KV_HEADS=kv_heads,
            GROUP=self._group,
            GROUP_PAD=group_pad,
            BLOCK_SIZE=kv.shape[3],
            HALF=head_dim // 2,
            PAD=pad,
            NORMS=norms is not None,
            OFFSET=self._spec.has_offset_norms,
            num_warps=place_warps(group_pad, pad),
        )

    def attend(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        """See ``Ops``."""
        assert q.stride(1) == q.shape[2], q.stride()
        # Each kernel leaves the other's sequences alone.
        if batch.lengths.has_several:
            self._attend_several(layer, q, kv, batch, out)
        if batch.lengths.has_single:
            self._attend_single(layer, q, kv, batch, out)

    def _attend_several(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        """Sequences of several tokens; leaves the others alone."""
        tile = self._tiles.several
        num_seqs, max_blocks = batch.tables.shape
        queries = tile.rows // self._group
        attention_kernel[(len(q) // queries + num_seqs, self._spec.num_kv_heads)](
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
            self._spec.window_of(layer) or 0,
            KV_HEADS=self._spec.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._spec.head_dim,
            HEAD_PAD=self._head_pad,
            BLOCK_SIZE=kv.shape[3],
            QUERIES=queries,
            ROWS=tile.rows,
            KEYS=tile.keys,
            CAP=self._spec.score_cap or 0.0,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _attend_single(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        """Sequences of one token; leaves the others alone."""
        spec, tile = self._spec, self._tiles.single
        num_seqs, max_blocks = batch.tables.shape
        parts = self._tiles.parts
        shape = (num_seqs, spec.num_heads, parts * (self._head_pad + 2))
        sums = torch.empty(shape, dtype=torch.float32, device=q.device)
        window = spec.window_of(layer) or 0
        programs = min(parts, max(1, _PROGRAMS // (num_seqs * spec.num_kv_heads)))
        part_kernel[(spec.num_kv_heads, num_seqs, programs)](
            q,
            kv,
            sums,
            out,
            batch.tables,
            batch.q_starts,
            batch.context_lens,
            max_blocks,
            q.stride(0),
            out.stride(0),
            layer + spec.num_layers,
            spec.head_dim**-0.5,
            window,
            KV_HEADS=spec.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=spec.head_dim,
            HEAD_PAD=self._head_pad,
            BLOCK_SIZE=kv.shape[3],
            ROWS=tile.rows,
            KEYS=tile.keys,
            PARTS=parts,
            LEAST=LEAST_PART_KEYS,
            CAP=spec.score_cap or 0.0,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if not self._joins(batch):
            return
        join_kernel[(num_seqs, spec.num_heads)](
            sums,
            out,
            batch.q_starts,
            batch.context_lens,
            out.stride(0),
            window,
            HEADS=spec.num_heads,
            HEAD_DIM=spec.head_dim,
            HEAD_PAD=self._head_pad,
            KEYS=tile.keys,
            PARTS=parts,
            LEAST=LEAST_PART_KEYS,
            num_warps=4,
        )

    def _joins(self, batch: DeviceBatch) -> bool:
        """Whether a sequence may have several parts. The first call joins in any case, so that all
        is compiled.
        """
        if not self._has_joined:
            self._has_joined = True
            return True
        return batch.lengths.longest > LEAST_PART_KEYS
