"""The decoder of an instance whose ranks have a device each: torch's on every rank.

All ranks keep the same residual stream, and call the same sums in the same order.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kunserve.engine.attention import StepBatch
from kunserve.engine.cpu.decoder import StepLimits, scaled
from kunserve.engine.layer_weights import ModelWeights
from kunserve.model.sharding import first_expert, spec_of_rank, vocab_of_rank
from kunserve.model.spec import ModelSpec
from kunserve_extras.device_ranks.sums import GroupSums
from kunserve_extras.ranks.decoder import Ordering
from kunserve_extras.ranks.meeting import Meeting
from kunserve_extras.ranks.processes import Members
from kunserve_extras.ranks.region import Orders, Room, StageOrder
from kunserve_extras.torch_body.decoder import TorchDecoder
from kunserve_extras.torch_body.ops.table import Ops


class DeviceShard(TorchDecoder):
    """One rank's part: its heads, its columns of the MLP, its tokens of the vocabulary."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kv: torch.Tensor,
        block_size: int,
        ops: Ops,
        meeting: Meeting,
        sums: GroupSums,
    ) -> None:
        """``spec`` is the whole model's, the rest is the rank's own."""
        rank, shard = meeting.rank, spec_of_rank(spec, meeting.num_ranks)
        super().__init__(
            shard,
            weights,
            kv,
            block_size,
            ops,
            add_up=sums.add_up,
            first_expert=first_expert(shard.experts, rank),
        )
        self._whole = spec
        self._vocab = vocab_of_rank(spec, rank, meeting.num_ranks)
        self._meeting = meeting
        self._sums = sums
        self._orders: Orders | None = None
        self._hidden: torch.Tensor | None = None
        """Of the last stage."""
        self._all_logits = torch.empty(0, spec.vocab_size, device=self._device)

    def reserve(self, limits: StepLimits) -> None:  # type: ignore[override]
        """See ``TorchDecoder``. All ranks do so at once, because it tries a step."""
        if self._sums.rank == 0:
            shape = (limits.num_sampled, self._whole.vocab_size)
            self._all_logits = torch.zeros(shape, device=self._device)
        super().reserve(limits)

    def open(self, orders: Orders) -> None:
        """From now on orders lie there."""
        self._orders = orders

    @property
    def region(self) -> Orders:
        """Where orders lie."""
        assert self._orders is not None
        return self._orders

    @property
    def buffer_bytes(self) -> int:
        """See ``TorchDecoder``."""
        return super().buffer_bytes + self._all_logits.nbytes

    # What ranks other than 0 are told

    def run_stage(self, order: StageOrder) -> None:
        """The layers of a step. Raises RankLost."""
        batch = _copied(order.batch)
        self._meeting.meet()  # now rank 0 may write the next order
        self.set_layers(order.layers)
        shape = (batch.num_tokens, self._whole.hidden_size)
        self.compute(
            batch, torch.zeros(shape, dtype=self._dtype, device=self._device), order.embeds
        )

    def run_logits(self, which: npt.NDArray[np.int32]) -> None:
        """Logits of rows of the last stage. Raises RankLost."""
        which = which.copy()
        self._meeting.meet()
        assert self._hidden is not None
        self.logits_of(which, self._hidden)

    # What all ranks do together

    def compute(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        embeds: bool,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The layers over ``hidden``, in place; returns it.

        It is filled first: with embeddings, or with what rank 0 has where the others have zeros.
        """
        if embeds:
            hidden.copy_(self.embed(batch))
        else:
            self._sums.add_up(hidden)
        self._hidden = hidden
        return self.forward(batch, hidden, between_layers)

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """See ``TorchDecoder``. A token's row is one rank's, and zeros on the others."""
        first, end = self._vocab
        own = torch.from_numpy(batch.token_ids.astype(np.int64) - first).to(self._device)
        rows = self._weights.embedding.index_select(0, own.clamp(0, max(0, end - first - 1)))
        rows.masked_fill_(((own < 0) | (own >= end - first))[:, None], 0.0)
        self._sums.add_up(rows)
        return scaled(rows, self._spec.embedding_scale)

    def logits_of(self, which: npt.NDArray[np.integer[Any]], hidden: torch.Tensor) -> torch.Tensor:
        """See ``TorchDecoder``. On rank 0 of all tokens, on the others of their own."""
        part = super().logits_of(which, hidden)
        parts = self._sums.gather(part)
        if parts is None:
            return part
        if len(part) > len(self._all_logits):
            shape = (len(part), self._whole.vocab_size)
            self._all_logits = torch.zeros(shape, device=self._device)
        out = self._all_logits[: len(part)]
        for rank, one in enumerate(parts):
            first, end = vocab_of_rank(self._whole, rank, self._sums.num_ranks)
            out[:, first:end] = one[:, : end - first]
        return out

    def _norm_all_heads(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """See ``TorchDecoder``. All heads are those of all ranks."""
        wide = rows.float()
        # Where ranks share KV heads each head counts as often as any other.
        squares = wide.square().mean(dim=-1, keepdim=True)
        self._sums.add_up(squares)
        scale = torch.rsqrt(squares / self._sums.num_ranks + self._spec.rms_eps)
        rows.copy_((wide * scale).to(rows.dtype) * weight)


class DeviceRanksDecoder(Ordering):
    """Implements ``StepDecoder``. A command has begun on all ranks when rank 0 begins with it."""

    def __init__(
        self,
        spec: ModelSpec,
        own: DeviceShard,
        members: Members,
        block_size: int,
        device: torch.device,
    ) -> None:
        """See ``Ordering``."""
        super().__init__(spec, own, members, block_size, device, Orders)
        self._last: torch.Tensor | None = None
        """The hidden states of the last stage."""

    def forward(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """See ``StepDecoder``. Raises RankLost."""
        embeds = self._is_to_embed(hidden)
        if not batch.num_tokens:
            return hidden
        batch.check()
        orders = self._make_room(Room(batch.num_tokens, batch.tables.size, 1))
        orders.write_stage(batch, self._range, embeds=embeds)
        self._begin()
        self._own.set_layers(self._range)
        self._last = hidden
        return self._own.compute(batch, hidden, embeds, between_layers)

    def logits_of(self, which: npt.NDArray[np.integer[Any]], hidden: torch.Tensor) -> torch.Tensor:
        """See ``Ordering``. All ranks have the hidden states of the last stage, and no others."""
        assert hidden is self._last
        orders = self._make_room(Room(1, 1, len(which)))
        orders.write_logits(which)
        self._begin()
        return self._own.logits_of(which, hidden)

    def _begin(self) -> None:
        """Return when all ranks have read the order."""
        self._meeting.tell()
        self._meeting.meet()


def _copied(batch: StepBatch) -> StepBatch:
    """Rank 0 writes the next order where the arrays of this one lie."""
    names = ("token_ids", "positions", "tables", "rows", "q_starts", "context_lens")
    return replace(batch, flat=None, **{name: getattr(batch, name).copy() for name in names})
