"""Host memory and C kernels of several processes: the backend of ``--tensor-parallel-size``."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.backend import (
    CpuBackend,
    Loader,
    OwnDecoders,
    Wait,
    cpu_loader,
    huge_pages_of,
    nothing_to_wait_for,
    weights_file_of,
)
from kunserve.engine.cpu.decoder import StepLimits
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.memory import Memory
from kunserve.engine.memory.pages import ARENA_FILE, OpenPages
from kunserve.engine.memory.weights_file import SharedWeights
from kunserve.engine.nodes import numa_nodes, place_ranks, stay_on, visiting
from kunserve.engine.sampling.sampler import Sampler
from kunserve.engine.sampling.structured.forms import Forms
from kunserve.engine.weights.readers import Reader
from kunserve.model.sharding import check_shardable, config_of_rank, spec_of_rank
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec
from kunserve.transport.bulk.movable_memory import WriteGate
from kunserve_extras.ranks.control import Drop, Join, Reclaim
from kunserve_extras.ranks.decoder import RankedDecoder, room_of
from kunserve_extras.ranks.meeting import PATIENCE_S
from kunserve_extras.ranks.memory import RankedMemory, RankPages
from kunserve_extras.ranks.processes import Members, Start, spawn_member
from kunserve_extras.ranks.region import Region
from kunserve_extras.ranks.shard_decoder import ShardDecoder
from kunserve_extras.ranks.shards import ShardReader
from kunserve_extras.torch_body.cuda.backend import CudaBackend


class SeveralRanks(OwnDecoders):
    """The part of ``Backend`` that is alike whatever device each rank has."""

    runs_ahead = False
    splits_head = False
    more_words: tuple[type, ...] = ()
    """Which the other ranks are told beside ``control.WORDS``."""

    def __init__(
        self,
        one: CpuBackend | CudaBackend,
        model: ModelConfig,
        source: ModelSource,
        num_ranks: int,
        start: Start,
        on_death: Callable[[int, int], None] | None,
        patience_s: float,
    ) -> None:
        """``one`` is what an instance of one rank has.

        ``start`` makes a process of a rank; ``on_death`` is told that one has ended.
        """
        self._one = one
        self.device = one.device
        self.open_pages: OpenPages = one.open_pages
        self.has_panels = one.has_panels
        self.pads_steps = one.pads_steps
        self.rows_are_alike = one.rows_are_alike
        self.computes_aside = one.computes_aside
        self._model = model
        self._source = source
        self._num_ranks = num_ranks
        self._start = start
        self._on_death = on_death
        self._patience_s = patience_s
        self._members: Members | None = None
        self._await_others: Callable[[], None] | None = None

    @property
    def other_pids(self) -> tuple[int, ...]:
        """See ``Backend``."""
        return () if self._members is None else self._members.pids

    def weights(self, memory: Memory, spec: ModelSpec) -> ModelWeights:
        """See ``Backend``. Rank 0's."""
        return self._one.weights(memory, spec_of_rank(spec, self._num_ranks))

    def sampler(self, eos_ids: Sequence[int], vocab_size: int, forms: Forms) -> Sampler:
        """See ``Backend``. Rank 0 samples alone."""
        return self._one.sampler(eos_ids, vocab_size, forms)

    def _start_others(self) -> Members:
        return Members(
            self._num_ranks, self._start, self._on_death, self._patience_s, self.more_words
        )

    def _order(
        self, rank: int, instance_id: InstanceId, spec: ModelSpec, of_rank: InstanceConfig
    ) -> Join:
        """What a rank is told that knows nothing yet."""
        return Join(
            instance_id,
            rank,
            self._num_ranks,
            os.getpid(),
            spec,
            self._source,
            self._model.seed,
            of_rank,
            self._patience_s,
        )


