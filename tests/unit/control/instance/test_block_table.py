"""One instance's blocks through a drop and a restore, with uneven splits."""

import pytest

from kunserve.control.instance.block_table import SPARE_RUNS, BlockTable
from kunserve.control.instance.body import UnitCopy
from kunserve.core.ids import RequestId
from kunserve.core.layout import LayerRange

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
Tag = tuple[RequestId, int, int]


class Memory:
    """A block table over units that hold (request, block, layer) instead of bytes."""

    def __init__(self, table: BlockTable) -> None:
        self.table = table
        self.units: dict[int, Tag] = {}
        self.num_copied = 0

    def write(self, request_id: RequestId, first: int, end: int) -> None:
        row = self.table.row_of(request_id)
        for block in range(first, end):
            for layer in range(*self.table.held(request_id, block)):
                self.units[int(self.table.tables[row, block]) + layer] = (request_id, block, layer)

    def run(self, copies: tuple[UnitCopy, ...] | None) -> None:
        assert copies is not None
        for src, dst, count in copies:
            assert src + count <= dst or dst + count <= src
            moved = [self.units.get(src + i) for i in range(count)]
            self.units.update({dst + i: tag for i, tag in enumerate(moved) if tag is not None})
            self.num_copied += count

    def grow(self, request_id: RequestId, num_blocks: int) -> bool:
        have = self.table.num_blocks(request_id)
        copies = self.table.grow(request_id, num_blocks)
        if copies is None:
            return False
        self.run(copies)
        self.write(request_id, have, num_blocks)
        return True

    def check(self) -> None:
        self.table.check()
        for request_id in self.table.request_ids():
            row = self.table.row_of(request_id)
            for block in range(self.table.num_blocks(request_id)):
                for layer in range(*self.table.held(request_id, block)):
                    unit = int(self.table.tables[row, block]) + layer
                    assert self.units[unit] == (request_id, block, layer)


