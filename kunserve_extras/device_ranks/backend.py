"""A device for each of several processes: the backend of ``--tensor-parallel-size`` on GPUs."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.backend import Loader, Wait, kv_in
from kunserve.engine.cpu.decoder import StepLimits
from kunserve.engine.cpu.hidden_rows import Hidden, HiddenRows
from kunserve.engine.cpu.split_head import Part
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory.memory import Memory
from kunserve.engine.weights.loader import WeightLoader
from kunserve.engine.weights.readers import Reader
from kunserve.model.sharding import check_shardable, config_of_rank, spec_of_rank
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec
from kunserve.transport.bulk.movable_memory import WriteGate
from kunserve_extras.device_ranks.decoder import DeviceRanksDecoder, DeviceShard
from kunserve_extras.device_ranks.memory import DeviceRanksMemory, Windows
from kunserve_extras.device_ranks.sums import GroupSums, SumsBy, make_store_file
from kunserve_extras.device_ranks.words import WORDS, Load, OpenSums
from kunserve_extras.ranks.backend import SeveralRanks
from kunserve_extras.ranks.meeting import PATIENCE_S
from kunserve_extras.ranks.processes import Members, Start, spawn_member
from kunserve_extras.ranks.shards import ShardReader
from kunserve_extras.torch_body.cuda.backend import CudaBackend, drawing_bytes

logger = logging.getLogger(__name__)

_NCCL_BYTES = 512 << 20
"""What NCCL takes of each device. Assumed."""


class DeviceRanksBackend(SeveralRanks):
    """One instance of several ranks with a device each. This process is rank 0."""

    more_words = WORDS

    def __init__(
        self,
        model: ModelConfig,
        source: ModelSource,
        own: CudaBackend,
        cards: Sequence[str],
        start: Start = spawn_member,
        on_death: Callable[[int, int], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``cards`` are the ranks' devices by name, and ``own`` is the first one's backend."""
        super().__init__(own, model, source, len(cards), start, on_death, patience_s)
        self._own = own
        self._cards = cards
        self._sums: GroupSums | None = None
        self._by = SumsBy.GLOO
        if own.device.type == "cuda" and len(set(cards)) == len(cards):
            self._by = SumsBy.NCCL
        elif own.device.type == "cuda":
            logger.warning(
                "ranks share a GPU (%s), which NCCL refuses: their sums go through host memory, "
                "and are slow",
                ", ".join(cards),
            )

    def settle(self, spec: ModelSpec, config: InstanceConfig, most: StepLimits) -> InstanceConfig:
        """See ``Backend``. All ranks get what rank 0's device has room for."""
        check_shardable(spec, self._num_ranks)
        shard = spec_of_rank(spec, self._num_ranks)
        if not config.enforce_eager:
            logger.info(
                "no steps are recorded as graphs: sums over %d ranks are not", self._num_ranks
            )
        rank = self._own.settle(shard, config_of_rank(config), most)
        memory_bytes = rank.memory_bytes
        if rank.gpu_memory_utilization is not None:
            memory_bytes = max(0, memory_bytes - self._sums_bytes(spec, most))
        return replace(
            config,
            granule_bytes=rank.granule_bytes,
            memory_bytes=memory_bytes * self._num_ranks,
            enforce_eager=True,
        )

    def _sums_bytes(self, spec: ModelSpec, limits: StepLimits) -> int:
        """What rank 0 takes beside what a rank alone would: logits of all tokens, and sums."""
        parts_and_whole = 2 * limits.num_sampled * spec.vocab_size * 4
        nccl_bytes = _NCCL_BYTES if self._by is SumsBy.NCCL else 0
        return parts_and_whole + drawing_bytes(spec, limits) + nccl_bytes

    def buffer_bytes(self, spec: ModelSpec, limits: StepLimits) -> int:
        """See ``Backend``."""
        shard = spec_of_rank(spec, self._num_ranks)
        of_rank = self._own.buffer_bytes(shard, limits) + self._sums_bytes(spec, limits)
        return self._num_ranks * of_rank

    def open_memory(
        self,
        instance_id: InstanceId,
        spec: ModelSpec,
        config: InstanceConfig,
        beside_bytes: int,
    ) -> DeviceRanksMemory:
        """Take this rank's memory, and start the others, which take theirs and load meanwhile."""
        num_ranks, of_rank = self._num_ranks, config_of_rank(config)
        beside = beside_bytes // num_ranks
        own = self._own.open_memory(instance_id, spec_of_rank(spec, num_ranks), of_rank, beside)
        members = None
        try:
            windows = Windows(num_ranks, own.unit_bytes)
            members = self._start_others()
            orders = [
                replace(
                    self._order(rank, instance_id, spec, of_rank),
                    card=self._cards[rank],
                    beside_bytes=beside,
                )
                for rank in range(1, num_ranks)
            ]
            self._await_others = members.join(orders, [(windows.fd,)] * len(orders))
            windows.close_file()
        except BaseException:
            if members is not None:
                members.close()
            own.close()
            raise
        self._members = members
        return DeviceRanksMemory(own, members, windows, self._close_others)

    def _close_others(self) -> None:
        assert self._members is not None
        self._members.close()
        if self._sums is not None:
            self._sums.close()

    def loader(
        self,
        reader: Reader,
        spec: ModelSpec,
        memory: Memory,
        weights: ModelWeights,
    ) -> Loader:
        """See ``Backend``."""
        assert self._members is not None
        shard = ShardReader(reader, spec, 0, self._num_ranks)
        shape = spec_of_rank(spec, self._num_ranks)
        own = self._own.loader(shard, shape, memory, weights)
        return _RanksLoader(own, self._members, memory.layer_bytes)

    def decoder(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        memory: Memory,
        config: InstanceConfig,
    ) -> DeviceRanksDecoder:
        """See ``Backend``. Waits until all ranks have loaded, and have met."""
        members, num_ranks = self._members, self._num_ranks
        assert members is not None and self._await_others is not None
        self._await_others()
        store_fd = make_store_file()
        with members.telling(OpenSums(self._by), (store_fd,)):
            sums = GroupSums(
                self._by, store_fd, 0, num_ranks, self.device, self._patience_s, members.why_lost
            )
            self._sums = sums
        kv, of_rank = kv_in(memory.shards[0], self.device), config_of_rank(config)
        ops = self._own.open_ops(spec_of_rank(spec, num_ranks), of_rank)
        own = DeviceShard(spec, weights, kv, config.block_size, ops, members.meeting, sums)
        return DeviceRanksDecoder(spec, own, members, config.block_size, self.device)

    def open_hops(self, address: str) -> None:
        """See ``Backend``. Hidden states are rank 0's: the others add zeros to them."""
        self._own.open_hops(address)
        self.ahead = self._own.ahead

    def give(self, hidden: Hidden | Part, to: str) -> memoryview:
        """See ``Backend``."""
        return self._own.give(hidden, to)

    def take(self, data: bytes | bytearray | memoryview, row_bytes: int) -> HiddenRows:
        """See ``Backend``."""
        return self._own.take(data, row_bytes)

    def mark(self) -> Wait:
        """See ``Backend``. Waiting raises RankLost, where a device would wait for a rank that is
        no more.

        Rank 0's part of the last sum comes after all that the other ranks have written.
        """
        own, members = self._own.mark(), self._members
        if members is None:
            return own

        def wait(look_up: Callable[[], None] | None) -> None:
            def look() -> None:
                members.meeting.check()
                if look_up is not None:
                    look_up()

            own(None if look_up is None else look)

        return wait


class _RanksLoader:
    """At the start every rank loads by itself. Layers that come back each loads on a word."""

    def __init__(self, own: WeightLoader, members: Members, layer_bytes: int) -> None:
        self._own = own
        self._members = members
        self._layer_bytes = layer_bytes
        self._have_loaded = False

    def check(self) -> None:
        """See ``Loader``."""
        self._own.check()

    def load_ends(self) -> None:
        """See ``Loader``."""
        self._own.load_ends()

    def load_layers(self, layers: LayerRange, gate: WriteGate | None = None) -> None:
        """See ``Loader``. The first call is that of the start.

        Ranks read where they write: a layer passes the gate as a whole.
        """
        if not self._have_loaded:
            self._own.load_layers(layers)
            self._have_loaded = True
            return
        for layer in range(*layers):
            load = functools.partial(self._load, LayerRange(layer, layer + 1))
            if gate is None:
                load()
            else:
                gate(self._layer_bytes, load)

    def _load(self, one: LayerRange) -> None:
        with self._members.telling(Load(one)):
            self._own.load_layers(one)
