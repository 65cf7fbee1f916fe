"""The decoder of an instance of several ranks: rank 0 orders what all of them compute."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import LayerRange
from kunserve.engine.attention import TORCH_DTYPES, StepBatch
from kunserve.engine.cpu.decoder import StepLimits, scaled
from kunserve.engine.cpu.kernels.ops import rms_norm
from kunserve.engine.layer_weights import ModelWeights
from kunserve.model.spec import ModelSpec
from kunserve_extras.ranks.control import OpenRegion
from kunserve_extras.ranks.processes import Members
from kunserve_extras.ranks.region import Orders, Region, Room, StageOrder
from kunserve_extras.ranks.shard_decoder import ShardDecoder

_FIRST_ROOM = Room(64, 256, 8)
"""Without limits: it grows with the steps."""


def room_of(limits: StepLimits, block_size: int) -> Room:
    """What steps within these limits need."""
    if not limits.num_tokens:
        return _FIRST_ROOM
    width = -(-limits.num_positions // block_size) + 1
    # A decode with guesses is a sequence for each of its tokens, and all of them share a row.
    num_seqs = min(limits.num_tokens, limits.num_seqs or limits.num_tokens)
    return Room(limits.num_tokens, max(1, num_seqs * width), max(1, limits.num_sampled))


class Ordering(ABC):
    """The part of ``StepDecoder`` that is alike where rank 0 orders what all ranks compute."""

    fused = recorded = None
    """See ``StepDecoder``. Each rank has its own part of a step, so no call computes it."""

    def __init__(
        self,
        spec: ModelSpec,
        own: Any,
        members: Members,
        block_size: int,
        device: torch.device,
        open_orders: type[Orders],
    ) -> None:
        """``spec`` is the whole model's, ``own`` is what computes rank 0's part."""
        self._spec = spec
        self._own = own
        self._members = members
        self._meeting = members.meeting
        self._block_size = block_size
        self._device = device
        self._open_orders = open_orders
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._range = LayerRange(0, spec.num_layers)
        self._to_embed: torch.Tensor | None = None
        """What ``embed`` gave last: it is filled by ``forward``, when all ranks compute."""

    def reserve(self, limits: StepLimits) -> None:
        """See ``StepDecoder``. All ranks do so at once."""
        self._open(room_of(limits, self._block_size), limits)

    def _open(self, room: Room, limits: StepLimits | None = None) -> None:
        orders = self._open_orders(self._spec, self._meeting.num_ranks, room)
        with self._members.telling(OpenRegion(room, limits), (orders.fd,)):
            if limits is not None:
                self._own.reserve(limits)
            self._own.open(orders)
        orders.close_file()

    def _make_room(self, needed: Room) -> Any:
        room = self._own.region.room
        if not room.holds(needed):
            self._open(room.grown_to(needed))
        return self._own.region

    @property
    def buffer_bytes(self) -> int:
        """Of all ranks: they are alike."""
        return int(self._own.region.num_bytes + self._meeting.num_ranks * self._own.buffer_bytes)

    def set_layers(self, layers: LayerRange) -> None:
        """See ``StepDecoder``."""
        self._range = layers

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """See ``StepDecoder``. Undefined until ``forward``, because no rank has all embeddings."""
        shape = (batch.num_tokens, self._spec.hidden_size)
        self._to_embed = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._to_embed

    def _is_to_embed(self, hidden: torch.Tensor) -> bool:
        """Whether ``forward`` begins with the embeddings."""
        embeds, self._to_embed = hidden is self._to_embed, None
        return embeds

    def logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """See ``StepDecoder``."""
        return self.logits_of(batch.sample_rows, hidden)

    @abstractmethod
    def logits_of(self, which: npt.NDArray[np.integer[Any]], hidden: torch.Tensor) -> torch.Tensor:
        """See ``StepDecoder``. Raises RankLost."""

    def room_for_logits(self, num_rows: int, width: int) -> torch.Tensor:
        """See ``StepDecoder``."""
        return torch.empty(num_rows, width)


class RankedDecoder(Ordering):
    """Implements ``StepDecoder`` on CPUs. Each command ends when all ranks have met."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        own: ShardDecoder,
        members: Members,
        block_size: int,
    ) -> None:
        """``weights`` are rank 0's."""
        super().__init__(spec, own, members, block_size, torch.device("cpu"), Region)
        self._final_norm = weights.final_norm

    def forward(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """See ``StepDecoder``. Raises RankLost."""
        embeds = self._is_to_embed(hidden)
        num_tokens = batch.num_tokens
        if not num_tokens:
            return hidden
        batch.check()
        region = self._make_room(Room(num_tokens, batch.tables.size, 1))
        shared = region.hidden[:num_tokens]
        if not embeds:
            shared.copy_(hidden)
        region.write_stage(batch, self._range, embeds=embeds)
        self._meeting.tell()
        every_row = replace(batch, wants_sampled=False)  # ranks share sums of all of them
        self._own.run_stage(StageOrder(every_row, self._range, embeds), between_layers)
        return hidden.copy_(shared)

    def logits_of(self, which: npt.NDArray[np.integer[Any]], hidden: torch.Tensor) -> torch.Tensor:
        """See ``Ordering``."""
        num_rows = len(which)
        region = self._make_room(Room(1, 1, num_rows))
        rows = hidden.index_select(0, torch.from_numpy(which))
        offset, sampled = int(self._spec.has_offset_norms), region.sampled[:num_rows]
        rms_norm(rows, self._final_norm, self._spec.rms_eps, sampled, offset)
        scaled(sampled, self._spec.logit_scale)
        region.write_logits(which)
        self._meeting.tell()
        self._own.run_logits(which)
        logits: torch.Tensor = region.logits(num_rows)
        return logits
