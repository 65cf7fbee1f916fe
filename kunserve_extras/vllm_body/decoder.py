"""``StepDecoder`` by vLLM's modules: the layers of a stage, over units that are ours."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import LayerRange
from kunserve.engine.attention import TORCH_DTYPES
from kunserve.engine.cpu.decoder import StepBatch, StepLimits
from kunserve.engine.cpu.kernels.library import set_num_threads
from kunserve.engine.cpu.logit_room import LogitRoom
from kunserve.model.spec import ModelSpec
from kunserve_extras.vllm_body.release import Hop, Model
from kunserve_extras.vllm_body.repeats import FEW_ROWS, Rooms
from kunserve_extras.vllm_body.step_arrays import step_arrays

logger = logging.getLogger(__name__)
_ALONE = 6 << 10
"""Pairs of a token and a position that it attends to, up to which vLLM's part of a step has one
thread, where vLLM attends; else that part is small. Its threads are torch's and our products have
others: each part of a layer would wait until a core is given up, and that takes longer than the
parts of so small a step."""


def room_bytes(spec: ModelSpec) -> int:
    """Of all that one layer makes of few rows: norms, sums, heads and what its gate multiplies."""
    per_row = 10 * spec.hidden_size + 4 * (spec.qkv_size + spec.q_size) + 4 * spec.gated_size
    return FEW_ROWS * per_row * spec.dtype_bytes + (1 << 16)


class VllmDecoder:
    """Runs steps over the layers of a stage. One step at a time; not thread-safe."""

    fused = recorded = None
    """See ``StepDecoder``."""

    def __init__(
        self, spec: ModelSpec, model: Model, kv: torch.Tensor, block_size: int, num_threads: int
    ) -> None:
        """``kv`` are the bytes of all units, from ``num_layers`` units below unit 0 on."""
        self._spec = spec
        self._model = model
        self._block_size = block_size
        self._dtype = TORCH_DTYPES[spec.dtype]
        shape = (-1, model.num_kv_heads, block_size, 2 * model.head_size)
        self._units = kv.view(self._dtype).view(shape)
        model.bind_kv(self._units)
        self._range = LayerRange(0, spec.num_layers)
        self._logits = LogitRoom(spec.vocab_size)
        for product in model.head_products():
            product.room = self._logits.part
        self._rooms = Rooms(room_bytes(spec))
        self._repeated = model.repeat_layers(self._rooms)
        self._passing_bytes = 0
        set_num_threads(num_threads)
        self._num_threads = num_threads

    def reserve(self, limits: StepLimits) -> None:
        """See ``StepDecoder``. Activations are taken anew in each step."""
        self._logits.reserve(limits.num_sampled)
        self._passing_bytes = limits.buffer_bytes(self._spec)
        if limits.num_tokens:
            self._warm_up()

    def _warm_up(self) -> None:
        """What is made once is made before the first request: a token in unit 0, which is free."""
        zero, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
        starts = np.array([0, 1], dtype=np.int32)
        batch = StepBatch(zero, zero, zero[None], zero, starts, one, zero)
        found = []
        for is_plain in (True, False, False):  # as code, written down, repeated
            for layer in self._repeated:
                layer.is_plain = is_plain
            found.append(self.logits(batch, self.forward(batch, self.embed(batch))).clone())
        refusals = {layer.refusal for layer in self._repeated if layer.refusal is not None}
        if not all(torch.equal(one, found[0]) for one in found):
            refusals.add("what is repeated is not what the layers' code gives")
            for layer in self._repeated:
                layer.is_plain = True
        for refusal in sorted(refusals):
            logger.info("layers run as Python in every step: %s", refusal)

    @property
    def buffer_bytes(self) -> int:
        """Memory of logits, and about that of activations."""
        passing = self._passing_bytes + self._rooms.buffer_bytes
        return max(self._logits.num_bytes, passing)

    def set_layers(self, layers: LayerRange) -> None:
        """The layers that ``forward`` computes from now on; all of them at first."""
        self._range = layers

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """No column of each: the first stage's ``forward`` has the model embed."""
        return torch.empty(batch.num_tokens, 0, dtype=self._dtype)

    def forward(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The stage's layers; what goes to the next stage, or at the end normalised rows."""
        batch.check()
        if batch.num_tokens == 0:
            return hidden
        width = self._spec.hidden_size
        arrays = step_arrays(batch, self._block_size, self._spec.num_layers)
        has_own_attention = self._model.has_own_attention
        for block in arrays.begun if has_own_attention else ():
            # It multiplies what lies behind a context by 0. In memory that was weights, or
            # of a request that failed, there may be what that makes NaN of.
            self._units[block + self._range.first : block + self._range.end].zero_()
        hop: Hop | None = None
        token_ids = None
        if self._range.first:
            hop = tuple(part.contiguous() for part in hidden.split(width, dim=1))
        else:
            token_ids = torch.from_numpy(batch.token_ids)
        runs = [self._range]
        if between_layers is not None:
            runs = [LayerRange(layer, layer + 1) for layer in range(*self._range)]
        is_short = not has_own_attention or arrays.num_pairs <= _ALONE
        torch.set_num_threads(1 if is_short else self._num_threads)
        with self._model.step(batch, arrays) as run:
            for layers in runs:
                hop = run(layers, token_ids, hop)
                if between_layers is not None:
                    between_layers()
        assert hop is not None
        if self._range.end == self._spec.num_layers:
            return hop[0]
        return torch.cat(hop, dim=1)

    def logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, vocab] of ``batch.sample_rows``. Overwritten by the next call."""
        return self.logits_of(batch.sample_rows, hidden)

    def logits_of(self, which: npt.NDArray[np.integer[Any]], hidden: torch.Tensor) -> torch.Tensor:
        """As ``logits``, of these rows of ``hidden``."""
        rows = hidden.index_select(0, torch.from_numpy(which))
        return self._model.logits(rows).contiguous()

    def room_for_logits(self, num_rows: int, width: int) -> torch.Tensor:
        """See ``StepDecoder``."""
        return self._logits.part(num_rows, width)
