"""Random lives of a block table over a memory whose units carry tags instead of bytes."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kunserve.control.instance.block_table import BlockTable
from kunserve.control.instance.body import UnitCopy
from kunserve.core.ids import PrefixId, RequestId
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
        self.expected: dict[Tag, Tag] = {}
        """(holder, block, layer) -> the content, by whom it was written."""
        self.blocks: dict[RequestId, int] = {}
        self.pinned: dict[tuple[RequestId, int], int] = {}
        """(request, block) -> the entry that must not change."""
        self.loans: dict[RequestId, list[tuple[PrefixId, int, int]]] = {}
        self.num_prefixes = 0

    def unit(self, name: RequestId, block: int, layer: int) -> int:
        return int(self.table.tables[self.table.row_of(name), block]) + layer

    def write(self, name: RequestId, block: int, layers: LayerRange) -> None:
        for layer in range(*layers):
            self.memory[self.unit(name, block, layer)] = (name, block, layer)
            self.expected[(name, block, layer)] = (name, block, layer)

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

    def shared_end(self, name: RequestId) -> int:
        return max((end for _, _, end in self.loans.get(name, ())), default=0)

    def lent_end(self, name: RequestId) -> int:
        loans = [loan for loans in self.loans.values() for loan in loans]
        return max((end for prefix_id, _, end in loans if prefix_id == name), default=0)

    def owner(self, name: RequestId, block: int) -> RequestId:
        loans = self.loans.get(name, ())
        return next((p for p, first, end in loans if first <= block < end), name)

    def cut(self, name: RequestId, num_blocks: int) -> None:
        loans = self.loans.pop(name, [])
        kept = [(p, first, min(end, num_blocks)) for p, first, end in loans if first < num_blocks]
        if kept:
            self.loans[name] = kept

    def known(self, data: st.DataObject, pinned: bool = False) -> RequestId | None:
        fixed = set() if pinned else {name for name, _ in self.pinned}
        names = [name for name in self.blocks if name not in fixed]
        return data.draw(st.sampled_from(names)) if names else None

    def span(self, data: st.DataObject, name: RequestId, least: int = 0) -> tuple[int, int]:
        first = data.draw(st.integers(least, self.blocks[name]))
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
        if name is not None and not self.lent_end(name):
            self.table.release(name)
            self.forget(name, 0, self.blocks.pop(name), LayerRange(0, 0))
            self.cut(name, 0)

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """A request's own blocks become a prefix's."""
        names = [n for n in NAMES if self.blocks.get(n, 0) > self.shared_end(n)]
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        first = self.shared_end(name)
        end = data.draw(st.integers(first + 1, self.blocks[name]))
        prefix_id = PrefixId(RequestId(f"p{self.num_prefixes}"))
        self.num_prefixes += 1
        self.table.keep(name, prefix_id, first, end)
        self.blocks[prefix_id] = end
        self.loans.setdefault(name, []).append((prefix_id, first, end))
        for holder, block, layer in list(self.expected):
            if holder == name and first <= block < end:
                content = self.expected.pop((holder, block, layer))
                self.expected[(prefix_id, block, layer)] = content
        for block in range(first, end):
            if (name, block) in self.pinned:
                self.pinned[prefix_id, block] = self.pinned.pop((name, block))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A request goes on with blocks of a prefix."""
        pairs = [
            (name, loan)
            for name in NAMES
            for loan in [one for loans in self.loans.values() for one in loans]
            if name not in self.loans or self.blocks[name] == self.shared_end(name)
            if loan[1] <= self.blocks.get(name, 0) == self.shared_end(name) < loan[2]
        ]
        if pairs:
            name, (prefix_id, _, most) = data.draw(st.sampled_from(pairs))
            first = self.shared_end(name)
            end = data.draw(st.integers(first + 1, most))
            self.table.share(name, prefix_id, end)
            self.blocks[name] = end
            self.loans.setdefault(name, []).append((prefix_id, first, end))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A prefix loses its last blocks, if nobody shares them."""
        self.table.evict(PrefixId(RequestId("nobody")), 0)
        name = self.known(data)
        if name is None or name in NAMES:
            return
        prefix_id = PrefixId(name)
        end = data.draw(st.integers(self.lent_end(name), self.blocks[name]))
        self.table.evict(prefix_id, end)
        self.forget(name, end, self.blocks[name], LayerRange(0, 0))
        self.blocks[name] = end
        if prefix_id not in self.table.rows:
            assert not any(holder == name for holder, _, _ in self.expected)
            del self.blocks[name]

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """A prefix gets a twin with units of its own."""
        name = self.known(data, pinned=True)
        if name is None or name in NAMES:
            return
        layers, end = self.table.layers, self.blocks[name]
        first = end
        while first and self.table.held(name, first - 1) == layers:
            first -= 1
        if first == end:
            return
        twin = PrefixId(RequestId(f"p{self.num_prefixes}"))
        self.num_prefixes += 1
        copies = self.table.copy(PrefixId(name), twin, first, end)
        if copies is None:
            assert twin not in self.table.rows
            return
        self.run(copies)
        self.blocks[twin] = end
        for block in range(first, end):
            for layer in range(*layers):
                self.expected[(twin, block, layer)] = self.expected[(name, block, layer)]

    @rule(data=st.data())
    def release_layers(self, data: st.DataObject) -> None:
        name = self.known(data, pinned=True)
        if name is not None:
            keep = data.draw(st.sampled_from([self.table.layers, LayerRange(0, 0)]))
            least = self.shared_end(name) if keep.num_layers else self.lent_end(name)
            first, end = self.span(data, name, least)
            self.table.release_layers(name, first, end, keep)
            self.forget(name, first, end, keep)
            if not keep.num_layers:
                self.cut(name, first)

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
        first, end = self.span(data, name, self.shared_end(name))
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
                content = self.expected[name, block, layer]
                assert self.memory[self.unit(name, block, layer)] == content
            for layer in range(*layers):
                self.expected.setdefault((name, block, layer), (name, block, layer))
                content = self.expected[name, block, layer]
                self.memory[self.unit(name, block, layer)] = content

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = self.known(data, pinned=True)
        if name is not None:
            first, end = self.span(data, name)
            self.table.pin(name, first, end)
            for block in range(first, end):
                owner = self.owner(name, block)
                self.pinned[owner, block] = self.unit(owner, block, 0)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.table.unpin(RequestId("nobody"), 0, 1)
        name, block = data.draw(st.sampled_from(sorted(self.pinned)))
        self.table.unpin(name, block, self.blocks[name])
        for other in range(block, self.blocks[name]):
            self.pinned.pop((self.owner(name, other), other), None)

    @invariant()
    def content_is_kept(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        for (name, block, layer), content in self.expected.items():
            assert self.memory[self.unit(name, block, layer)] == content
        for name, loans in self.loans.items():
            for prefix_id, first, end in loans:
                for block in range(first, end):
                    for layer in range(*self.table.held(prefix_id, block)):
                        place = self.unit(name, block, layer)
                        assert self.memory[place] == self.expected[prefix_id, block, layer]
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
        for name in self.table.request_ids():
            self.table.unpin(name, 0, self.blocks[name])
            self.table.release(name)
        self.table.check()
        assert self.table.used_units == 0
        assert np.all(self.table.tables >= -self.num_layers)


TestBlockTable = BlockTableMachine.TestCase
TestBlockTable.settings = settings(max_examples=examples(60), stateful_step_count=30)