def full_table(num_layers: int, num_blocks: int, per_request: int = 7) -> Memory:
    """A pool filled by requests of ``per_request`` blocks."""
    memory = Memory(BlockTable(num_layers, num_layers * num_blocks, 4, 4))
    for i in range(num_blocks // per_request):
        assert memory.grow(RequestId(f"r{i}"), per_request)
    left = num_blocks % per_request
    assert left == 0 or memory.grow(RequestId("rest"), left)
    assert memory.table.free_units == 0
    return memory


def send_layers(memory: Memory, keep: LayerRange) -> None:
    table = memory.table
    for request_id in table.request_ids():
        table.release_layers(request_id, 0, table.num_blocks(request_id), keep)


def test_blocks_are_runs_of_units() -> None:
    table = BlockTable(4, 18, 2, 2)
    assert table.grow(A, 3) == ()
    assert table.row_of(A) == 0 and table.num_blocks(A) == 3
    assert table.tables[0, :3].tolist() == [0, 4, 8]
    assert table.held(A, 2) == LayerRange(0, 4)
    assert (table.used_units, table.free_units) == (12, 6)
    assert table.grow(A, 2) == ()
    assert table.grow(B, 2) is None and table.num_blocks(B) == 0
    assert table.grow(B, 0) == () and table.request_ids() == (A,)
    table.release(A)
    table.release(A)
    assert table.num_blocks(A) == 0 and table.used_units == 0
    table.check()


def test_arrays_grow_on_demand() -> None:
    table = BlockTable(1, 100, 1, 1)
    for i in range(9):
        assert table.grow(RequestId(str(i)), i + 1) == ()
    assert table.tables.shape[0] >= 9 and table.tables.shape[1] >= 9
    assert len({table.row_of(RequestId(str(i))) for i in range(9)}) == 9
    table.check()


def test_an_even_split_frees_exactly_new_blocks() -> None:
    memory = full_table(30, 12)
    table = memory.table
    table.set_layers(LayerRange(15, 30), table.num_units + 60)
    assert table.grow(A, 5) is None, "the old blocks still hold what is to be sent"
    assert memory.grow(A, 4), "the tail is there at once"
    assert table.tables[table.row_of(A), :4].min() >= 12 * 30 - 15
    send_layers(memory, table.layers)
    assert memory.grow(B, 12) and table.free_units == 0
    assert memory.num_copied == 0, "a drop moves nothing"
    memory.check()


def test_entries_may_be_negative_but_units_are_not() -> None:
    table = BlockTable(4, 8, 1, 2)
    table.set_layers(LayerRange(3, 4), 8)
    assert table.grow(A, 8) == ()
    assert table.tables[0, :8].min() == -3
    table.check()


@pytest.mark.parametrize("keep", [LayerRange(0, 10), LayerRange(10, 21), LayerRange(21, 30)])
def test_an_uneven_split_uses_every_run_by_copying_a_few_blocks(keep: LayerRange) -> None:
    memory = full_table(30, 64)
    table = memory.table
    table.set_layers(keep, table.num_units + 17)
    send_layers(memory, keep)
    free_runs = table.free_units // keep.num_layers
    for count in range(1, free_runs + 1):
        assert memory.grow(A, count), (count, free_runs)
    assert not memory.grow(A, free_runs + 1)
    assert table.free_units < keep.num_layers
    # Each live unit moves about once or twice in all, never once per new block.
    assert memory.num_copied <= 2 * table.num_units
    memory.check()


def test_compaction_makes_a_few_runs_at_a_time() -> None:
    memory = full_table(30, 64)
    table = memory.table
    table.set_layers(LayerRange(10, 21), table.num_units)
    send_layers(memory, table.layers)
    copying = 0
    for count in range(1, table.free_units // 11 + 1):
        before = memory.num_copied
        assert memory.grow(A, count)
        copying += memory.num_copied > before
    assert copying <= 4 + 64 // SPARE_RUNS * 4


def test_several_levels_then_back() -> None:
    memory = full_table(30, 40)
    table = memory.table
    full = table.num_units
    for level, keep in enumerate((LayerRange(10, 21), LayerRange(14, 21), LayerRange(14, 16))):
        table.set_layers(keep, table.num_units + 45)
        send_layers(memory, keep)
        assert memory.grow(RequestId(f"new{level}"), 9)
        memory.check()
    for i in range(5):
        table.release(RequestId(f"r{i}"))
    memory.run(table.vacate(full))
    table.set_layers(LayerRange(0, 30), full)
    memory.check()
    for level in range(3):
        name = RequestId(f"new{level}")
        for first in (0, 3, 6):
            memory.run(table.relayout(name, first, first + 3))
            for block in range(first, first + 3):
                assert table.held(name, block) == LayerRange(0, 30)
                for layer in (14, 15):
                    unit = int(table.tables[table.row_of(name), block]) + layer
                    assert memory.units[unit] == (name, block, layer)
        memory.write(name, 0, 9)
    memory.check()


def test_vacate_moves_only_what_is_above_the_mark() -> None:
    memory = Memory(BlockTable(3, 30, 4, 4))
    for name in (A, B, C):
        assert memory.grow(name, 3)
    memory.table.release(A)
    copies = memory.table.vacate(18)
    assert copies is not None and all(src >= 18 and dst < 18 for src, dst, _ in copies)
    memory.run(copies)
    assert memory.num_copied == 9
    memory.table.set_layers(LayerRange(0, 3), 18)
    memory.check()
    assert memory.table.vacate(17) is None and memory.table.vacate(18) == ()


def test_pinned_blocks_stay_and_can_be_in_the_way() -> None:
    memory = Memory(BlockTable(3, 30, 4, 4))
    table = memory.table
    assert memory.grow(A, 3) and memory.grow(B, 3)
    table.release(A)
    table.pin(B, 0, 3)
    assert table.vacate(9) is None
    with pytest.raises(AssertionError):
        table.release(B)
    table.unpin(B, 0, 2)
    assert table.vacate(9) is None, "one is still pinned"
    table.unpin(B, 2, 3)
    table.unpin(C, 0, 1)
    memory.run(table.vacate(9))
    memory.check()


def test_set_layers_refuses_to_lose_live_units() -> None:
    table = BlockTable(3, 30, 4, 4)
    table.grow(A, 10)
    with pytest.raises(AssertionError, match="live units"):
        table.set_layers(LayerRange(0, 3), 27)


def test_relayout_needs_one_free_run_only() -> None:
    """Each block leaves its old run to the next: memory-neutral but for a float of one block."""
    memory = full_table(8, 12, per_request=4)
    table = memory.table
    table.set_layers(LayerRange(0, 4), table.num_units)
    send_layers(memory, table.layers)
    table.release(RequestId("r1"))
    table.release(RequestId("r2"))
    assert memory.grow(B, 14)
    assert table.free_units == 96 - 16 - 56
    table.set_layers(LayerRange(0, 8), table.num_units)
    memory.run(table.relayout(RequestId("r0"), 0, 4))
    assert table.free_units == 8
    memory.write(RequestId("r0"), 0, 4)
    before = table.tables.copy()
    assert table.relayout(B, 0, 14) is None, "eight free units serve one of fourteen blocks"
    assert (table.tables == before).all() and table.free_units == 8
    memory.check()
    memory.run(table.relayout(B, 0, 1))
    memory.write(B, 0, 1)
    assert table.free_units == 4
    memory.check()


def test_blocks_that_hold_nothing_cost_nothing() -> None:
    table = BlockTable(4, 16, 1, 4)
    table.grow(A, 4)
    table.release_layers(A, 1, 3, LayerRange(0, 0))
    assert table.held(A, 1).num_layers == 0 and table.used_units == 8
    assert table.grow(B, 2) == ()
    table.release(A)
    assert table.used_units == 8
    table.check()


@pytest.mark.parametrize("moved_by", [-1, 1, -4, 4, 100, -100])
def test_a_unit_held_twice_or_by_nobody_is_found(moved_by: int) -> None:
    memory = full_table(num_layers=4, num_blocks=21)
    memory.table.release(RequestId("r0"))
    memory.table.check()
    memory.table.tables[memory.table.row_of(RequestId("r1")), 2] += moved_by
    with pytest.raises(AssertionError, match="owned other than once"):
        memory.table.check()
