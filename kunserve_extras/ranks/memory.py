"""The memory of all ranks of an instance, as one.

Rank 0 maps every rank's arena and copies there itself, because that asks nobody. It keeps the same
books as the rank that computes there, so a change of layers is made twice, by both alike.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kunserve.control.instance.body import Remap, UnitCopy
from kunserve.core.layout import LayerRange
from kunserve.core.snapshots import InstanceSpec
from kunserve.engine.memory.huge_pages import HUGE_PAGE_BYTES
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.pages import Granules, HostPages
from kunserve.transport.bulk.movable_memory import (
    Content,
    Extents,
    InFile,
    Mapped,
    Places,
    UnitRuns,
)
from kunserve.transport.bulk.movable_memory import Granules as SharedGranules

Bytes = npt.NDArray[np.uint8]
Change = Callable[[LayerRange], AbstractContextManager[object]]
"""Within, the other ranks change what they hold; behind it, they have."""


class RankPages(HostPages):
    """One rank's part of the memory file of all ranks, which lie there one after the other.

    So peers read all of an instance in one file.
    """

    def __init__(
        self,
        fd: int,
        rank: int,
        claims: bool,
        num_bytes: int,
        granule_bytes: int,
        beside_bytes: int = 0,
        *,
        huge: bool = True,
        first_bytes: int | None = None,
    ) -> None:
        """With ``claims`` the file grows by this part, which must be its last one.

        The descriptor stays the caller's, who may close it then.
        """
        self._lent_fd = fd
        self._rank = rank
        self._claims = claims
        super().__init__(num_bytes, granule_bytes, beside_bytes, huge=huge, first_bytes=first_bytes)

    def _take(self, num_bytes: int, beside_bytes: int) -> int:
        whole_pages = -(-num_bytes // HUGE_PAGE_BYTES)
        self.file_offset = self._rank * whole_pages * HUGE_PAGE_BYTES
        if self._claims:
            self._claim(self._lent_fd, num_bytes, beside_bytes)
        return os.dup(self._lent_fd)


def spec_of_all(rank: InstanceSpec, num_ranks: int) -> InstanceSpec:
    """What the instance is made of, from what each of its ranks is made of."""
    return replace(
        rank,
        unit_bytes=rank.unit_bytes * num_ranks,
        layer_bytes=rank.layer_bytes * num_ranks,
        memory_bytes=rank.memory_bytes * num_ranks,
        granule_bytes=rank.granule_bytes * num_ranks,
        shared_weights_bytes=rank.shared_weights_bytes * num_ranks,
        tensor_parallel_size=num_ranks,
    )


class OfAllRanks:
    """The part of ``Memory`` that says the same of all ranks, because they are alike."""

    def __init__(
        self, shards: Sequence[InstanceMemory], num_ranks: int, close: Callable[[], None]
    ) -> None:
        """``shards`` are what this process reaches, ``close`` ends the other ranks."""
        self.shards = shards
        self.own = shards[0]
        self.num_ranks = num_ranks
        self.spec = spec_of_all(self.own.spec, num_ranks)
        self._end_others = close

    @property
    def is_preparing(self) -> bool:
        """See ``control.instance.body.Memory``."""
        return self.own.is_preparing

    @property
    def tidied_s(self) -> float | None:
        """See ``control.instance.body.Memory``."""
        return self.own.tidied_s

    @property
    def unit_bytes(self) -> int:
        """Of one unit: the ranks' parts one after the other."""
        return self.spec.unit_bytes

    @property
    def layer_bytes(self) -> int:
        """Of one layer's packed weights: the ranks' one after the other."""
        return self.num_ranks * self.own.layer_bytes

    def _joined(self, remap: Remap, seconds: float) -> Remap:
        """What one rank has changed, of all."""
        return replace(remap, moved_bytes=self.num_ranks * remap.moved_bytes, seconds=seconds)

    def _parts_of(self, offset: int, num_bytes: int) -> list[tuple[int, int, int]]:
        """Of each rank: where its part of these bytes of a layer begins in its own layer, how many
        it has, and where they begin among the bytes.
        """
        size = self.own.layer_bytes
        assert offset >= 0 and offset + num_bytes <= self.layer_bytes, (offset, num_bytes)
        parts = []
        for rank in range(self.num_ranks):
            first = min(max(offset, rank * size), offset + num_bytes)
            end = max(first, min(offset + num_bytes, (rank + 1) * size))
            parts.append((first - rank * size, end - first, first - offset))
        return parts