class RankedBackend(SeveralRanks):
    """One instance of several ranks on CPUs. This process is rank 0, which others talk to."""

    def __init__(
        self,
        model: ModelConfig,
        source: ModelSource,
        num_ranks: int,
        start: Start = spawn_member,
        on_death: Callable[[int, int], None] | None = None,
        patience_s: float = PATIENCE_S,
        shared: SharedWeights | None = None,
    ) -> None:
        """See ``SeveralRanks``, and ``CpuBackend``."""
        super().__init__(CpuBackend(), model, source, num_ranks, start, on_death, patience_s)
        self._shared = shared
        self._block_size = 1
        """As settled."""

    def settle(self, spec: ModelSpec, config: InstanceConfig, most: StepLimits) -> InstanceConfig:
        """See ``Backend``."""
        check_shardable(spec, self._num_ranks)
        self._block_size = config.block_size
        self._one.settle(spec_of_rank(spec, self._num_ranks), config, most)
        return config

    def buffer_bytes(self, spec: ModelSpec, limits: StepLimits) -> int:
        """See ``Backend``."""
        shared = Region.bytes_of(spec, self._num_ranks, room_of(limits, self._block_size))
        shard = spec_of_rank(spec, self._num_ranks)
        of_rank = limits.buffer_bytes(shard) - limits.hidden_bytes(shard)  # which they share
        return shared + self._num_ranks * of_rank

    def open_memory(
        self,
        instance_id: InstanceId,
        spec: ModelSpec,
        config: InstanceConfig,
        beside_bytes: int,
    ) -> RankedMemory:
        """Take all ranks' memory, and start the others, which load while this one does."""
        fd = os.memfd_create(ARENA_FILE)
        members = None
        shards: list[InstanceMemory] = []
        try:
            members = self._start_others()
            of_rank = config_of_rank(config)
            shard = spec_of_rank(spec, self._num_ranks)
            shared_of = [
                None if self._shared is None else self._shared.of_rank(rank)
                for rank in range(self._num_ranks)
            ]
            places = place_ranks(instance_id, self._num_ranks, numa_nodes())
            for cpus in places:
                with visiting(cpus):
                    huge = huge_pages_of(shard, of_rank)
                    pages = functools.partial(RankPages, fd, len(shards), True, **huge)
                    beside = beside_bytes // self._num_ranks
                    file = weights_file_of(shared_of[len(shards)], shard, of_rank)
                    one = InstanceMemory(
                        instance_id, shard, of_rank, beside, pages, weights_file=file
                    )
                    shards.append(one)
            stay_on(places[0])
            orders = [
                replace(
                    self._order(rank, instance_id, spec, of_rank),
                    cpus=places[rank],
                    shared_weights=None if shared is None else dict(shared.fingerprint),
                )
                for rank, shared in enumerate(shared_of)
            ]
            fds = [(fd,) if shared is None else (fd, *shared.fds) for shared in shared_of]
            self._await_others = members.join(orders[1:], fds[1:])
        except BaseException:
            if members is not None:
                members.close()
            for one in shards:
                one.close()
            raise
        finally:
            os.close(fd)
        self._members = members
        return RankedMemory(
            shards,
            drop=lambda keep: members.telling(Drop(keep)),
            reclaim=lambda layers: members.telling(Reclaim(layers)),
            close=members.close,
        )

    def loader(
        self, reader: Reader, spec: ModelSpec, memory: Memory, weights: ModelWeights
    ) -> Loader:
        """See ``Backend``."""
        return _RankedLoader(reader, spec, memory)

    def decoder(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        memory: Memory,
        config: InstanceConfig,
    ) -> RankedDecoder:
        """See ``Backend``. Waits until all ranks have loaded."""
        assert self._members is not None and self._await_others is not None
        own, of_rank = memory.shards[0], config_of_rank(config)
        shard = ShardDecoder(spec, weights, own, of_rank, self._members.meeting)
        self._await_others()
        return RankedDecoder(spec, weights, shard, self._members, config.block_size)

    def mark(self) -> Wait:
        """All ranks have met when a step returns."""
        return nothing_to_wait_for


class _RankedLoader:
    """At the start every rank loads its own weights. Layers that come back are loaded by rank 0."""

    def __init__(self, reader: Reader, spec: ModelSpec, memory: Memory) -> None:
        num_ranks = len(memory.shards)
        shard = spec_of_rank(spec, num_ranks)
        self._of_ranks = [
            cpu_loader(ShardReader(reader, spec, rank, num_ranks), shard, one)
            for rank, one in enumerate(memory.shards)
        ]
        self._have_loaded = False

    def check(self) -> None:
        """See ``Loader``."""
        self._of_ranks[0].check()  # that all is there is the same for all

    def load_ends(self) -> None:
        """See ``Loader``."""
        self._of_ranks[0].load_ends()

    def load_layers(self, layers: LayerRange, gate: WriteGate | None = None) -> None:
        """See ``Loader``. The first call is that of the start."""
        loaders = self._of_ranks if self._have_loaded else self._of_ranks[:1]
        for loader in loaders:
            loader.load_layers(layers, gate)
        self._have_loaded = True
