"""A rank other than 0: its memory and compute. Steps are one thread's, changes another's."""

import functools
import os
from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import LayerRange
from kunserve.engine.backend import (
    CpuBackend,
    cpu_loader,
    huge_pages_of,
    weights_file_of,
    weights_in,
)
from kunserve.engine.cpu.decoder import StepLimits
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.weights_file import SharedWeights
from kunserve.engine.nodes import stay_on
from kunserve.engine.weights.readers import open_reader
from kunserve.model.sharding import spec_of_rank
from kunserve.model.spec import ModelSpec
from kunserve_extras.ranks.control import Drop, Join, OpenRegion, Reclaim, Said
from kunserve_extras.ranks.meeting import Meeting
from kunserve_extras.ranks.memory import RankPages
from kunserve_extras.ranks.region import Command, Orders, Region, StageOrder
from kunserve_extras.ranks.shard_decoder import ShardDecoder
from kunserve_extras.ranks.shards import ShardReader

_LOOK_S = 1.0
"""How long a rank waits for a command before it looks whether it still may."""


class PartDecoder(Protocol):
    """What a rank computes with."""

    @property
    def region(self) -> Orders:
        """Where orders lie."""
        ...

    def reserve(self, limits: StepLimits) -> None:
        """See ``StepDecoder``."""
        ...

    def run_stage(self, order: StageOrder) -> None:
        """The rank's part of these layers. Raises RankLost."""
        ...

    def run_logits(self, which: npt.NDArray[np.int32]) -> None:
        """Logits of the rank's tokens. Raises RankLost."""
        ...


class Rank(ABC):
    """What ranks on all devices do alike."""

    more_words: tuple[type[Any], ...] = ()
    """Which it is told beside ``control.WORDS``."""

    def __init__(self, order: Join, meeting_fd: int) -> None:
        torch.set_num_threads(1)
        self._spec: ModelSpec = order.spec
        self._meeting = Meeting(order.rank, order.num_ranks, meeting_fd, order.patience_s)

    @property
    @abstractmethod
    def decoder(self) -> PartDecoder:
        """What computes. It is there before the first command."""

    @abstractmethod
    def obey(self, word: object, fds: list[int]) -> Said:
        """Change memory; what rank 0 is told. ``compute`` may wait in the middle of a step."""

    def enter(self) -> None:  # noqa: B027 - most have nothing to do
        """The thread that obeys calls this first."""

    @property
    def is_untidy(self) -> bool:
        """Whether ``tidy`` has something to do."""
        return False

    def tidy(self) -> None:  # noqa: B027
        """Do some of what can wait. The thread that obeys calls it when no word comes."""

    def compute(self) -> None:
        """Carry out one command after the other. Raises RankLost."""
        seen = 0
        while True:
            number = self._meeting.wait(seen, _LOOK_S)
            if number == seen:
                continue
            seen = number
            region = self.decoder.region
            match region.command:
                case Command.STAGE:
                    self.decoder.run_stage(region.read_stage())
                case Command.LOGITS:
                    self.decoder.run_logits(region.read_logits())

    def lose(self) -> None:
        """Have nobody wait for this rank any more."""
        self._meeting.lose()


class HostRank(Rank):
    """On CPUs. Rank 0 maps its memory, and copies there itself."""

    def __init__(self, order: Join, arena_fd: int, meeting_fd: int, *weights_fds: int) -> None:
        """Raises KunServeError for files that cannot be read."""
        stay_on(order.cpus)
        super().__init__(order, meeting_fd)
        spec, rank, num_ranks = order.spec, order.rank, order.num_ranks
        shard = spec_of_rank(spec, num_ranks)
        reader = ShardReader(open_reader(order.source, spec, order.seed), spec, rank, num_ranks)
        shared = None
        if order.shared_weights is not None:
            shared = SharedWeights(weights_fds, order.shared_weights)
        self._memory = InstanceMemory(
            order.instance_id,
            shard,
            order.config,
            0,
            functools.partial(
                RankPages, arena_fd, rank, False, **huge_pages_of(shard, order.config)
            ),
            weights_file=weights_file_of(shared, shard, order.config),
        )
        for fd in (arena_fd, *weights_fds):
            os.close(fd)
        weights = weights_in(
            self._memory, shard, CpuBackend.device, in_panels=CpuBackend.has_panels
        )
        loader = cpu_loader(reader, shard, self._memory)
        loader.check()
        loader.load_ends()
        loader.load_layers(LayerRange(0, shard.num_layers))
        self._decoder = ShardDecoder(spec, weights, self._memory, order.config, self._meeting)

    @property
    def decoder(self) -> PartDecoder:
        """See ``Rank``."""
        return self._decoder

    def obey(self, word: object, fds: list[int]) -> None:
        """See ``Rank``."""
        match word:
            case Drop(keep):
                self._memory.drop(keep)
            case Reclaim(layers):
                self._memory.reclaim(layers)
            case OpenRegion(room, limits):
                (fd,) = fds
                if limits is not None:
                    self._decoder.reserve(limits)
                region = Region(self._spec, self._meeting.num_ranks, room, fd)
                region.close_file()
                self._decoder.open(region)
            case _:
                raise AssertionError(word)
