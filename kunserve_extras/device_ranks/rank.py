"""A rank other than 0 with a device of its own, over the backend of an instance of one rank."""

from typing import Any

from kunserve.control.instance.body import UnitCopy
from kunserve.core.layout import LayerRange
from kunserve.engine.backend import kv_in
from kunserve.engine.weights.readers import open_reader
from kunserve.model.sharding import spec_of_rank
from kunserve_extras.device_ranks.decoder import DeviceShard
from kunserve_extras.device_ranks.memory import Windows, state_of
from kunserve_extras.device_ranks.sums import GroupSums
from kunserve_extras.device_ranks.words import (
    WORDS,
    Check,
    CopyUnits,
    Load,
    MoveLayer,
    MoveUnits,
    OpenSums,
    Prepare,
)
from kunserve_extras.ranks.control import Drop, Join, OpenRegion, Reclaim, Said
from kunserve_extras.ranks.rank import Rank
from kunserve_extras.ranks.region import Orders
from kunserve_extras.ranks.shards import ShardReader
from kunserve_extras.torch_body.cuda.opening import open_card


class DeviceRank(Rank):
    """Its memory is the business of the thread that obeys, and of no other."""

    more_words = WORDS

    def __init__(self, order: Join, windows_fd: int, meeting_fd: int) -> None:
        """Raises KunServeError for files that cannot be read, and for a device that will not do."""
        super().__init__(order, meeting_fd)
        assert order.card is not None
        self._order = order
        self._backend = backend = open_card(order.card)
        spec, rank, num_ranks = order.spec, order.rank, order.num_ranks
        self._shard = shard = spec_of_rank(spec, num_ranks)
        windows = Windows(num_ranks, fd=windows_fd)
        windows.close_file()
        self._window = windows.of(rank)
        reader = ShardReader(open_reader(order.source, spec, order.seed), spec, rank, num_ranks)
        self._memory = backend.open_memory(
            order.instance_id, shard, order.config, order.beside_bytes
        )
        self._weights = backend.weights(self._memory, shard)
        self._loader = backend.loader(reader, shard, self._memory, self._weights)
        self._loader.check()
        self._loader.load_ends()
        self._loader.load_layers(LayerRange(0, shard.num_layers))
        self._decoder: DeviceShard | None = None

    @property
    def decoder(self) -> DeviceShard:
        """See ``Rank``."""
        assert self._decoder is not None
        return self._decoder

    def enter(self) -> None:
        """See ``Rank``."""
        self._backend.enter()

    @property
    def is_untidy(self) -> bool:
        """See ``Rank``."""
        return self._memory.arena.num_aliases > 0

    def tidy(self) -> None:
        """See ``Rank``."""
        self._memory.tidy()

    def obey(self, word: object, fds: list[int]) -> Said:
        """See ``Rank``."""
        match word:
            case OpenSums(by):
                self._open_sums(by, *fds)
            case OpenRegion(room, limits):
                (fd,) = fds
                if limits is not None:
                    self.decoder.reserve(limits)
                orders = Orders(self._spec, self._meeting.num_ranks, room, fd)
                orders.close_file()
                self.decoder.open(orders)
            case Prepare(layers):
                return self._memory.prepare(layers)
            case Drop(keep):
                self._memory.drop(keep)
            case Reclaim(layers):
                self._memory.reclaim(layers)
            case Load(layers):
                self._loader.load_layers(layers)
            case Check(ask_kernel):
                self._memory.check(ask_kernel)
                return state_of(self._memory)
            case _:
                self._copy(word)
        return None

    def _open_sums(self, by: Any, store_fd: int) -> None:
        order, backend = self._order, self._backend
        sums = GroupSums(
            by, store_fd, order.rank, order.num_ranks, backend.device, order.patience_s
        )
        self._decoder = DeviceShard(
            order.spec,
            self._weights,
            kv_in(self._memory, backend.device),
            order.config.block_size,
            backend.open_ops(self._shard, order.config),
            self._meeting,
            sums,
        )

    def _copy(self, word: object) -> None:
        memory, rank = self._memory, self._meeting.rank
        match word:
            case CopyUnits(copies):
                memory.copy_units(tuple(UnitCopy(*copy) for copy in copies))
            case MoveUnits(runs, is_in):
                data = self._window[: memory.unit_bytes * sum(num for _, num in runs)]
                memory.write_units(runs, data) if is_in else memory.read_units(runs, data)
            case MoveLayer(layer, parts, is_in):
                first, num = parts[rank]
                data = self._window[:num]
                if num and is_in:
                    memory.write_layer(layer, first, data)
                elif num:
                    memory.read_layer(layer, first, data)
            case _:
                raise AssertionError(word)
