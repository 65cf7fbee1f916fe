"""``Decoder`` for any device of torch: the same layers over a table of operations.

With a recorder, small steps run by graphs; see ``torch_body.graphs``.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import LayerRange
from kunserve.engine.attention import TORCH_DTYPES, capped
from kunserve.engine.cpu.decoder import Found, StepBatch, StepLimits, scaled
from kunserve.engine.cpu.kernels.ops import Matrix
from kunserve.engine.cpu.kernels.rope import rope_tables
from kunserve.engine.layer_weights import LayerWeights, ModelWeights
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.experts import AddUp, add_experts
from kunserve_extras.torch_body.graph_inputs import GraphInputs
from kunserve_extras.torch_body.graphs import (
    MIXED_ROWS,
    GraphCounts,
    LayerGraphs,
    Recorder,
    sizes_up_to,
)
from kunserve_extras.torch_body.ops.table import DeviceBatch, HeadNorms, Heads, Ops
from kunserve_extras.torch_body.pinned import Sender
from kunserve_extras.torch_body.quantised import (
    QuantisedMatrix,
    has_quantised,
    layers_of_each_kind,
)
from kunserve_extras.torch_body.scratch import Scratch
from kunserve_extras.torch_body.whole_steps import WholeSteps

_LEAST_WARM_UP = 3
"""A prompt of two tokens, and a single one: different kernels attend to them."""
RECORD_WITHIN_S = 60.0
"""No further size of steps is recorded when the start has taken so long for it."""


class TorchDecoder:
    """Runs steps over the layers of a stage. One step at a time; not thread-safe.

    ``kv`` are the bytes of all units, from ``num_layers`` units below unit 0 on, because entries
    may be as low. Only units that a batch names are touched, and by recorded steps those below
    unit 0.
    """

    fused = None
    """See ``StepDecoder``."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kv: torch.Tensor,
        block_size: int,
        ops: Ops,
        recorder: Recorder | None = None,
        add_up: AddUp | None = None,
        first_expert: int = 0,
    ) -> None:
        """``reserve`` records steps if there is a ``recorder``.

        With ``add_up`` this is one rank of several: ``spec`` and ``weights`` are its part, and
        what attention and the MLP give is summed over all ranks.
        """
        assert recorder is None or add_up is None, "sums over ranks are not recorded"
        self._spec = spec
        self._add_up = add_up
        self._first_expert = first_expert
        self._weights = weights
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._device = kv.device
        self._block_size = block_size
        shape = (-1, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self._kv = kv.view(self._dtype).view(shape)
        self._ops = ops
        self._range = LayerRange(0, spec.num_layers)
        self._rope = rope_tables(spec)
        none = torch.empty(0, 2, spec.head_dim // 2, device=self._device)
        self._angles = [none for _ in self._rope]
        """A table each, of which a layer has one."""
        self._logits = torch.empty(0, spec.vocab_size, device=self._device)
        self._raw_logits = self._logits.to(self._dtype)
        """Before they are widened."""
        self._whole_steps: WholeSteps | None = None
        self._sender = Sender(self._device)
        self._recorder = recorder
        self._recorded: list[tuple[LayerGraphs, GraphInputs]] = []
        """Steps of single tokens, and mixed ones."""
        self._reserve_scratch(0)
        self._recorded_scratch = self._scratch
        """Graphs keep its addresses, so it stays when larger steps get larger buffers."""

    def reserve(self, limits: StepLimits, record_within_s: float = RECORD_WITHIN_S) -> None:
        """Take all memory that steps within these limits need, and record what can be recorded.

        Every layer must be held and loaded.
        """
        self._reserve_scratch(limits.num_tokens)
        for table in self._rope:  # exactly so many: what grows later is rounded up
            table.reserve(limits.num_positions)
        self._reserve_positions(limits.num_positions)
        self._reserve_logits(limits.num_sampled)
        for num_tokens in self._warm_up_sizes(limits.num_tokens):
            for layer in layers_of_each_kind(self._weights):
                self._warm_up(num_tokens, layer, min(num_tokens, limits.num_sampled))
        if self._spec.experts is not None and limits.num_tokens:
            # Large steps may have kernels of their own.
            self._add_experts(0, self._scratch, torch.zeros_like(self._scratch.normed))
        num_seqs = limits.most_single_tokens
        if self._recorder is not None and num_seqs:
            began_s = time.perf_counter()
            self._record(self._recorder, sizes_up_to(num_seqs), limits, record_within_s)
            left_s = record_within_s - (time.perf_counter() - began_s)
            if left_s > 0.0:
                mixed = sizes_up_to(limits.num_tokens, MIXED_ROWS)
                self._record(self._recorder, mixed, limits, left_s, num_seqs)

    @property
    def graph_counts(self) -> GraphCounts | None:
        """What was recorded and asked for; None where nothing is recorded."""
        return self._recorded[0][0].counts if self._recorded else None

    def _warm_up_sizes(self, num_tokens: int) -> list[int]:
        """Steps of so many tokens have all kernels compiled that ones of ``num_tokens`` need."""
        sizes = {_LEAST_WARM_UP}
        if has_quantised(self._weights):
            sizes |= {max(_LEAST_WARM_UP, size) for size in self._ops.product_sizes}
        return sorted(size for size in sizes if size <= num_tokens)

    def _warm_up(self, num_tokens: int, layer: int, num_sampled: int) -> None:
        """Have kernels compiled, by a step of one layer that writes below unit 0."""
        end = num_tokens - 1
        tables = np.full((2, -(-end // self._block_size)), -self._spec.num_layers, dtype=np.int32)
        batch = StepBatch(
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            positions=np.array([*range(end), 0], dtype=np.int32),
            tables=tables,
            rows=np.arange(2, dtype=np.int32),
            q_starts=np.array([0, end, num_tokens], dtype=np.int32),
            context_lens=np.array([end, 1], dtype=np.int32),
            sample_rows=np.arange(num_tokens - num_sampled, num_tokens, dtype=np.int32),
        )
        self.set_layers(LayerRange(layer, layer + 1))
        self.logits(batch, self.forward(batch, self.embed(batch)))
        self.set_layers(LayerRange(0, self._spec.num_layers))

    def _record(
        self,
        recorder: Recorder,
        sizes: tuple[int, ...],
        limits: StepLimits,
        within_s: float,
        mixed_seqs: int | None = None,
    ) -> None:
        sized = self._block_size, max(sizes), limits.num_positions
        inputs = GraphInputs(self._spec, *sized, self._device, mixed_seqs)
        scratch = self._recorded_scratch = self._scratch

        whole = None
        if mixed_seqs is None and max(sizes) <= len(self._logits):
            whole = self._whole_steps = WholeSteps(
                self._angles, self._logits, self._raw_logits, max(sizes), inputs
            )

        def begin(rows: int) -> Callable[[int], None]:
            hidden, angles = inputs.hidden[:rows], [table[:rows] for table in inputs.angles]
            batch = inputs.fill(rows, None)
            return lambda layer: self._run_layer(layer, hidden, angles, batch, scratch)

        graphs = LayerGraphs(self._spec.num_layers, recorder, self.graph_counts)
        self._recorded.append((graphs, inputs))
        ask = None if whole is None else partial(self._run_whole, whole, scratch)
        graphs.record(sizes, begin, within_s, ask)

    def _run_whole(self, whole: WholeSteps, scratch: Scratch, rows: int) -> None:
        """What is recorded of a whole step."""
        batch, hidden, angles = whole.begin(rows)
        self._gather(batch.token_ids, hidden)
        scaled(hidden, self._spec.embedding_scale)
        for layer in range(self._spec.num_layers):
            self._run_layer(layer, hidden, angles, batch, scratch)
        self._run_head(hidden, whole.logits[:rows])
        torch.max(whole.logits[:rows], dim=1, out=whole.found(rows))

    @property
    def recorded(self) -> "TorchDecoder | None":
        """See ``StepDecoder``."""
        return None if self._whole_steps is None else self

    def ask_whole(self, batch: StepBatch) -> tuple[torch.Tensor, Found] | None:
        """See ``RecordedDecoder``: steps of single tokens, each of which gives one."""
        whole, (graphs, inputs) = self._whole_steps, self._recorded[0]
        num, rows = batch.num_tokens, graphs.rows_for(batch.num_tokens)
        if whole is None or rows is None or self._range.num_layers < self._spec.num_layers:
            return None
        if len(batch.sample_rows) != num or not inputs.holds(batch):
            return None
        if batch.positions.max() >= len(whole.tables[0]) or not graphs.has_whole(rows):
            return None
        on_device = inputs.fill(rows, batch)
        if batch.fed is not None:
            on_device.token_ids[:num].copy_(batch.fed)
        graphs.launch_whole(rows)
        return whole.logits[:num], whole.found(num)

    def _reserve_scratch(self, num_tokens: int) -> None:
        has_sums = self._add_up is not None
        self._scratch = Scratch.of(self._spec, num_tokens, self._device, has_sums=has_sums)

    @property
    def buffer_bytes(self) -> int:
        """Memory of activations, logits and positions."""
        tensors = self._logits, *self._angles
        tensors += () if self._dtype == torch.float32 else (self._raw_logits,)
        inputs_bytes = sum(inputs.num_bytes for _, inputs in self._recorded)
        return self._scratch.num_bytes + inputs_bytes + sum(tensor.nbytes for tensor in tensors)

    def set_layers(self, layers: LayerRange) -> None:
        """The layers that ``forward`` computes from now on; all of them at first."""
        assert LayerRange(0, self._spec.num_layers).covers(layers), layers
        self._range = layers

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """The tokens' embeddings, [T, hidden], newly allocated."""
        ids = batch.fed
        if ids is None:
            ids = self._sender.send({"ids": batch.token_ids.astype(np.int64)})["ids"]
        hidden = torch.empty(
            len(ids), self._spec.hidden_size, dtype=self._dtype, device=self._device
        )
        self._gather(ids, hidden)
        return scaled(hidden, self._spec.embedding_scale)

    def _gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        embedding = self._weights.embedding
        if isinstance(embedding, QuantisedMatrix):
            out.copy_(embedding.gathered(ids, self._dtype))
        else:
            torch.index_select(embedding, 0, ids, out=out)

    def forward(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The stage's layers over ``hidden`` [T, hidden], in place; returns it."""
        shape = (batch.num_tokens, self._spec.hidden_size)
        assert hidden.shape == shape and hidden.dtype == self._dtype, (hidden.shape, hidden.dtype)
        if batch.num_tokens == 0:
            return hidden
        self._reserve_positions(int(batch.positions.max()) + 1)
        for graphs, inputs in self._recorded:
            rows = graphs.rows_for(batch.num_tokens)
            if rows is not None and inputs.holds(batch):
                self._run_graphs(graphs, inputs, rows, batch, hidden)
                graphs.counts.mixed_steps += inputs.most_mixed_seqs is not None
                if between_layers is not None:
                    between_layers()
                return hidden
        if self.graph_counts is not None:
            self.graph_counts.eager_steps += 1
        if batch.num_tokens > self._scratch.num_tokens:
            self._reserve_scratch(batch.num_tokens)
        on_device = DeviceBatch.of(batch, self._block_size, self._device, self._sender)
        angles = [table.index_select(0, on_device.positions) for table in self._angles]
        for layer in range(*self._range):
            self._run_layer(layer, hidden, angles, on_device, self._scratch)
            if between_layers is not None:
                between_layers()
        return hidden

    def logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocab] of ``batch.sample_rows``. Overwritten by the next call."""
        return self.logits_of(batch.sample_rows, hidden)

    def logits_of(self, which: npt.NDArray[np.integer[Any]], hidden: torch.Tensor) -> torch.Tensor:
        """As ``logits``, of these rows of ``hidden``."""
        # Not a copy that waits: the head and the sampler are asked for while layers are computed.
        sent = self._sender.send({"rows": which.astype(np.int64)})
        rows = hidden.index_select(0, sent["rows"])
        if len(rows) > len(self._logits):
            self._reserve_logits(len(rows))
        return self._run_head(rows, self._logits[: len(rows)])

    def _run_head(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Logits of ``rows``, which are overwritten."""
        self._ops.rms_norm(rows, self._weights.final_norm, self._spec.rms_eps, rows)
        scaled(rows, self._spec.logit_scale)
        raw = out if self._dtype == torch.float32 else self._raw_logits[: len(rows)]
        self._linear(rows, self._weights.head, None, raw)
        return capped(out if raw is out else out.copy_(raw), self._spec.logit_cap)

    def _reserve_logits(self, num_rows: int) -> None:
        shape = num_rows, self._spec.vocab_size
        self._logits = torch.zeros(shape, device=self._device)
        if self._dtype != torch.float32:
            self._raw_logits = torch.zeros(shape, dtype=self._dtype, device=self._device)

    def room_for_logits(self, num_rows: int, width: int) -> torch.Tensor:
        """New memory: the output head is not split here."""
        return torch.empty(num_rows, width)

    def _run_graphs(
        self,
        graphs: LayerGraphs,
        inputs: GraphInputs,
        rows: int,
        batch: StepBatch,
        hidden: torch.Tensor,
    ) -> None:
        """The stage's layers over ``hidden``, padded to so many rows."""
        on_device = inputs.fill(rows, batch)
        for table, angles in zip(self._angles, inputs.angles, strict=True):
            torch.index_select(table, 0, on_device.positions, out=angles[:rows])
        inputs.hidden[: batch.num_tokens].copy_(hidden)
        inputs.hidden[batch.num_tokens : rows].zero_()
        graphs.launch(rows, self._range)
        hidden.copy_(inputs.hidden[: batch.num_tokens])

    def _run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        angles: Sequence[torch.Tensor],
        batch: DeviceBatch,
        scratch: Scratch,
    ) -> None:
        spec, ops, weights = self._spec, self._ops, self._weights.layers[layer]
        scratch = scratch.first(len(hidden))
        normed, qkv, mixed = scratch.normed, scratch.qkv, scratch.mixed
        ops.rms_norm(hidden, weights.input_norm, spec.rms_eps, normed)
        self._linear(normed, weights.qkv, weights.qkv_bias, qkv)
        heads, norms = self._heads(qkv, weights)
        ops.place(layer, heads, norms, angles[spec.rope_of(layer)], self._kv, batch)
        ops.attend(layer, heads[0], self._kv, batch, mixed)
        self._add(mixed, weights.o, weights.o_bias, weights.attention_out_norm, normed, hidden)
        ops.rms_norm(hidden, weights.post_norm, spec.rms_eps, normed)
        if spec.experts is not None:
            self._add_experts(layer, scratch, hidden)
            return
        gate_up, gated = scratch.gate_up, scratch.gated
        self._linear(normed, weights.gate_up, weights.gate_up_bias, gate_up)
        ops.gate_mul(gate_up, gated)
        self._add(gated, weights.down, weights.down_bias, weights.mlp_out_norm, normed, hidden)

    def _add_experts(self, layer: int, scratch: Scratch, hidden: torch.Tensor) -> None:
        """Of the scratch's ``normed``, which has as many rows."""
        weights, first, add_up = self._weights.layers[layer], self._first_expert, self._add_up
        add_experts(hidden, weights, self._spec, self._ops, scratch, first, add_up)

    def _add(
        self,
        x: torch.Tensor,
        weight: Matrix,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        room: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        """Add a product, over all ranks, to the residual stream; normalised first where the model
        does so.
        """
        if norm is None and self._add_up is None:
            self._add_linear(x, weight, bias, residual)
            return
        self._linear(x, weight, bias, room)
        if self._add_up is not None:
            self._add_up(room)
        if norm is not None:
            self._ops.rms_norm(room, norm, self._spec.rms_eps, room)
        residual.add_(room)

    def _heads(self, qkv: torch.Tensor, weights: LayerWeights) -> tuple[Heads, HeadNorms | None]:
        """Views of queries, keys and values, and by what each head has yet to be normalised."""
        spec = self._spec
        views = qkv.view(len(qkv), -1, spec.head_dim)
        q, k, v = views.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if weights.q_norm is None or weights.k_norm is None:
            return (q, k, v), None
        if not spec.has_whole_qk_norm:
            return (q, k, v), (weights.q_norm, weights.k_norm)
        rows = qkv.split([spec.q_size, spec.kv_size, spec.kv_size], dim=1)
        for row, weight in zip(rows, (weights.q_norm, weights.k_norm), strict=False):
            self._norm_all_heads(row, weight)
        return (q, k, v), None

    def _norm_all_heads(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """In place: all of a token's heads together."""
        self._ops.rms_norm(rows, weight, self._spec.rms_eps, rows)

    def _reserve_positions(self, num_positions: int) -> None:
        if num_positions > len(self._angles[0]):
            self._angles = [table.table(num_positions).to(self._device) for table in self._rope]

    def _linear(
        self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """``x`` times ``weight`` transposed, and the bias, into ``out``."""
        if isinstance(weight, QuantisedMatrix):
            self._ops.product(x, weight, bias, out, False)
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    def _add_linear(
        self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> None:
        """Add to ``residual``."""
        if isinstance(weight, QuantisedMatrix):
            self._ops.product(x, weight, bias, residual, True)
            return
        residual.addmm_(x, weight.t())
        if bias is not None:
            residual.add_(bias)
