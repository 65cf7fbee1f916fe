"""What each rank computes: its heads, its columns of the MLP, its tokens of the vocabulary."""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.config import InstanceConfig
from kunserve.engine.attention import StepBatch, capped
from kunserve.engine.cpu.decoder import Decoder, StepLimits, scaled
from kunserve.engine.cpu.kernels.library import CBuffers
from kunserve.engine.cpu.kernels.ops import Finish, gather, linear
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.model.sharding import first_expert, spec_of_rank, vocab_of_rank
from kunserve.model.spec import ModelSpec
from kunserve_extras.ranks.meeting import Meeting
from kunserve_extras.ranks.region import Region, StageOrder


class ShardDecoder(Decoder):
    """Every rank has one, and all of them carry out the same orders."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        memory: InstanceMemory,
        config: InstanceConfig,
        meeting: Meeting,
    ) -> None:
        """``spec`` is the whole model's, the rest is the rank's own."""
        self._meeting = meeting
        self._whole = spec
        self._vocab = vocab_of_rank(spec, meeting.rank, meeting.num_ranks)
        self._region: Region | None = None
        super().__init__(
            spec_of_rank(spec, meeting.num_ranks),
            weights,
            memory.kv_base_address,
            config.block_size,
            config.num_threads,
        )
        self._model.first_expert = first_expert(self._spec.experts, meeting.rank)

    def reserve(self, limits: StepLimits) -> None:
        """See ``Decoder``. Logits lie in the region."""
        for table in self._rope:
            table.reserve(limits.num_positions)
        self._scratch.reserve(limits.num_tokens)

    def open(self, region: Region) -> None:
        """From now on steps lie there."""
        self._meeting.as_c.parts = region.parts_at
        self._region = region

    @property
    def region(self) -> Region:
        """Where steps lie."""
        assert self._region is not None
        return self._region

    def _buffers(self, hidden: torch.Tensor) -> CBuffers:
        buffers = super()._buffers(hidden)
        buffers.normed = self.region.normed_at
        buffers.ranks = ctypes.addressof(self._meeting.as_c)
        return buffers

    def run_stage(
        self, order: StageOrder, between_layers: Callable[[], None] | None = None
    ) -> None:
        """The layers over the region's ``hidden``, in place. Raises RankLost."""
        assert not order.batch.wants_sampled
        hidden = self.region.hidden[: order.batch.num_tokens]
        if order.embeds:
            self._embed(order.batch, hidden)
        self.set_layers(order.layers)
        self._meeting.meet()
        self.forward(order.batch, hidden, between_layers)
        self._meeting.meet()

    def _embed(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """Of the tokens that are this rank's."""
        first, end = self._vocab
        mine = np.flatnonzero((batch.token_ids >= first) & (batch.token_ids < end))
        if len(mine):
            ids = torch.from_numpy(batch.token_ids[mine] - first)
            rows = gather(self._weights.embedding, ids, self._dtype)
            hidden[torch.from_numpy(mine)] = scaled(rows, self._whole.embedding_scale)

    def run_logits(self, which: npt.NDArray[np.int32]) -> None:
        """Logits of as many of the region's ``sampled`` rows, for this rank's tokens.

        Raises RankLost.
        """
        num_rows, (first, end) = len(which), self._vocab
        if end > first:
            out = self._logits.part(num_rows, end - first)
            head = self._weights.head[: end - first]
            linear(self.region.sampled[:num_rows], head, out=out, finish=Finish.FLOAT)
            self.region.logits(num_rows)[:, first:end] = capped(out, self._whole.logit_cap)
        self._meeting.meet()
