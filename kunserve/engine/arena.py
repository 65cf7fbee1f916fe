"""One fixed budget of physical memory, handed out as equal granules.

Every granule is either free or mapped at exactly one slot of one range. Ranges keep their
addresses for ever; only what lies under them changes.
"""

import ctypes
import itertools
import mmap
import os

import numpy as np
import numpy.typing as npt

from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.engine import address_space
from kunserve.engine.free_memory import available_bytes

Granules = npt.NDArray[np.int32]

_NOTHING = -1
_HUGE_PAGE_BYTES = 2 << 20


class VirtualRange:
    """Address space in granule-sized slots, each empty or holding one granule."""

    def __init__(self, name: str, range_id: int, num_slots: int, granule_bytes: int) -> None:
        self.name = name
        self.range_id = range_id
        self.num_slots = num_slots
        self.granule_bytes = granule_bytes
        self.granules: Granules = np.full(num_slots, _NOTHING, dtype=np.int32)
        """[num_slots] the granule at each slot, or -1. The arena writes it."""
        # Whole page-table pages can be moved only between equally aligned addresses.
        self._reserved_bytes = num_slots * granule_bytes + _HUGE_PAGE_BYTES
        self._reserved_at = address_space.reserve(self._reserved_bytes)
        self.base_address = -(-self._reserved_at // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Address space from ``base_address``, mapped or not."""
        return self.num_slots * self.granule_bytes

    @property
    def num_mapped(self) -> int:
        """Granules mapped here."""
        return int(np.count_nonzero(self.granules != _NOTHING))

    def address_of(self, slot: int) -> int:
        """Where a slot begins."""
        return self.base_address + slot * self.granule_bytes

    def bytes_view(self, offset: int = 0, num_bytes: int | None = None) -> npt.NDArray[np.uint8]:
        """The range's bytes as [num_bytes] uint8, no copy. Touch only what is mapped."""
        size = self.num_bytes - offset if num_bytes is None else num_bytes
        assert offset >= 0 and offset + size <= self.num_bytes, (offset, size, self.num_bytes)
        buffer = (ctypes.c_uint8 * size).from_address(self.base_address + offset)
        return np.ctypeslib.as_array(buffer)

    def release(self) -> None:
        """Give the address space back. Every view of it dangles from now on."""
        address_space.unreserve(self._reserved_at, self._reserved_bytes)
        self.granules.fill(_NOTHING)


class Arena:
    """Owns the granules: which are free, and where each of the others is mapped."""

    def __init__(self, budget_bytes: int, granule_bytes: int, beside_bytes: int = 0) -> None:
        """``beside_bytes`` is what the process will need beside the arena."""
        if granule_bytes <= 0 or granule_bytes % mmap.PAGESIZE:
            raise ConfigError(
                f"granule_bytes must be a multiple of {mmap.PAGESIZE}, not {granule_bytes}"
            )
        self.granule_bytes = granule_bytes
        self.num_granules = budget_bytes // granule_bytes
        self.num_calls = 0
        """System calls made to map, move and unmap."""
        self._ranges: list[VirtualRange] = []
        self._owner: Granules = np.full(self.num_granules, _NOTHING, dtype=np.int32)
        self._slot: Granules = np.full(self.num_granules, _NOTHING, dtype=np.int32)
        self._fd = _claim(self.num_granules * granule_bytes, beside_bytes)

    @property
    def num_free(self) -> int:
        """Granules mapped nowhere."""
        return int(np.count_nonzero(self._owner == _NOTHING))

    def reserve(self, name: str, num_bytes: int) -> VirtualRange:
        """A new empty range of at least ``num_bytes``; it lives until ``close``."""
        num_slots = -(-num_bytes // self.granule_bytes)
        new = VirtualRange(name, len(self._ranges), num_slots, self.granule_bytes)
        self._ranges.append(new)
        return new

    def take(self, num: int) -> Granules:
        """The ids of ``num`` free granules, lowest first. They stay free until mapped."""
        free = np.flatnonzero(self._owner == _NOTHING)[:num].astype(np.int32)
        assert len(free) == num, (len(free), num)
        return free

    def map(
        self, target: VirtualRange, slot: int, granules: Granules, populate: bool = False
    ) -> None:
        """Map free granules at consecutive empty slots, their pages faulted in on request."""
        end = slot + len(granules)
        assert slot >= 0 and end <= target.num_slots, (slot, end, target.num_slots)
        assert (target.granules[slot:end] == _NOTHING).all(), (target.name, slot, end)
        assert (self._owner[granules] == _NOTHING).all(), granules
        for first, last in _runs(granules):
            run = granules[first:last]
            address_space.map_file(
                target.address_of(slot + first),
                len(run) * self.granule_bytes,
                self._fd,
                int(run[0]) * self.granule_bytes,
                populate,
            )
            self.num_calls += 1
            self._record(target, slot + first, run)

    def unmap(self, source: VirtualRange, slot: int, num: int) -> Granules:
        """Empty ``num`` consecutive full slots; their granules, now free, in slot order."""
        granules = source.granules[slot : slot + num].copy()
        assert len(granules) == num and (granules != _NOTHING).all(), (source.name, slot, num)
        if num:
            address_space.unmap(source.address_of(slot), num * self.granule_bytes)
            self.num_calls += 1
            self._erase(source, slot, granules)
        return granules

    def move(
        self,
        source: VirtualRange,
        source_slot: int,
        target: VirtualRange,
        target_slot: int,
        num: int,
    ) -> None:
        """Take ``num`` consecutive granules, content included, from one range to another.

        After an OSError some are moved and some are not, and old addresses may still show moved
        ones: whoever called must give the arena up.
        """
        granules = source.granules[source_slot : source_slot + num].copy()
        assert len(granules) == num and (granules != _NOTHING).all(), (source.name, source_slot)
        target_slots = target.granules[target_slot : target_slot + num]
        assert len(target_slots) == num and (target_slots == _NOTHING).all(), (
            target.name,
            target_slot,
            num,
        )
        for first, last in _runs(granules):
            run = granules[first:last]
            moved = address_space.move(
                source.address_of(source_slot + first),
                target.address_of(target_slot + first),
                len(run) * self.granule_bytes,
            )
            self.num_calls += 1
            if moved:
                # The granules are at the target now, whatever becomes of the next call.
                self._erase(source, source_slot + first, run)
                self._record(target, target_slot + first, run)
                address_space.unmap(
                    source.address_of(source_slot + first), len(run) * self.granule_bytes
                )
                self.num_calls += 1
            else:
                self.unmap(source, source_slot + first, len(run))
                self.map(target, target_slot + first, run)

    def check(self, ask_kernel: bool = False) -> None:
        """Assert that no granule is lost or mapped twice; ``ask_kernel`` compares /proc too."""
        seen = np.zeros(self.num_granules, dtype=np.int64)
        for owner in self._ranges:
            slots = np.flatnonzero(owner.granules != _NOTHING)
            granules = owner.granules[slots]
            np.add.at(seen, granules, 1)
            assert (self._owner[granules] == owner.range_id).all(), owner.name
            assert (self._slot[granules] == slots).all(), owner.name
        free = self._owner == _NOTHING
        assert (seen == np.where(free, 0, 1)).all(), np.flatnonzero(seen != np.where(free, 0, 1))
        assert sum(owner.num_mapped for owner in self._ranges) + self.num_free == self.num_granules
        if ask_kernel:
            self._check_kernel()

    def close(self) -> None:
        """Release all memory and address space. Every view dangles from now on."""
        for owner in self._ranges:
            owner.release()
        self._ranges.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._owner.fill(_NOTHING)
        self._slot.fill(_NOTHING)

    def _record(self, target: VirtualRange, slot: int, granules: Granules) -> None:
        target.granules[slot : slot + len(granules)] = granules
        self._owner[granules] = target.range_id
        self._slot[granules] = np.arange(slot, slot + len(granules), dtype=np.int32)

    def _erase(self, source: VirtualRange, slot: int, granules: Granules) -> None:
        source.granules[slot : slot + len(granules)] = _NOTHING
        self._owner[granules] = _NOTHING
        self._slot[granules] = _NOTHING

    def _check_kernel(self) -> None:
        expected = {
            (owner.address_of(slot), int(owner.granules[slot]))
            for owner in self._ranges
            for slot in np.flatnonzero(owner.granules != _NOTHING).tolist()
        }
        actual = {
            (mapping.address + shift, (mapping.offset + shift) // self.granule_bytes)
            for mapping in address_space.mappings_of(self._fd)
            for shift in range(0, mapping.num_bytes, self.granule_bytes)
        }
        assert actual == expected, actual ^ expected
        held = os.fstat(self._fd).st_blocks * 512
        assert held <= self.num_granules * self.granule_bytes, held


def _runs(granules: Granules) -> list[tuple[int, int]]:
    """[first, last) index pairs of the stretches of consecutive ids."""
    if not len(granules):
        return []
    cuts = np.flatnonzero(np.diff(granules) != 1) + 1
    edges = [0, *cuts.tolist(), len(granules)]
    return list(itertools.pairwise(edges))


def _claim(num_bytes: int, beside_bytes: int) -> int:
    """A memory file that has all its memory; TooLittleMemory where the machine has not so much."""
    available = available_bytes()
    if num_bytes + beside_bytes > available:
        # Asking the kernel would wake its out-of-memory killer before it refuses.
        raise TooLittleMemory(
            f"an instance asks for {num_bytes} bytes of memory and {beside_bytes} for its steps, "
            f"the machine, or this process's cgroup, has {available} left"
        )
    fd = os.memfd_create("kunserve-arena")
    try:
        os.ftruncate(fd, num_bytes)
        if num_bytes:
            # Now, so that a shortage shows at start and not as a crash under load.
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        raise TooLittleMemory(
            f"the machine cannot give {num_bytes} bytes to an instance: {error.strerror}"
        ) from error
    return fd
