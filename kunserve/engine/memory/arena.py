"""The books of one fixed budget of physical memory, handed out as equal granules.

Every granule is either free or belongs at exactly one slot of one range. It may be mapped at one
more slot, its *alias*: the place that it goes to, or the one that it has left. Ranges keep their
addresses for ever; only what lies under them changes.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from kunserve.engine.memory.pages import NOTHING, Granules, Pages, runs


class VirtualRange:
    """Address space in granule-sized slots, each empty or holding one granule."""

    def __init__(self, name: str, range_id: int, num_slots: int, pages: Pages) -> None:
        self.name = name
        self.range_id = range_id
        self.num_slots = num_slots
        self.granule_bytes = pages.granule_bytes
        self.granules: Granules = np.full(num_slots, NOTHING, dtype=np.int32)
        """[num_slots] the granule that belongs at each slot, or -1. The arena writes it."""
        self.aliases: Granules = np.full(num_slots, NOTHING, dtype=np.int32)
        """[num_slots] the granule mapped at each slot that belongs elsewhere, or -1."""
        self.base_address = pages.reserve(self.num_bytes)
        self._is_host = pages.is_host
        self.num_mapped = 0
        """Granules that belong here. Every step asks. The arena counts."""

    @property
    def num_bytes(self) -> int:
        """Address space from ``base_address``, mapped or not."""
        return self.num_slots * self.granule_bytes

    def address_of(self, slot: int) -> int:
        """Where a slot begins."""
        return self.base_address + slot * self.granule_bytes

    def bytes_view(self, offset: int = 0, num_bytes: int | None = None) -> npt.NDArray[np.uint8]:
        """The range's bytes as [num_bytes] uint8, no copy. Touch only what is mapped.

        Of host memory only.
        """
        assert self._is_host, f"the range {self.name} is not in host memory"
        size = self.num_bytes - offset if num_bytes is None else num_bytes
        assert offset >= 0 and offset + size <= self.num_bytes, (offset, size, self.num_bytes)
        buffer = (ctypes.c_uint8 * size).from_address(self.base_address + offset)
        return np.ctypeslib.as_array(buffer)


class Arena:
    """Owns the granules: which are free, and where each of the others belongs."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.granule_bytes = pages.granule_bytes
        self.num_granules = pages.num_granules
        self._ranges: list[VirtualRange] = []
        self._owner: Granules = np.full(self.num_granules, NOTHING, dtype=np.int32)
        self._slot: Granules = np.full(self.num_granules, NOTHING, dtype=np.int32)
        self._alias_range: Granules = np.full(self.num_granules, NOTHING, dtype=np.int32)
        self._alias_slot: Granules = np.full(self.num_granules, NOTHING, dtype=np.int32)
        self.num_aliases = 0
        """Granules mapped at two places. Every step asks."""

    @property
    def num_calls(self) -> int:
        """Calls of the system made to map, move and unmap."""
        return self.pages.num_calls

    @property
    def num_free(self) -> int:
        """Granules that belong nowhere."""
        return int(np.count_nonzero(self._owner == NOTHING))

    def reserve(self, name: str, num_bytes: int) -> VirtualRange:
        """A new empty range of at least ``num_bytes``; it lives until ``close``."""
        num_slots = -(-num_bytes // self.granule_bytes)
        new = VirtualRange(name, len(self._ranges), num_slots, self.pages)
        self._ranges.append(new)
        return new

    def take(self, num: int) -> Granules:
        """The ids of ``num`` free granules, lowest first. They stay free until mapped."""
        free = np.flatnonzero(self._owner == NOTHING)[:num].astype(np.int32)
        assert len(free) == num, (len(free), num)
        return free

    def map(
        self, target: VirtualRange, slot: int, granules: Granules, populate: bool = False
    ) -> None:
        """Map free granules at consecutive empty slots, their pages faulted in on request."""
        _assert_empty(target, slot, len(granules))
        assert (self._owner[granules] == NOTHING).all(), granules
        self.pages.map(target.address_of(slot), granules, populate)
        self._record(target, slot, granules)

    def unmap(self, source: VirtualRange, slot: int, num: int) -> Granules:
        """Empty ``num`` consecutive full slots; their granules, now free, in slot order."""
        granules = self._owned(source, slot, num)
        assert (self._alias_range[granules] == NOTHING).all(), (source.name, slot, num)
        if num:
            self.pages.unmap(source.address_of(slot), num)
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
        granules = self._owned(source, source_slot, num)
        _assert_empty(target, target_slot, num)
        for first, last in runs(granules):
            run = granules[first:last]
            address = source.address_of(source_slot + first)
            if self.pages.move(address, target.address_of(target_slot + first), len(run)):
                # The granules are at the target now, whatever becomes of the next call.
                self._erase(source, source_slot + first, run)
                self._record(target, target_slot + first, run)
                self.pages.unmap(address, len(run), is_moved=True)
            else:
                self.unmap(source, source_slot + first, len(run))
                self.map(target, target_slot + first, run)

    # In two places

    def link(
        self,
        source: VirtualRange,
        source_slot: int,
        target: VirtualRange,
        target_slot: int,
        num: int,
    ) -> None:
        """Map ``num`` consecutive granules a second time, at slots where nothing belongs.

        They still belong where they were. Aliases that are in the way go; those that are there
        already stay. After an OSError nothing belongs elsewhere, and some may be linked.
        """
        granules = self._owned(source, source_slot, num)
        target_end = target_slot + num
        assert target_slot >= 0 and target_end <= target.num_slots, (target_slot, num)
        assert (target.granules[target_slot:target_end] == NOTHING).all(), (target.name, num)
        wanted = target.aliases[target_slot:target_end] != granules
        for slot in np.flatnonzero(wanted & (target.aliases[target_slot:target_end] != NOTHING)):
            self._unlink(target, target_slot + int(slot), 1)
        for granule in granules[wanted & (self._alias_range[granules] != NOTHING)].tolist():
            elsewhere = self._ranges[self._alias_range[granule]]
            self._unlink(elsewhere, int(self._alias_slot[granule]), 1)
        for first, last in runs(np.flatnonzero(wanted).astype(np.int32)):
            slots = np.flatnonzero(wanted)[first:last]
            at, new = target_slot + int(slots[0]), granules[slots]
            self.pages.map(target.address_of(at), new, populate=True)
            target.aliases[at : at + len(new)] = new
            self.num_aliases += len(new)
            self._alias_range[new] = target.range_id
            self._alias_slot[new] = np.arange(at, at + len(new), dtype=np.int32)

    def switch(self, source: VirtualRange, source_slot: int, num: int) -> None:
        """Let ``num`` consecutive linked granules belong at their alias, and the reverse.

        This changes the books only: it cannot fail.
        """
        granules = self._owned(source, source_slot, num)
        alias_range, alias_slot = self._alias_range[granules], self._alias_slot[granules]
        assert (alias_range != NOTHING).all(), (source.name, source_slot, num)
        slots = np.arange(source_slot, source_slot + num, dtype=np.int32)
        source.granules[slots], source.aliases[slots] = NOTHING, granules
        source.num_mapped -= num
        for range_id in np.unique(alias_range).tolist():
            target, here = self._ranges[range_id], alias_range == range_id
            target.aliases[alias_slot[here]] = NOTHING
            target.granules[alias_slot[here]] = granules[here]
            target.num_mapped += int(np.count_nonzero(here))
        self._owner[granules], self._slot[granules] = alias_range, alias_slot
        self._alias_range[granules], self._alias_slot[granules] = source.range_id, slots

    def unlink_some(self, most: int) -> None:
        """Unmap at most so many aliases, with one call. After an OSError they are there still."""
        for owner in self._ranges:
            slots = np.flatnonzero(owner.aliases != NOTHING).astype(np.int32)
            if len(slots):
                first, last = runs(slots)[0]
                self._unlink(owner, int(slots[first]), min(most, last - first))
                return

    def _unlink(self, owner: VirtualRange, slot: int, num: int) -> None:
        granules = owner.aliases[slot : slot + num].copy()
        self.pages.unmap(owner.address_of(slot), num)
        owner.aliases[slot : slot + num] = NOTHING
        self.num_aliases -= num
        self._alias_range[granules] = NOTHING
        self._alias_slot[granules] = NOTHING

    # Proof

    def check(self, ask_kernel: bool = False) -> None:
        """Assert that no granule is lost or has two owners; ``ask_kernel`` asks the system too."""
        seen = np.zeros(self.num_granules, dtype=np.int64)
        linked = np.zeros(self.num_granules, dtype=np.int64)
        for owner in self._ranges:
            for held, range_of, slot_of, count in (
                (owner.granules, self._owner, self._slot, seen),
                (owner.aliases, self._alias_range, self._alias_slot, linked),
            ):
                slots = np.flatnonzero(held != NOTHING)
                granules = held[slots]
                np.add.at(count, granules, 1)
                assert (range_of[granules] == owner.range_id).all(), owner.name
                assert (slot_of[granules] == slots).all(), owner.name
            assert not ((owner.granules != NOTHING) & (owner.aliases != NOTHING)).any(), owner.name
            assert owner.num_mapped == np.count_nonzero(owner.granules != NOTHING), owner.name
        free = self._owner == NOTHING
        assert (seen == np.where(free, 0, 1)).all(), np.flatnonzero(seen != np.where(free, 0, 1))
        assert (linked == np.where(self._alias_range == NOTHING, 0, 1)).all(), linked
        assert not linked[free].any(), "a free granule is mapped"
        assert self.num_aliases == linked.sum(), self.num_aliases
        assert sum(owner.num_mapped for owner in self._ranges) + self.num_free == self.num_granules
        if ask_kernel:
            for owner in self._ranges:
                expected = np.maximum(owner.granules, owner.aliases)
                actual = self.pages.granules_at(owner.base_address, owner.num_slots)
                different = np.flatnonzero(actual != expected)
                assert not len(different), (owner.name, different, actual[different])
            self.pages.check()

    def close(self) -> None:
        """Release all memory and address space. Every view dangles from now on."""
        for owner in self._ranges:
            owner.granules.fill(NOTHING)
            owner.aliases.fill(NOTHING)
            owner.num_mapped = 0
        self._ranges.clear()
        self.pages.close()
        for books in (self._owner, self._slot, self._alias_range, self._alias_slot):
            books.fill(NOTHING)
        self.num_aliases = 0

    def _owned(self, source: VirtualRange, slot: int, num: int) -> Granules:
        """What belongs at ``num`` consecutive full slots."""
        granules = source.granules[slot : slot + num].copy()
        assert len(granules) == num and (granules != NOTHING).all(), (source.name, slot, num)
        return granules

    def _record(self, target: VirtualRange, slot: int, granules: Granules) -> None:
        target.granules[slot : slot + len(granules)] = granules
        target.num_mapped += len(granules)
        self._owner[granules] = target.range_id
        self._slot[granules] = np.arange(slot, slot + len(granules), dtype=np.int32)

    def _erase(self, source: VirtualRange, slot: int, granules: Granules) -> None:
        source.granules[slot : slot + len(granules)] = NOTHING
        source.num_mapped -= len(granules)
        self._owner[granules] = NOTHING
        self._slot[granules] = NOTHING


def _assert_empty(target: VirtualRange, slot: int, num: int) -> None:
    end = slot + num
    assert slot >= 0 and end <= target.num_slots, (slot, end, target.num_slots)
    for held in (target.granules, target.aliases):
        assert (held[slot:end] == NOTHING).all(), (target.name, slot, end)