class RankedMemory(OfAllRanks):
    """An ``InstanceMemory`` of all ranks. A unit's bytes are theirs one after the other."""

    def __init__(
        self,
        shards: Sequence[InstanceMemory],
        drop: Change,
        reclaim: Change,
        close: Callable[[], None],
    ) -> None:
        """``shards`` are of all ranks, this process's own first. ``close`` ends the other ranks."""
        super().__init__(shards, len(shards), close)
        self._drop_elsewhere = drop
        self._reclaim_elsewhere = reclaim

    # Changes

    def prepare(self, layers: LayerRange) -> str | None:
        """See ``InstanceMemory``. Nobody has prepared where one refuses."""
        for number, shard in enumerate(self.shards):
            refusal = shard.prepare(layers)
            if refusal is not None:
                for before in self.shards[:number]:
                    before.prepare(before.held)
                return refusal
        return None

    def drop(self, keep: LayerRange) -> Remap:
        """See ``InstanceMemory``."""
        with self._drop_elsewhere(keep):
            remaps = [shard.drop(keep) for shard in self.shards]
        return self._joined(remaps[0], sum(remap.seconds for remap in remaps))

    def reclaim(self, layers: LayerRange) -> Remap:
        """See ``InstanceMemory``."""
        with self._reclaim_elsewhere(layers):
            remaps = [shard.reclaim(layers) for shard in self.shards]
        return self._joined(remaps[0], sum(remap.seconds for remap in remaps))

    # Bytes

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        """See ``InstanceMemory``."""
        for shard in self.shards:
            shard.copy_units(copies)

    def read_units(self, unit_runs: UnitRuns, into: Bytes) -> None:
        """Copy the bytes of backed units, run after run."""
        for theirs, run in self._by_unit(into, unit_runs):
            for part, shard in zip(theirs, self.shards, strict=True):
                part[:] = shard.unit_view(*run).reshape(part.shape)

    def write_units(self, unit_runs: UnitRuns, data: Content) -> None:
        """The reverse. What lies in a peer's file comes as ``locate_units`` says."""
        if isinstance(data, InFile):
            data.fill([shard.unit_view(*run) for shard in self.shards for run in unit_runs])
            return
        for theirs, run in self._by_unit(bytes_of(data), unit_runs):
            for part, shard in zip(theirs, self.shards, strict=True):
                shard.unit_view(*run).reshape(part.shape)[:] = part

    def _by_unit(
        self, data: Bytes, unit_runs: UnitRuns
    ) -> Iterator[tuple[Sequence[Bytes], tuple[int, int]]]:
        """Of each run, each rank's [units, bytes] in ``data``."""
        num_ranks = len(self.shards)
        units = data.reshape(-1, num_ranks, self.own.unit_bytes)
        done = 0
        for run in unit_runs:
            here = units[done : done + run[1]]
            yield [here[:, rank] for rank in range(num_ranks)], run
            done += run[1]
        assert done == len(units), (done, len(units))

    def read_layer(self, layer: int, offset: int, into: Bytes) -> None:
        """Copy bytes of a held layer's packed weights, those of rank 0 first."""
        for shard, first, part in self._by_rank(offset, into):
            shard.read_layer(layer, first, part)

    def write_layer(self, layer: int, offset: int, data: Content) -> None:
        """The reverse."""
        if isinstance(data, InFile):
            views = zip(self.shards, self._parts_of(offset, data.nbytes), strict=True)
            data.fill(
                [shard.layer_view(layer)[at : at + num] for shard, (at, num, _) in views if num]
            )
            return
        for shard, first, part in self._by_rank(offset, bytes_of(data)):
            shard.write_layer(layer, first, part)

    def _by_rank(self, offset: int, data: Bytes) -> Iterator[tuple[InstanceMemory, int, Bytes]]:
        """Of each rank with a part of these bytes: where they begin in its layer, and they."""
        for shard, part in zip(self.shards, self._parts_of(offset, data.nbytes), strict=True):
            first, num_bytes, at = part
            if num_bytes:
                yield shard, first, data[at : at + num_bytes]

    @property
    def places(self) -> Places:
        """See ``MovableMemory``."""
        return self

    @property
    def shared_fd(self) -> int | None:
        """The file of all ranks."""
        return self.own.shared_fd

    @property
    def granules(self) -> SharedGranules | None:
        """Host memory is a file, and is not mapped."""
        return None

    def at_once(self) -> AbstractContextManager[None]:
        """See ``Places``. Nothing is mapped."""
        return nullcontext()

    def locate_units(self, unit_runs: UnitRuns) -> Extents:
        """Where they lie in the file: all of the first rank, then those of the next. So stretches
        are as long as those of one rank are.
        """
        return [extent for shard in self.shards for extent in shard.locate_units(unit_runs)]

    def locate_layer(self, layer: int, offset: int, num_bytes: int) -> Extents:
        """Where ``read_layer`` would read in the file."""
        parts = zip(self.shards, self._parts_of(offset, num_bytes), strict=True)
        return [
            extent
            for shard, (first, num, _) in parts
            if num
            for extent in shard.locate_layer(layer, first, num)
        ]

    # Proof and end

    def check(self, ask_kernel: bool = False) -> None:
        """Assert that every rank's memory is where it must be, and that all hold the same."""
        for shard in self.shards:
            shard.check(ask_kernel)
            assert shard.held == self.own.held, (shard.held, self.own.held)
            assert granules_of(shard) == granules_of(self.own)

    def close(self) -> None:
        """End the other ranks, and release everything."""
        self._end_others()
        for shard in self.shards:
            shard.close()


def granules_of(shard: InstanceMemory) -> tuple[bytes, bytes]:
    """Which of them lies where."""
    granules: tuple[Granules, Granules] = (shard.weights.granules, shard.kv.granules)
    return granules[0].tobytes(), granules[1].tobytes()


def bytes_of(data: Content) -> Bytes:
    """What was sent: nothing of devices is mapped for several ranks, nor read in files."""
    assert not isinstance(data, Mapped | InFile), data
    return data
