"""Granules are conserved, content follows them, and the kernel agrees, whatever is done."""

import dataclasses
import mmap

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kunserve.core.config import InstanceConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.arena import Arena
from kunserve.engine.memory import InstanceMemory, MemoryPlan
from kunserve.engine.pages import Granules, HostPages
from tests.specs import model_spec

PAGE = mmap.PAGESIZE
SLOTS = 12

MODEL = model_spec(
    num_layers=6,
    hidden_size=32,
    intermediate_size=64,
    num_heads=1,
    num_kv_heads=1,
    vocab_size=50,
    max_position=128,
    rms_eps=1e-6,
    dtype="float32",
)


class Arenas(RuleBasedStateMachine):
    """Maps, moves and unmaps between two ranges; a model of each slot's byte is kept beside."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(HostPages(10 * PAGE, PAGE))
        self.ranges = [self.arena.reserve(name, SLOTS * PAGE) for name in ("a", "b")]
        self.stamps: list[dict[int, int]] = [{}, {}]
        self.next_stamp = 1

    def stretch(self, which: int, start: int, want_full: bool) -> tuple[int, int]:
        """The stretch of full (or empty) slots that begins at or after ``start``."""
        full = self.ranges[which].granules >= 0
        slots = [s for s in range(start, SLOTS) if full[s] == want_full]
        if not slots:
            return 0, 0
        end = slots[0]
        while end < SLOTS and full[end] == want_full:
            end += 1
        return slots[0], end - slots[0]

    @rule(which=st.integers(0, 1), start=st.integers(0, SLOTS - 1), num=st.integers(1, 6))
    def map(self, which: int, start: int, num: int) -> None:
        slot, room = self.stretch(which, start, want_full=False)
        num = min(num, room, self.arena.num_free)
        granules = self.arena.take(self.arena.num_free)
        # Any order of granules must do.
        self.arena.map(self.ranges[which], slot, granules[::-1][:num].copy())
        for at in range(slot, slot + num):
            self.ranges[which].bytes_view(at * PAGE, PAGE)[:] = self.next_stamp % 251
            self.stamps[which][at] = self.next_stamp % 251
            self.next_stamp += 1

    @rule(which=st.integers(0, 1), start=st.integers(0, SLOTS - 1), num=st.integers(1, 6))
    def unmap(self, which: int, start: int, num: int) -> None:
        slot, room = self.stretch(which, start, want_full=True)
        num = min(num, room)
        self.arena.unmap(self.ranges[which], slot, num)
        for at in range(slot, slot + num):
            del self.stamps[which][at]

    @rule(
        which=st.integers(0, 1),
        start=st.integers(0, SLOTS - 1),
        target_start=st.integers(0, SLOTS - 1),
        num=st.integers(1, 6),
    )
    def move(self, which: int, start: int, target_start: int, num: int) -> None:
        slot, full = self.stretch(which, start, want_full=True)
        target, room = self.stretch(1 - which, target_start, want_full=False)
        num = min(num, full, room)
        self.arena.move(self.ranges[which], slot, self.ranges[1 - which], target, num)
        for step in range(num):
            self.stamps[1 - which][target + step] = self.stamps[which].pop(slot + step)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.arena.check(ask_kernel=True)
        for owner, stamps in zip(self.ranges, self.stamps, strict=True):
            assert set(np.flatnonzero(owner.granules >= 0).tolist()) == set(stamps)
            for slot, stamp in stamps.items():
                view = owner.bytes_view(slot * PAGE, PAGE)
                assert view[0] == view[-1] == stamp

    def teardown(self) -> None:
        self.arena.close()


class MappedTwice(HostPages):
    """Host memory that is remapped as device memory is. The call ``fails_at`` is refused."""

    moves = False
    fails_at: int | None = None

    def map(self, address: int, granules: Granules, populate: bool = False) -> None:
        self.count()
        super().map(address, granules, populate)

    def unmap(self, address: int, num: int) -> None:
        self.count()
        super().unmap(address, num)

    def count(self) -> None:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise OSError(12, "refused by the test")


class Memories(RuleBasedStateMachine):
    """Drops and reclaims layers; held weights and units below the mark keep their content."""

    memory: InstanceMemory | None = None
    pages: MappedTwice | None = None

    @initialize(
        is_mapped_twice=st.booleans(),
        granule_pages=st.integers(1, 3),
        block_size=st.sampled_from([1, 3, 16]),
        hidden_size=st.sampled_from([8, 24, 32]),
        kv_bytes=st.integers(40_000, 120_000),
    )
    def start(
        self,
        is_mapped_twice: bool,
        granule_pages: int,
        block_size: int,
        hidden_size: int,
        kv_bytes: int,
    ) -> None:
        model = dataclasses.replace(MODEL, hidden_size=hidden_size)
        config = InstanceConfig(
            kv_cache_memory_bytes=kv_bytes,
            granule_bytes=granule_pages * PAGE,
            block_size=block_size,
        )
        assert MemoryPlan.of(model, config).kv_units >= model.num_layers
        open_pages = MappedTwice if is_mapped_twice else HostPages
        self.memory = InstanceMemory(InstanceId(0), model, config, 0, open_pages)
        if isinstance(self.memory.arena.pages, MappedTwice):
            self.pages = self.memory.arena.pages
        for layer in range(model.num_layers):
            self.memory.layer_view(layer)[:] = layer + 1
        self.marked_units = 0

    @rule(cut=st.tuples(st.integers(0, 5), st.integers(0, 5)))
    def drop(self, cut: tuple[int, int]) -> None:
        assert self.memory is not None
        held = self.memory.held
        keep = held.intersect(LayerRange(min(cut), max(cut) + 1))
        if keep.num_layers == 0:
            return
        before = self.memory.kv.num_mapped
        remap = self.memory.drop(keep)
        moved = self.memory.kv.num_mapped - before
        assert remap.moved_bytes == moved * self.memory.arena.granule_bytes >= 0
        assert remap.kv_units == self.memory.spec.units_when_holding(keep.num_layers)

    @rule(cut=st.tuples(st.integers(0, 5), st.integers(0, 5)))
    def reclaim(self, cut: tuple[int, int]) -> None:
        assert self.memory is not None
        held = self.memory.held
        first, end = min(held.first, *cut), max(held.end, max(cut) + 1)
        whole = LayerRange(first, end)
        self.marked_units = min(
            self.marked_units, self.memory.spec.units_when_holding(whole.num_layers)
        )
        self.memory.reclaim(whole)
        assert self.memory.held == whole
        for layer in {*range(*whole)} - {*range(*held)}:
            self.memory.layer_view(layer)[:] = layer + 1

    @rule(
        cut=st.tuples(st.integers(0, 5), st.integers(0, 5)),
        is_drop=st.booleans(),
        fails_at=st.none() | st.integers(0, 8),
    )
    def prepare(self, cut: tuple[int, int], is_drop: bool, fails_at: int | None) -> None:
        """What is prepared is done by the next drop or reclaim, or called off by another one."""
        assert self.memory is not None
        held, some = self.memory.held, LayerRange(min(cut), max(cut) + 1)
        layers = LayerRange(min(held.first, some.first), max(held.end, some.end))
        if is_drop:
            layers = held.intersect(some)
        if layers.num_layers == 0:
            return
        if self.pages is not None:
            self.pages.fails_at = fails_at
        refusal = self.memory.prepare(layers)
        assert refusal is None or (fails_at is not None and "refused by the test" in refusal)
        if self.pages is not None:
            self.pages.fails_at = None
        assert self.memory.held == held

    @rule(fails_at=st.none() | st.just(0))
    def tidy(self, fails_at: int | None) -> None:
        assert self.memory is not None
        if self.pages is None:
            self.memory.tidy()
            assert self.memory.arena.num_aliases == 0
            return
        self.pages.fails_at = fails_at
        self.memory.tidy()
        self.pages.fails_at = None

    @rule()
    def fill_units(self) -> None:
        assert self.memory is not None
        for unit in range(self.memory.kv_units):
            self.memory.unit_view(unit, 1)[:] = unit % 251
        self.marked_units = self.memory.kv_units

    @precondition(lambda self: self.memory is not None)
    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.memory is not None
        self.memory.check(ask_kernel=True)
        for layer in range(*self.memory.held):
            view = self.memory.layer_view(layer)
            assert (view == layer + 1).all(), layer
        for unit in range(self.marked_units):
            view = self.memory.unit_view(unit, 1)
            assert view[0] == view[-1] == unit % 251, unit

    def teardown(self) -> None:
        if self.memory is not None:
            self.memory.close()


TestArenas = Arenas.TestCase
TestArenas.settings = settings(max_examples=40, stateful_step_count=25)
TestMemories = Memories.TestCase
TestMemories.settings = settings(max_examples=40, stateful_step_count=15)
