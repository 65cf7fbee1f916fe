"""Granules are conserved, content follows them, and the kernel agrees, whatever is done."""

import dataclasses
import mmap

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kunserve.core.config import InstanceConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.memory import address_space
from kunserve.engine.memory.arena import Arena
from kunserve.engine.memory.huge_pages import HUGE_PAGE_BYTES
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.memory_plan import MemoryPlan
from kunserve.engine.memory.pages import Granules, HostPages, OpenPages
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.pages import DevicePages
from tests.examples import examples
from tests.fakecuda.library import FakeCuda, build
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

    granule_bytes = PAGE

    def __init__(self) -> None:
        super().__init__()
        size = self.granule_bytes
        self.arena = Arena(HostPages(10 * size, size))
        self.ranges = [self.arena.reserve(name, SLOTS * size) for name in ("a", "b")]
        self.stamps: list[dict[int, int]] = [{}, {}]
        self.next_stamp = 1

    def view(self, which: int, slot: int) -> npt.NDArray[np.uint8]:
        """What lies there."""
        return self.ranges[which].bytes_view(slot * self.granule_bytes, self.granule_bytes)

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
            self.view(which, at)[:] = self.next_stamp % 251
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
        for which, stamps in enumerate(self.stamps):
            assert set(np.flatnonzero(self.ranges[which].granules >= 0).tolist()) == set(stamps)
            for slot, stamp in stamps.items():
                assert (self.view(which, slot)[::PAGE] == stamp).all()

    def teardown(self) -> None:
        self.arena.close()


