"""Random lives of a block table over a memory whose units carry tags instead of bytes."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kunserve.control.instance.block_table import BlockTable
from kunserve.control.instance.body import UnitCopy
from kunserve.core.ids import RequestId
from kunserve.core.layout import LayerRange
from tests.examples import examples

NAMES = [RequestId(f"r{i}") for i in range(5)]
Tag = tuple[RequestId, int, int]
"""(request, block, layer)."""


class BlockTableMachine(RuleBasedStateMachine):
    """Every block keeps the content of every layer it holds, whatever is moved around it."""

    @initialize(
        num_layers=st.sampled_from([1, 2, 4, 5, 7, 30]),
        num_blocks=st.integers(0, 12),
        extra=st.integers(0, 29),
    )
    def start(self, num_layers: int, num_blocks: int, extra: int) -> None:
        self.num_layers = num_layers
        self.table = BlockTable(num_layers, num_layers * num_blocks + extra, 2, 2)
        self.memory: dict[int, Tag] = {}
        self.expected: dict[Tag, None] = {}
        self.blocks: dict[RequestId, int] = {}
        self.pinned: dict[tuple[RequestId, int], int] = {}
        """(request, block) -> the entry that must not change."""

    def unit(self, name: RequestId, block: int, layer: int) -> int:
        return int(self.table.tables[self.table.row_of(name), block]) + layer

    def write(self, name: RequestId, block: int, layers: LayerRange) -> None:
        for layer in range(*layers):
            self.memory[self.unit(name, block, layer)] = (name, block, layer)
            self.expected[(name, block, layer)] = None

    def run(self, copies: tuple[UnitCopy, ...]) -> None:
        for src, dst, count in copies:
            assert count > 0 and min(src, dst) >= 0
            assert max(src, dst) + count <= self.table.num_units
            assert src + count <= dst or dst + count <= src, "overlap"
            for i in range(count):
                if src + i in self.memory:
                    self.memory[dst + i] = self.memory[src + i]
                else:
                    self.memory.pop(dst + i, None)

    def forget(self, name: RequestId, first: int, end: int, keep: LayerRange) -> None:
        for tag in list(self.expected):
            if tag[0] == name and first <= tag[1] < end and not keep.first <= tag[2] < keep.end:
                del self.expected[tag]

    def known(self, data: st.DataObject, pinned: bool = False) -> RequestId | None:
        fixed = set() if pinned else {name for name, _ in self.pinned}
        names = [name for name in self.blocks if name not in fixed]
        return data.draw(st.sampled_from(names)) if names else None

    def span(self, data: st.DataObject, name: RequestId) -> tuple[int, int]:
        first = data.draw(st.integers(0, self.blocks[name]))
        return first, data.draw(st.integers(first, self.blocks[name]))

    @rule(name=st.sampled_from(NAMES), more=st.integers(0, 5))
    def grow(self, name: RequestId, more: int) -> None:
        have = self.table.num_blocks(name)
        free, needed = self.table.free_units, more * self.table.layers.num_layers
        copies = self.table.grow(name, have + more)
        if copies is None:
            assert needed > free or self.pinned, "memory suffices"
            assert self.table.num_blocks(name) == have
            return
        assert needed <= free
        self.run(copies)
        if have + more:
            self.blocks[name] = have + more
        for block in range(have, have + more):
            assert self.table.held(name, block) == self.table.layers
            self.write(name, block, self.table.layers)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.table.release(RequestId("nobody"))
        name = self.known(data)
        if name is not None:
            self.table.release(name)
            self.forget(name, 0, self.blocks.pop(name), LayerRange(0, 0))

    @rule(data=st.data())
    def release_layers(self, data: st.DataObject) -> None:
        name = self.known(data, pinned=True)
        if name is not None:
            first, end = self.span(data, name)
            keep = data.draw(st.sampled_from([self.table.layers, LayerRange(0, 0)]))
            self.table.release_layers(name, first, end, keep)
            self.forget(name, first, end, keep)

    def layers(self, data: st.DataObject) -> LayerRange:
        first = data.draw(st.integers(0, self.num_layers - 1))
        return LayerRange(first, data.draw(st.integers(first + 1, self.num_layers)))

    @rule(data=st.data(), more=st.integers(0, 60))
    def drop(self, data: st.DataObject, more: int) -> None:
        self.table.set_layers(self.layers(data), self.table.num_units + more)

    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        target = data.draw(st.integers(0, self.table.num_units))
        used = self.table.used_units
        copies = self.table.vacate(target)
        if copies is None:
            assert used > target or self.pinned, "it fits"
            return
        assert used <= target
        self.run(copies)
        layers = data.draw(st.sampled_from([self.table.layers, LayerRange(0, self.num_layers)]))
        self.table.set_layers(layers, target)

    @rule(data=st.data())
    def relayout(self, data: st.DataObject) -> None:
        name = self.known(data, pinned=True)
        if name is None:
            return
        first, end = self.span(data, name)
        if any((name, block) in self.pinned for block in range(first, end)):
            return
        layers = self.table.layers
        held = [self.table.held(name, block) for block in range(first, end)]
        if not all(layers.covers(old) for old in held):
            return
        needs = [layers.num_layers - old.num_layers for old in held if old != layers]
        free = self.table.free_units
        copies = self.table.relayout(name, first, end)
        if copies is None:
            float_short = free < sum(needs[:-1]) + layers.num_layers
            assert float_short or self.pinned, "block by block it fits"
            return
        assert sum(needs) <= free
        self.run(copies)
        for block in range(first, end):
            assert self.table.held(name, block) == layers
            for layer in range(*held[block - first]):
                if (name, block, layer) in self.expected:
                    assert self.memory[self.unit(name, block, layer)] == (name, block, layer)
            self.write(name, block, layers)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = self.known(data, pinned=True)
        if name is not None:
            first, end = self.span(data, name)
            self.table.pin(name, first, end)
            for block in range(first, end):
                self.pinned[name, block] = self.unit(name, block, 0)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.table.unpin(RequestId("nobody"), 0, 1)
        name, block = data.draw(st.sampled_from(sorted(self.pinned)))
        self.table.unpin(name, block, self.blocks[name])
        for other in range(block, self.blocks[name]):
            self.pinned.pop((name, other), None)

    @invariant()
    def content_is_kept(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        for name, block, layer in self.expected:
            assert self.memory[self.unit(name, block, layer)] == (name, block, layer)
        held = sum(
            self.table.held(name, block).num_layers
            for name, count in self.blocks.items()
            for block in range(count)
        )
        assert held == self.table.used_units == len(self.expected)

    @invariant()
    def pinned_blocks_stay(self) -> None:
        for (name, block), entry in getattr(self, "pinned", {}).items():
            empty = self.table.held(name, block).num_layers == 0
            assert empty or self.unit(name, block, 0) == entry

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for name in list(self.blocks):
            self.table.unpin(name, 0, self.blocks[name])
            self.table.release(name)
        self.table.check()
        assert self.table.used_units == 0
        assert np.all(self.table.tables >= -self.num_layers)


TestBlockTable = BlockTableMachine.TestCase
TestBlockTable.settings = settings(max_examples=examples(60), stateful_step_count=30)
