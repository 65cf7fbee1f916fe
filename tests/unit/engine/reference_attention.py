"""Attention a second time, slow and plain: what the kernels of CPUs are tested against."""

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from kunserve.core.config import InstanceConfig
from kunserve.engine.attention import TORCH_DTYPES, StepBatch, c_model, capped
from kunserve.engine.backend import CpuBackend
from kunserve.engine.cpu.decoder import Decoder
from kunserve.engine.cpu.kernels.library import kernel
from kunserve.engine.cpu.kernels.ops import Finish, Matrix, linear, rms_norm
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory.memory import Memory
from kunserve.model.spec import ModelSpec
from tests.unit.engine.reference_experts import add_experts


class FusedAttention:
    """The C kernel: paged, any mix of decodes and prompt chunks, bit-identical per query."""

    def __init__(self, spec: ModelSpec, kv_base_address: int, block_size: int) -> None:
        self._spec = spec
        self._model = c_model(spec, kv_base_address, block_size)
        self._kernel = kernel("kun_attention", TORCH_DTYPES[spec.dtype])

    def attend(self, layer: int, qkv: torch.Tensor, batch: StepBatch, out: torch.Tensor) -> None:
        """``qkv`` [T, q + 2 kv] holds rotated queries; ``out`` is [T, q]. K and V of the step's
        own tokens are in the cache already.
        """
        window = self._spec.window_of(layer) or 0
        self._kernel(self._model, batch.as_c(), qkv.data_ptr(), out.data_ptr(), layer, window)


class ReferenceAttention:
    """Gather, then plain float32 torch: slow, and what the fused kernel is tested against."""

    def __init__(self, spec: ModelSpec, kv_base_address: int, block_size: int) -> None:
        self._spec = spec
        self._base = kv_base_address
        self._block_size = block_size

    def attend(self, layer: int, qkv: torch.Tensor, batch: StepBatch, out: torch.Tensor) -> None:
        """As ``FusedAttention.attend``."""
        spec, window, tables = self._spec, self._spec.window_of(layer), batch.tables
        if window is not None and batch.local_tables is not None:
            tables = batch.local_tables
        group = spec.num_heads // spec.num_kv_heads
        for s, row in enumerate(batch.rows):
            start, end = int(batch.q_starts[s]), int(batch.q_starts[s + 1])
            context = int(batch.context_lens[s])
            if start == end:
                continue
            k, v = self._gather(layer, tables[row], context)
            q = qkv[start:end, : spec.q_size].float().view(end - start, spec.num_heads, -1)
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
            capped(scores, spec.score_cap)
            q_at = torch.arange(context - (end - start), context)[:, None]
            k_at = torch.arange(context)[None, :]
            hidden = k_at > q_at
            if window is not None:
                hidden |= k_at <= q_at - window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, v)
            out[start:end] = mixed.reshape(end - start, -1).to(out.dtype)

    def _gather(
        self, layer: int, entries: np.ndarray, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [context, kv_heads, head_dim] in float32."""
        num_blocks = -(-context // self._block_size)
        units = torch.stack([self._unit(int(entry) + layer) for entry in entries[:num_blocks]])
        both = units.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context].float()
        return both[0], both[1]

    def _unit(self, unit: int) -> torch.Tensor:
        """A view of one unit: [2, kv_heads, block_size, head_dim]."""
        spec = self._spec
        size = spec.unit_bytes(self._block_size)
        raw = (ctypes.c_uint8 * size).from_address(self._base + unit * size)
        flat = torch.frombuffer(raw, dtype=TORCH_DTYPES[spec.dtype])
        return flat.view(2, spec.num_kv_heads, self._block_size, spec.head_dim)


class ReferenceDecoder(Decoder):
    """An operation at a time around plain attention, where ``Decoder`` calls C for a stage."""

    fused = None
    attention: type[ReferenceAttention] | type[FusedAttention] = ReferenceAttention

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kv_base_address: int,
        block_size: int,
        num_threads: int,
    ) -> None:
        super().__init__(spec, weights, kv_base_address, block_size, num_threads)
        self._attention = self.attention(spec, kv_base_address, block_size)
        self._place = kernel("kun_place", self._dtype)

    def forward(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """See ``StepDecoder``."""
        for layer in range(*self._range):
            self._run_layer(layer, batch, hidden)
        return hidden

    def _run_layer(self, layer: int, batch: StepBatch, hidden: torch.Tensor) -> None:
        weights, eps, offset = self._weights.layers[layer], self._spec.rms_eps, self._norm_offset
        normed, qkv, mixed, gated = (
            self._scratch(name, batch.num_tokens) for name in ("normed", "qkv", "mixed", "gated")
        )
        rms_norm(hidden, weights.input_norm, eps, normed, offset)
        linear(normed, weights.qkv, weights.qkv_bias, out=qkv)
        c_batch = batch.as_c(*(table.address(batch.num_positions) for table in self._rope))
        buffers = self._buffers(hidden)
        self._place(self._model, self._layers[layer], c_batch, buffers, layer)
        self._attention.attend(layer, qkv, batch, mixed)
        self._add(mixed, weights.o, weights.o_bias, weights.attention_out_norm, hidden)
        rms_norm(hidden, weights.post_norm, eps, normed, offset)
        if self._spec.experts is not None:
            self._add_experts(layer, normed, hidden)
            return
        gate = Finish.GEGLU if self._spec.has_gelu else Finish.SWIGLU
        linear(normed, weights.gate_up, weights.gate_up_bias, gated, gate)
        self._add(gated, weights.down, weights.down_bias, weights.mlp_out_norm, hidden)

    def _add_experts(self, layer: int, normed: torch.Tensor, hidden: torch.Tensor) -> None:
        add_experts(normed, hidden, self._weights.layers[layer], self._spec)

    def _add(
        self,
        x: torch.Tensor,
        weight: Matrix,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        hidden: torch.Tensor,
    ) -> None:
        """Add a product to the residual stream, normalised first where the model does so."""
        if norm is None:
            linear(x, weight, bias, hidden, Finish.RESIDUAL)
            return
        product = linear(x, weight, bias, self._scratch("normed", len(x)))
        hidden += rms_norm(product, norm, self._spec.rms_eps, product, self._norm_offset)


class FedAlikeDecoder(ReferenceDecoder):
    """An operation at a time, by the very kernels that a stage is made of.

    So each product gets the same bits as in a stage. With plain attention they would differ in the
    last one, in another way on each processor, and what lies there between two of the steps to
    which products with quantised weights round would go up here and down there.
    """

    attention = FusedAttention

    def _add_experts(self, layer: int, normed: torch.Tensor, hidden: torch.Tensor) -> None:
        """From the scratch's ``normed``, where these are."""
        run = kernel("kun_experts", self._dtype)
        run(self._model, self._layers[layer], self._buffers(hidden), len(hidden))


class ReferenceBackend(CpuBackend):
    """A CPU whose steps are computed plainly."""

    rows_are_alike = False
    decoder_type: type[ReferenceDecoder] = ReferenceDecoder

    def decoder(
        self, spec: ModelSpec, weights: ModelWeights, memory: Memory, config: InstanceConfig
    ) -> ReferenceDecoder:
        """See ``Backend``."""
        at = memory.shards[0].kv_base_address
        return self.decoder_type(spec, weights, at, config.block_size, config.num_threads)


class FedAlikeBackend(ReferenceBackend):
    """A CPU whose steps are computed an operation at a time."""

    decoder_type = FedAlikeDecoder
