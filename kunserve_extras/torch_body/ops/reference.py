"""The operations in plain torch: they run everywhere, and are what faster ones are held against."""

import numpy as np
import torch
import torch.nn.functional as functional

from kunserve.engine.attention import capped
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.expert_room import ExpertRoom
from kunserve_extras.torch_body.ops.table import DeviceBatch, HeadNorms, Heads
from kunserve_extras.torch_body.quantised import QuantisedMatrix


class ReferenceOps:
    """Implements ``Ops``. Sums and exponentials are in float32."""

    product_sizes: tuple[int, ...] = ()

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._num_layers = spec.num_layers
        self._group = spec.num_heads // spec.num_kv_heads

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """See ``Ops``."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        if self._spec.has_offset_norms:
            out.copy_(wide * scale * (weight.float() + 1.0))
        else:
            out.copy_((wide * scale).to(x.dtype) * weight)

    def gate_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Ops``."""
        gate, up = gate_up.chunk(2, dim=-1)
        is_gelu = self._spec.has_gelu
        opened = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
        torch.mul(opened, up, out=out)

    def product(
        self,
        x: torch.Tensor,
        weight: QuantisedMatrix,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        adds: bool,
    ) -> None:
        """See ``Ops``."""
        wide = torch.cat([part.widened() for part in weight.parts])
        sums = x.float() @ wide.t()
        if bias is not None:
            sums += bias.float()
        if adds:
            sums += out.float()
        out.copy_(sums)

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
        if norms is not None:
            for rows, weight in zip((q, k), norms, strict=True):
                self.rms_norm(rows, weight, self._spec.rms_eps, rows)
        _turn(q, angles)
        _turn(k, angles)
        units = batch.entries.long() + (layer + self._num_layers)
        offsets = batch.offsets.long()
        kv[:, 0][units, :, offsets] = k
        kv[:, 1][units, :, offsets] = v

    def attend(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, out: torch.Tensor
    ) -> None:
        """See ``Ops``. One sequence after the other."""
        if batch.host is None:
            tables, contexts = batch.tables, batch.context_lens
            if batch.is_mixed:  # each token as a sequence of its own
                rows = torch.arange(len(q), device=q.device)
                seqs = torch.searchsorted(batch.q_starts[1:], rows, right=True)
                tables, contexts = tables[seqs.clamp(max=len(tables) - 1)], batch.positions + 1
            self._attend_single_tokens(layer, q, kv, tables, contexts, out)
            return
        starts, contexts = batch.host.q_starts.tolist(), batch.host.context_lens.tolist()
        block_size = kv.shape[3]
        for s, context in enumerate(contexts):
            start, end = starts[s], starts[s + 1]
            if start == end:
                continue
            num_blocks = -(-context // block_size)
            units = batch.tables[s, :num_blocks].long() + (layer + self._num_layers)
            blocks = kv.index_select(0, units)  # [blocks, 2, kv_heads, block_size, head_dim]
            k, v = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].float()
            rows = q[start:end].float()
            rows = rows.reshape(end - start, -1, self._group, q.shape[-1])
            scores = torch.einsum("qkgd,ktd->kgqt", rows, k) * q.shape[-1] ** -0.5
            capped(scores, self._spec.score_cap)
            window = self._spec.window_of(layer)
            hidden = _hidden(end - start, context, window).to(q.device)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            mixed = torch.einsum("kgqt,ktd->qkgd", weights, v)
            out[start:end] = mixed.reshape(end - start, -1).to(out.dtype)

    def _attend_single_tokens(
        self,
        layer: int,
        q: torch.Tensor,
        kv: torch.Tensor,
        tables: torch.Tensor,
        context_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """All sequences at once, as long as their tables are wide."""
        num, head_dim = len(q), q.shape[-1]
        units = tables.long() + (layer + self._num_layers)
        blocks = kv.index_select(0, units.flatten())
        blocks = blocks.view(num, -1, *kv.shape[1:])  # [S, blocks, 2, kv_heads, block, head_dim]
        k, v = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).float()
        k_at = torch.arange(k.shape[2], device=q.device)
        contexts = context_lens[:, None]
        hidden = k_at >= contexts
        window = self._spec.window_of(layer)
        if window is not None:
            hidden = hidden | (k_at < contexts - window)
        rows = q.float().view(num, -1, self._group, head_dim)
        scores = torch.einsum("skgd,sktd->skgt", rows, k) * head_dim**-0.5
        capped(scores, self._spec.score_cap)
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
        # What was never written may be no number, and 0 times that is none either.
        v = v.masked_fill(hidden[:, None, :, None], 0.0)
        out.copy_(torch.einsum("skgt,sktd->skgd", weights, v).reshape(num, -1))

    def route(
        self, x: torch.Tensor, router: torch.Tensor, first_expert: int, room: ExpertRoom
    ) -> None:
        """See ``Ops``. Nothing is ordered."""
        experts = self._spec.experts
        assert experts is not None
        torch.mm(x.float(), router.float().t(), out=room.logits)
        logits = room.logits[:, : experts.number]
        ranked = torch.sort(logits, dim=-1, descending=True, stable=True).indices
        chosen = ranked[:, : experts.per_token].sort(dim=-1).values
        shares = logits.softmax(dim=-1).gather(1, chosen)
        if experts.normalised:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        room.chosen.copy_(chosen)
        room.shares.copy_(shares)

    def run_experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        first_expert: int,
        room: ExpertRoom,
    ) -> None:
        """See ``Ops``. Every held expert computes every row, because nobody asks whose they are."""
        held, hidden = len(room.starts) - 1, x.shape[1]
        each = gate_up.view(held, -1, hidden), down.view(held, hidden, -1)
        for own, (gate_up_of, down_of) in enumerate(zip(*each, strict=True)):
            inner = x.new_empty(len(x), down_of.shape[1])
            self.gate_mul(x @ gate_up_of.t(), inner)
            found = inner @ down_of.t()
            is_chosen = room.chosen == own + first_expert
            torch.where(is_chosen[:, :, None], found[:, None], room.products, out=room.products)

    def sum_experts(
        self,
        first_expert: int,
        room: ExpertRoom,
        shared: torch.Tensor | None,
        hidden: torch.Tensor | None,
    ) -> None:
        """See ``Ops``."""
        held = len(room.starts) - 1
        is_other = (room.chosen < first_expert) | (room.chosen >= first_expert + held)
        sums = torch.zeros_like(room.products[:, 0], dtype=torch.float32)
        for place in range(room.chosen.shape[1]):
            parts = room.products[:, place].float() * room.shares[:, place, None]
            sums += parts.masked_fill(is_other[:, place, None], 0.0)
        if shared is not None:
            sums += shared.float() * room.logits[:, -1:].sigmoid()
        if hidden is None:
            room.sums.copy_(sums)
        else:
            hidden.add_(sums.to(hidden.dtype))


def _turn(heads: torch.Tensor, angles: torch.Tensor) -> None:
    """``heads`` [T, n, head_dim] in place."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def _hidden(num_queries: int, context: int, window: int | None) -> torch.Tensor:
    """[queries, context] what each of the last tokens must not see."""
    q_at = np.arange(context - num_queries, context)[:, None]
    k_at = np.arange(context)[None, :]
    hidden = k_at > q_at
    if window is not None:
        hidden |= k_at <= q_at - window
    return torch.from_numpy(hidden)
