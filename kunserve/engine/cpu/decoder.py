"""The decoder layers of the Llama family: one definition, any layer range.

Weights and KV memory belong to the arena: only their addresses are kept here, and the memory of
layers that a stage does not hold is never touched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import LayerRange
from kunserve.engine.attention import (
    TORCH_DTYPES,
    StepBatch,
    c_model,
    capped,
)
from kunserve.engine.cpu.ends import Ends, Largest, can_be_fused
from kunserve.engine.cpu.hidden_rows import HiddenRows
from kunserve.engine.cpu.kernels.library import (
    CBuffers,
    CLayer,
    kernel,
    set_num_threads,
)
from kunserve.engine.cpu.kernels.ops import (
    Finish,
    argmax,
    gather,
    linear,
    pick_rows,
    rms_norm,
)
from kunserve.engine.cpu.kernels.packed import PackedMatrix, rounded_bytes
from kunserve.engine.cpu.kernels.rope import rope_tables
from kunserve.engine.cpu.logit_room import LogitRoom
from kunserve.engine.cpu.scratch import Scratch, routing_bytes, widest
from kunserve.engine.layer_weights import ModelWeights, as_c
from kunserve.model.spec import ModelSpec

__all__ = ["LOGIT_ROWS", "Decoder", "FusedDecoder", "StepBatch", "StepDecoder", "StepLimits"]

LOGIT_ROWS = 32
"""Rows of logits that are computed together of a prompt. Steps have memory for so many."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a decoder will see."""

    num_tokens: int
    num_sampled: int
    """Rows of logits."""
    num_positions: int
    num_seqs: int | None = None
    """Sequences; None: as many as rows of logits."""

    @property
    def most_single_tokens(self) -> int:
        """Sequences in a step that computes one token of each."""
        num_seqs = self.num_sampled if self.num_seqs is None else self.num_seqs
        return min(self.num_tokens, num_seqs)

    def buffer_bytes(self, spec: ModelSpec) -> int:
        """What such steps need beside weights and KV."""
        widths = spec.hidden_size + spec.qkv_size + spec.q_size + spec.gated_size
        activations = self.num_tokens * widths * spec.dtype_bytes + self.hidden_bytes(spec)
        if spec.experts is not None:
            activations += routing_bytes(self.num_tokens, spec.experts)
            activations += self.num_tokens * spec.hidden_size * 4
        if spec.packed is not None:
            activations += rounded_bytes(self.num_tokens, widest(spec))
        head = self.num_sampled * (4 * spec.vocab_size + spec.hidden_size * spec.dtype_bytes)
        return activations + head + spec.num_ropes * self.num_positions * spec.head_dim * 4

    def hidden_bytes(self, spec: ModelSpec) -> int:
        """What the residual stream of such steps needs; ``buffer_bytes`` has it, too."""
        return self.num_tokens * spec.hidden_size * spec.dtype_bytes


