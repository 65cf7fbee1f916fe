"""Bulk without sockets: any order of asks, answers and ends puts every byte where it belongs."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import KvPull, LayerPull
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.bulk.sink import BulkSink
from kunserve.transport.bulk.source import BulkSource
from kunserve.transport.bulk.wire import Chunk
from tests.examples import examples
from tests.unit.transport.bulk_world import NUM_LAYERS, UNIT_BYTES, Memory, entries, piece

SOURCES = (0, 1)
SLOTS = 40
"""Blocks that fit the taker's memory, each a run of all layers."""


class Exchange(RuleBasedStateMachine):
    """Two sources, one taker; the machine is the network and may reorder what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.sources = [Memory(400, seed=s + 1) for s in SOURCES]
        self.givers = [BulkSource(memory) for memory in self.sources]
        for giver in self.givers:
            giver.offer(LayerRange(0, NUM_LAYERS))
        self.memory = Memory(SLOTS * NUM_LAYERS)
        pacing = BulkPacing(chunk_bytes=3 * UNIT_BYTES, max_in_flight=3, unknown_grace_s=1e9)
        self.sink = BulkSink(self.memory, pacing)
        self.now_s = 0.0
        self.wire: list[tuple[int, Chunk]] = []
        self.exports: dict[tuple[int, RequestId], list[int]] = {}
        self.free = list(range(SLOTS))
        self.wanted: dict[KvPull | LayerPull, list[int]] = {}
        self.withdrawn: set[tuple[int, RequestId]] = set()
        self.names = 0
        self.loading: dict[int, LayerPull] = {}
        """By layer: what fills it."""

    @rule(src=st.sampled_from(SOURCES), first=st.integers(0, NUM_LAYERS - 1), num=st.integers(1, 3))
    def pull_layers(self, src: int, first: int, num: int) -> None:
        """The memory of layers that nobody fills is other memory, and zero."""
        what = LayerPull(LayerRange(first, min(NUM_LAYERS, first + num)), InstanceId(src))
        if self.loading.keys().isdisjoint(range(*what.layers)):
            self.loading |= dict.fromkeys(range(*what.layers), what)
            self.sink.pull_layers(what)

    @precondition(lambda self: self.loading)
    @rule()
    def call_layers_off(self) -> None:
        self.sink.cancel(None)
        self.loading.clear()
        self.memory.weights[:] = 0

    @rule(
        src=st.sampled_from(SOURCES),
        blocks=st.lists(st.integers(0, 60), min_size=1, max_size=5),
        first=st.integers(0, NUM_LAYERS - 1),
        num_layers=st.integers(1, NUM_LAYERS),
        is_late=st.booleans(),
    )
    def pull(self, src: int, blocks: list[int], first: int, num_layers: int, is_late: bool) -> None:
        if len(self.free) < len(blocks):
            return
        self.names += 1
        name = RequestId(f"r{self.names}")
        self.exports[src, name] = blocks
        if not is_late:
            self.givers[src].export(name, entries(*blocks))
        layers = (first, min(NUM_LAYERS, first + num_layers))
        what = piece(name, src, layers, (0, len(blocks)))
        slots = [self.free.pop(0) for _ in blocks]
        self.wanted[what] = slots
        self.sink.pull_kv(what, entries(*(slot * NUM_LAYERS for slot in slots)))

    @rule(src=st.sampled_from(SOURCES))
    def export_the_late(self, src: int) -> None:
        for (at, name), blocks in self.exports.items():
            if at == src and (at, name) not in self.withdrawn:
                self.givers[src].export(name, entries(*blocks))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        live = [key for key in self.exports if key not in self.withdrawn]
        if live:
            src, name = data.draw(st.sampled_from(live))
            self.givers[src].export(name, entries(*self.exports[src, name]))
            self.givers[src].saw_transition(1)
            self.givers[src].withdraw(name)
            self.withdrawn.add((src, name))

    @rule()
    def ask(self) -> None:
        self.now_s += 0.01
        ask = self.sink.next_ask(self.now_s)
        if ask is not None:
            self.wire.append(ask)

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        src, chunk = self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))
        answer, num_bytes = self.givers[src].serve(chunk)
        self.sink.on_reply(chunk.ticket, answer, num_bytes, self.now_s)
        self.verify()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        what: Any = data.draw(st.sampled_from(list(self.wanted)))
        self.sink.cancel(what.request_id)
        self.give_back(what)

    def give_back(self, what: KvPull | LayerPull) -> None:
        """The slots are someone else's now: a late write into them would be seen."""
        for slot in self.wanted.pop(what):
            self.memory.block(slot * NUM_LAYERS, LayerRange(0, NUM_LAYERS))[:] = 0
            self.free.append(slot)

    def verify(self) -> None:
        for done in self.sink.drain():
            what = done.what
            if isinstance(what, LayerPull):
                assert done.ok
                for layer in range(*what.layers):
                    assert self.loading.pop(layer) is what
                    view = self.memory.layer_view(layer)
                    np.testing.assert_array_equal(view, self.sources[what.src].layer_view(layer))
                    view[:] = 0
                continue
            blocks = self.exports[what.src, what.request_id]
            assert done.ok or (what.src, what.request_id) in self.withdrawn
            if done.ok:
                for slot, entry in zip(self.wanted[what], blocks, strict=True):
                    np.testing.assert_array_equal(
                        self.memory.block(slot * NUM_LAYERS, what.layers),
                        self.sources[what.src].block(entry, what.layers),
                    )
            self.give_back(what)

    @invariant()
    def sound(self) -> None:
        self.sink.check()
        for slot in self.free:
            assert not self.memory.block(slot * NUM_LAYERS, LayerRange(0, NUM_LAYERS)).any()
        for layer in set(range(NUM_LAYERS)) - self.loading.keys():
            assert not self.memory.layer_view(layer).any()

    def teardown(self) -> None:
        """With nothing more to go wrong, everything ends."""
        for src in SOURCES:
            self.export_the_late(src)
        while self.sink.num_pulls:
            self.ask()
            if self.wire:
                src, chunk = self.wire.pop(0)
                answer, data = self.givers[src].serve(chunk)
                self.sink.on_reply(chunk.ticket, answer, data, self.now_s)
                self.verify()
        assert not self.wanted and not self.loading and len(self.free) == SLOTS


TestExchange = Exchange.TestCase
TestExchange.settings = settings(max_examples=examples(20), stateful_step_count=40)