class HugeArenas(Arenas):
    """The same with four granules to a huge page, which are collapsed wherever they lie."""

    granule_bytes = HUGE_PAGE_BYTES // 4

    @rule(which=st.integers(0, 1), page=st.integers(0, SLOTS // 4 - 1), source=st.integers(0, 1))
    def map_page(self, which: int, page: int, source: int) -> None:
        """Where it can be mapped whole."""
        granules = np.arange(4 * source, 4 * source + 4, dtype=np.int32)
        here = self.ranges[which].granules[4 * page : 4 * page + 4]
        if (here >= 0).any() or not set(granules) <= set(self.arena.take(self.arena.num_free)):
            return
        self.arena.map(self.ranges[which], 4 * page, granules)
        for slot in range(4 * page, 4 * page + 4):
            self.stamps[which][slot] = int(self.view(which, slot)[0])
        self.collapse(which, page)

    @rule(which=st.integers(0, 1), page=st.integers(0, SLOTS // 4 - 1))
    def collapse(self, which: int, page: int) -> None:
        # Whether that can be depends on what is there.
        address_space.collapse(self.ranges[which].address_of(4 * page), HUGE_PAGE_BYTES)

    @rule(
        which=st.integers(0, 1),
        start=st.integers(0, SLOTS - 1),
        target_start=st.integers(0, SLOTS - 1),
        num=st.integers(1, 8),
        page=st.integers(0, SLOTS // 4 - 1),
    )
    def link(self, which: int, start: int, target_start: int, num: int, page: int) -> None:
        slot, full = self.stretch(which, start, want_full=True)
        target, room = self.stretch(1 - which, target_start, want_full=False)
        num = min(num, full, room)
        self.arena.link(self.ranges[which], slot, self.ranges[1 - which], target, num)
        for side in (0, 1):
            self.collapse(side, page)
        for step in range(num):
            assert (self.view(1 - which, target + step) == self.view(which, slot + step)).all()
        while self.arena.num_aliases:
            self.arena.unlink_some(3)


class LargerPages(HostPages):
    """Host memory with pages of so many granules, of which most shall stay whole."""

    per_page = 1

    def __init__(self, num_bytes: int, granule_bytes: int, beside_bytes: int = 0) -> None:
        super().__init__(num_bytes, granule_bytes, beside_bytes)
        self.granules_per_page = self.per_page


class MappedTwice(HostPages):
    """Host memory that is remapped as device memory is. The call ``fails_at`` is refused."""

    moves = False
    fails_at: int | None = None

    def map(self, address: int, granules: Granules, populate: bool = False) -> None:
        self.count()
        super().map(address, granules, populate)

    def unmap(self, address: int, num: int, *, is_moved: bool = False) -> None:
        self.count()
        super().unmap(address, num, is_moved=is_moved)

    def count(self) -> None:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise OSError(12, "refused by the test")


class RefusedHere:
    """Refuses a call of the driver, as ``MappedTwice`` does of the kernel."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    @property
    def fails_at(self) -> None:
        return None

    @fails_at.setter
    def fails_at(self, value: int | None) -> None:
        if value is None:
            self._fake.refuse_nothing()
        else:
            self._fake.refuse(after=value)


class Memories(RuleBasedStateMachine):
    """Drops and reclaims layers; held weights and units below the mark keep their content."""

    memory: InstanceMemory | None = None
    fake: FakeCuda | None = None
    pages: MappedTwice | RefusedHere | None = None

    @initialize(
        kind=st.sampled_from(["moved", "mapped twice", "device"]),
        granules_per_page=st.sampled_from([1, 2, 3, 8]),
        granule_pages=st.integers(1, 3),
        block_size=st.sampled_from([1, 3, 16]),
        hidden_size=st.sampled_from([8, 24, 32]),
        kv_bytes=st.integers(40_000, 120_000),
    )
    def start(
        self,
        kind: str,
        granules_per_page: int,
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
        LargerPages.per_page = granules_per_page
        open_pages: OpenPages = MappedTwice if kind == "mapped twice" else LargerPages
        if kind == "device":
            self.fake = FakeCuda(granularity_bytes=PAGE)
            driver = Driver(library=build())
            open_pages = lambda size, granule, _: DevicePages(driver, size, granule)  # noqa: E731
        self.memory = InstanceMemory(
            InstanceId(0), model, config, 0, open_pages, backs_guard=kind != "moved"
        )
        if isinstance(self.memory.arena.pages, MappedTwice):
            self.pages = self.memory.arena.pages
        if self.fake is not None:
            self.pages = RefusedHere(self.fake)
        for layer in range(model.num_layers):
            self.fill_layer(layer)
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
            self.fill_layer(layer)

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
        assert refusal is None or fails_at is not None, refusal
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

    def fill_layer(self, layer: int) -> None:
        assert self.memory is not None
        data = np.full(self.memory.layer_bytes, layer + 1, dtype=np.uint8)
        self.memory.write_layer(layer, 0, data)

    @rule()
    def fill_units(self) -> None:
        assert self.memory is not None
        for unit in range(self.memory.kv_units):
            data = np.full(self.memory.unit_bytes, unit % 251, dtype=np.uint8)
            self.memory.write_units([(unit, 1)], data)
        self.marked_units = self.memory.kv_units

    @precondition(lambda self: self.memory is not None)
    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.memory is not None
        self.memory.check(ask_kernel=True)
        for layer in range(*self.memory.held):
            view = np.empty(self.memory.layer_bytes, dtype=np.uint8)
            self.memory.read_layer(layer, 0, view)
            assert (view == layer + 1).all(), layer
        units = np.empty((self.marked_units, self.memory.unit_bytes), dtype=np.uint8)
        self.memory.read_units([(0, self.marked_units)], units.reshape(-1))
        assert (units == (np.arange(self.marked_units) % 251)[:, None]).all()

    def teardown(self) -> None:
        if self.memory is not None:
            self.memory.close()
        if self.fake is not None:
            assert self.fake.left() == {}


TestArenas = Arenas.TestCase
TestArenas.settings = settings(max_examples=examples(20), stateful_step_count=25)
TestHugeArenas = HugeArenas.TestCase
TestHugeArenas.settings = settings(max_examples=examples(8), stateful_step_count=20)
TestMemories = Memories.TestCase
TestMemories.settings = settings(max_examples=examples(20), stateful_step_count=15)