Found: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""On a device the largest of each row of logits, and its first place."""


class FusedDecoder(Protocol):
    """Computes a step in one call, which asks for no mail between layers."""

    def run_whole(self, batch: StepBatch) -> tuple[torch.Tensor, Largest]:
        """From tokens to logits and the largest of each, over all layers.

        The logits are overwritten by the next call.
        """
        ...

    def run_fused(self, batch: StepBatch, hidden: HiddenRows | None) -> HiddenRows:
        """The stage's layers, in place; with None from its tokens, into new rows.

        Returns what is wanted of them.
        """
        ...


class RecordedDecoder(Protocol):
    """Has whole steps of a device recorded, from tokens to the largest logits."""

    def ask_whole(self, batch: StepBatch) -> tuple[torch.Tensor, Found] | None:
        """Ask for a step over all layers; its logits, as ``StepDecoder.logits`` gives them.

        None, and nothing is asked for, where no such step was recorded.
        """
        ...


class StepDecoder(Protocol):
    """Runs steps over the layers of a stage."""

    @property
    def recorded(self) -> RecordedDecoder | None:
        """What was recorded of it; None where nothing can be."""
        ...

    @property
    def fused(self) -> FusedDecoder | None:
        """What does the same in one call; None where nothing does."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Memory beside weights and KV."""
        ...

    def reserve(self, limits: StepLimits) -> None:
        """Take all memory that steps within these limits need, so that none fails or waits."""
        ...

    def set_layers(self, layers: LayerRange) -> None:
        """The layers that ``forward`` computes from now on."""
        ...

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """The tokens' embeddings, [T, hidden], newly allocated."""
        ...

    def forward(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The stage's layers over ``hidden``, in place; returns it, or what is wanted of it."""
        ...

    def logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocab] of ``batch.sample_rows``. Overwritten by the next call."""
        ...

    def logits_of(self, which: npt.NDArray[np.integer[Any]], hidden: torch.Tensor) -> torch.Tensor:
        """As ``logits``, of these rows of ``hidden``."""
        ...

    def room_for_logits(self, num_rows: int, width: int) -> torch.Tensor:
        """Float32 [num_rows, width] in the memory of ``logits``, until its next call."""
        ...


class Decoder:
    """Runs steps over the layers of a stage. One step at a time; not thread-safe.

    ``kv_base_address`` is where unit 0 lies.
    """

    recorded = None
    """See ``StepDecoder``."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kv_base_address: int,
        block_size: int,
        num_threads: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._row_bytes = spec.hidden_size * self._dtype.itemsize
        self._model = c_model(spec, kv_base_address, block_size)
        self._layers = (CLayer * spec.num_layers)(*map(as_c, weights.layers))
        for layer, pointers in enumerate(self._layers):
            pointers.window = spec.window_of(layer) or 0
            pointers.rope = spec.rope_of(layer)
        self._range = LayerRange(0, spec.num_layers)
        self._rope = rope_tables(spec)
        self._norm_offset = int(spec.has_offset_norms)
        is_fused = can_be_fused(spec, weights.embedding)
        self._scratch = Scratch(spec, self._dtype, has_hidden=is_fused)
        self._logits = LogitRoom(spec.vocab_size, self._row_bytes // 4)
        self._stage = kernel("kun_stage", self._dtype)
        self._run_fused = kernel("kun_whole", self._dtype)
        self._fused_ends: Ends | None = None
        self._passing_bytes = 0
        """Of the largest step's residual stream, where ``embed`` takes new memory for each."""
        if is_fused:
            self._fused_ends = Ends(spec, weights.embedding, weights.final_norm, weights.head)
        set_num_threads(num_threads)

    @property
    def fused(self) -> "Decoder | None":
        """See ``StepDecoder``."""
        return None if self._fused_ends is None else self

    def reserve(self, limits: StepLimits) -> None:
        """Take all memory that steps within these limits need, so that none fails or waits."""
        for table in self._rope:
            table.reserve(limits.num_positions)
        self._scratch.reserve(limits.num_tokens)
        self._logits.reserve(limits.num_sampled)
        if self._fused_ends is not None:
            self._fused_ends.reserve(limits.num_sampled)
        else:
            self._passing_bytes = limits.hidden_bytes(self._spec)

    @property
    def buffer_bytes(self) -> int:
        """Memory of activations, logits and positions."""
        tables = sum(table.num_bytes for table in self._rope)
        return self._scratch.num_bytes + self._logits.num_bytes + tables + self._passing_bytes

    def set_layers(self, layers: LayerRange) -> None:
        """The layers that ``forward`` computes from now on; all of them at first."""
        if layers is not self._range:
            assert LayerRange(0, self._spec.num_layers).covers(layers), layers
            self._range = layers

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """The tokens' embeddings, [T, hidden], newly allocated."""
        embedding = self._weights.embedding
        if isinstance(embedding, PackedMatrix):
            rows = gather(embedding, torch.from_numpy(batch.token_ids), self._dtype)
        else:
            rows = pick_rows(embedding, batch.token_ids)
        return scaled(rows, self._spec.embedding_scale)

    def forward(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The stage's layers over ``hidden`` [T, hidden], in place; returns it, or what is wanted.

        Writes the tokens' K and V into the cache. With ``between_layers`` the stage is a C call
        per layer instead of a single one.
        """
        batch.check()
        shape = (batch.num_tokens, self._spec.hidden_size)
        assert hidden.shape == shape and hidden.dtype == self._dtype, (hidden.shape, hidden.dtype)
        assert hidden.is_contiguous()
        if batch.num_tokens == 0:
            return hidden
        reach = batch.num_positions
        c_batch = batch.as_c(*(table.address(reach) for table in self._rope))
        buffers = self._buffers(hidden)
        runs = [self._range]
        if between_layers is not None:
            runs = [LayerRange(layer, layer + 1) for layer in range(*self._range)]
        for first, end in runs:
            if end == self._range.end:
                hidden = hidden[: batch.keep_sampled()]
            self._stage(self._model, self._layers, c_batch, buffers, first, end)
            if between_layers is not None:
                between_layers()
        return hidden

    def run_whole(self, batch: StepBatch) -> tuple[torch.Tensor, Largest]:
        """See ``FusedDecoder``."""
        ends = self._fused_ends
        assert ends is not None and self._range == LayerRange(0, self._spec.num_layers)
        batch.check()
        assert len(batch.token_ids) == batch.num_tokens, len(batch.token_ids)
        num_sampled = len(batch.sample_rows)
        self._scratch.make_room(batch.num_tokens)
        logits = self._logits.rows(num_sampled)
        reach = batch.num_positions
        c_batch = batch.as_c(*(table.address(reach) for table in self._rope))
        batch.keep_sampled()
        buffers = self._scratch.with_own_hidden()
        c_ends = ends.of_step(
            batch.token_ids,
            batch.sample_rows,
            buffers.normed,
            buffers.rounded,
            self._logits.address,
        )
        layers = self._model, self._layers, c_batch, buffers, *self._range
        if not self._run_fused(*layers, c_ends):
            raise IndexError(f"a token is none of {self._spec.vocab_size}")
        return logits, ends.largest()

    def run_fused(self, batch: StepBatch, hidden: HiddenRows | None) -> HiddenRows:
        """See ``FusedDecoder``."""
        ends, count, row_bytes = self._fused_ends, batch.num_tokens, self._row_bytes
        assert ends is not None
        batch.check()
        self._scratch.make_room(count)
        assert hidden is not None or len(batch.token_ids) == count, len(batch.token_ids)
        rows = HiddenRows.empty(count, row_bytes) if hidden is None else hidden
        assert rows.data.nbytes == count * row_bytes, (rows.data.nbytes, count, row_bytes)
        reach = batch.num_positions
        c_batch = batch.as_c(*[table.address(reach) for table in self._rope])
        num_left = batch.keep_sampled()
        layers = self._model, self._layers, c_batch, self._scratch.at(rows.address), *self._range
        if hidden is not None:
            self._stage(*layers)
        elif not self._run_fused(*layers, ends.of_first_stage(batch.token_ids)):
            raise IndexError(f"a token is none of {self._spec.vocab_size}")
        return rows if num_left == count else rows.first(num_left)

    def _buffers(self, hidden: torch.Tensor) -> CBuffers:
        """Where a step's activations go."""
        return self._scratch.as_c(hidden)

    def logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocab] of ``batch.sample_rows``. Overwritten by the next call."""
        if len(batch.sample_rows) == len(hidden):  # all of them, in order
            return self._logits_of_rows(hidden)
        return self.logits_of(batch.sample_rows, hidden)

    def logits_of(self, which: npt.NDArray[np.integer[Any]], hidden: torch.Tensor) -> torch.Tensor:
        """As ``logits``, of these rows of ``hidden``."""
        return self._logits_of_rows(hidden.index_select(0, torch.from_numpy(which)))

    def _logits_of_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self._scratch("normed", len(hidden))
        rms_norm(hidden, self._weights.final_norm, self._spec.rms_eps, rows, self._norm_offset)
        scaled(rows, self._spec.logit_scale)
        out = self._logits.rows(rows.shape[0])
        rounded = self._scratch("rounded", rows.shape[0])
        linear(rows, self._weights.head, out=out, finish=Finish.FLOAT, rounded=rounded)
        return capped(out, self._spec.logit_cap)

    def room_for_logits(self, num_rows: int, width: int) -> torch.Tensor:
        """See ``StepDecoder``."""
        return self._logits.part(num_rows, width)

    def greedy(self, batch: StepBatch, hidden: torch.Tensor) -> np.ndarray:
        """The most likely token of each of ``batch.sample_rows``, int32 [n]; the lowest id wins."""
        return argmax(self.logits(batch, hidden))


def scaled(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """The rows, multiplied in place; untouched by 1, which nearly all models have."""
    return rows if factor == 1.0 else rows.mul_(factor)
