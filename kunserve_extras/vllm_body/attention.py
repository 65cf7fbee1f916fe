"""Attention by our kernels, in the place of vLLM's: KV of a unit lies as in our own engine.

A row's bits do not depend on its batch, whatever the processor, and prompts take less time.
"""

from dataclasses import dataclass
from functools import partial

import torch

from kunserve.engine.attention import MAX_HEADS_PER_KV_HEAD, StepBatch
from kunserve.engine.cpu.kernels.library import CBatch, CModel, kernel
from kunserve_extras.vllm_body.repeats import do


@dataclass(frozen=True, slots=True)
class Heads:
    """What all layers have in common."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Of scores."""
    score_cap: float
    """0: there is none."""

    @property
    def are_known(self) -> bool:
        """Whether our kernels know such ones."""
        group = self.num_heads // self.num_kv_heads
        return self.head_size % 32 == 0 and group <= MAX_HEADS_PER_KV_HEAD


class PagedAttention:
    """Of every layer, over units that it is told of once, in the step that it was told of last."""

    def __init__(self, heads: Heads, units: torch.Tensor, num_layers: int) -> None:
        """``units`` [n, KV heads, block, 2 * head_size]: entry e, layer l is e + l + num_layers."""
        unit_bytes = units.stride(0) * units.element_size()
        self._heads = heads
        self._model = CModel(
            unit_bytes=unit_bytes,
            heads=heads.num_heads,
            kv_heads=heads.num_kv_heads,
            head_dim=heads.head_size,
            block_size=units.shape[2],
            score_scale=heads.scale,
            score_cap=heads.score_cap,
            kv=units.data_ptr() + num_layers * unit_bytes,
        )
        self._kernel = kernel("kun_attend", units.dtype)
        self._batch: CBatch | None = None

    def begin(self, batch: StepBatch) -> None:
        """What follows is of this step."""
        self._batch = batch.as_c()

    def attend(
        self, layer: int, window: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write K and V [tokens, KV heads * head_size], and attend to ``window`` tokens (0: all).

        ``query`` is [tokens, heads * head_size], and so is the result. Rows may lie apart.
        """
        heads = self._heads
        sizes = [heads.num_heads * heads.head_size, *2 * [heads.num_kv_heads * heads.head_size]]
        rows = [one.view(-1, n) for one, n in zip((query, key, value), sizes, strict=True)]
        assert all(one.stride(1) == 1 for one in rows)
        found = torch.empty(len(rows[0]), sizes[0], dtype=query.dtype)
        places = [part for one in rows for part in (one.data_ptr(), one.stride(0))]
        do(partial(self._attend, *places, found.data_ptr(), layer, window))
        return found

    def _attend(self, *arguments: int) -> None:
        assert self._batch is not None
        self._kernel(self._model, self._batch, *arguments)
