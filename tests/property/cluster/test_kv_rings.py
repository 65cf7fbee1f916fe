"""KV of layers with a window in a ring: nothing that a step reads is written over, and whatever
happens to a cluster, its tokens are those of whole KV.
"""

import random
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kunserve.core.ids import InstanceId
from kunserve.core.kv_blocks import KvBlocks, ring_of
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.layer_split import Member, split_layers
from tests.examples import examples
from tests.fake_cluster import FakeCluster
from tests.property.cluster.test_transitions import SWAPS, TransitionsMachine
from tests.specs import instance_spec

pytestmark = pytest.mark.timeout(900)  # a busy machine


@settings(max_examples=examples(60))
@given(
    block_size=st.integers(1, 5),
    window=st.integers(1, 12),
    period=st.integers(2, 6),
    most=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
def test_what_a_step_reads_is_where_it_was_written(
    block_size: int, window: int, period: int, most: int, seed: int
) -> None:
    """Chunks of any size, of which some tokens at the end may be taken back as wrong guesses."""
    draw = random.Random(seed)
    blocks = KvBlocks(block_size, ring_of(window, period, block_size, most))
    memory: dict[tuple[int, int, int], int] = {}
    """(block, layer of the period, token of the block) -> position."""
    computed = 0
    while computed < 80:
        start, count = computed, draw.randint(1, most)
        num_blocks = blocks.holding(start + count)
        assert blocks.tokens_in(num_blocks) >= start + count > blocks.tokens_in(num_blocks - 1)
        for position in range(start, start + count):
            number, offset = divmod(position, block_size)
            local = blocks.local_block(number)
            block, before = blocks.global_place(number)
            assert local < num_blocks and block < num_blocks and 0 <= before < period
            for layer in range(period - 1):
                memory[local, layer, offset] = position
            memory[block, period - 1 - before, offset] = position
        for position in range(start, start + count):
            for seen in range(position + 1):
                number, offset = divmod(seen, block_size)
                block, before = blocks.global_place(number)
                assert memory[block, period - 1 - before, offset] == seen
                if seen > position - window:
                    local = blocks.local_block(number)
                    assert all(memory[local, i, offset] == seen for i in range(period - 1))
        computed += draw.randint(1, count)


class RingsMachine(TransitionsMachine):
    """Random lives of a cluster whose instances keep rings."""

    @initialize(
        num_layers=st.integers(4, 9),
        pools=st.lists(st.sampled_from([8, 10, 10, 10, 16]), min_size=1, max_size=4),
        block_size=st.sampled_from([1, 2, 4]),
        layer_units=st.sampled_from([12, 24, 60]),
        max_num_seqs=st.sampled_from([3, 8]),
        max_num_batched_tokens=st.sampled_from([2, 4]),
        swap=st.sampled_from(SWAPS),
        window=st.integers(1, 5),
        period=st.integers(2, 4),
    )
    def start(self, window: int, period: int, **given: Any) -> None:  # type: ignore[override]
        self.cluster = FakeCluster(**given, caches=False, windows=(window, period))

    migrate = None  # type: ignore[assignment]

    def merged(self, old: tuple[GroupLayout, ...], draw: random.Random) -> GroupLayout | None:
        """As the machine without rings, between whole periods."""
        held = {stage.instance_id: stage.layers for layout in old for stage in layout.stages}
        num_layers, period = self.cluster.model.num_layers, self.cluster.model.period
        ends = range(period, num_layers, period)
        if len(held) - 1 > len(ends):
            return None
        for _ in range(50):
            order = draw.sample(sorted(held), len(held))
            cuts = [0, *sorted(draw.sample(ends, len(held) - 1)), num_layers]
            stages = tuple(
                Stage(InstanceId(m), LayerRange(cuts[i], cuts[i + 1])) for i, m in enumerate(order)
            )
            if all(held[stage.instance_id].covers(stage.layers) for stage in stages):
                return GroupLayout(self.cluster.controller.placement.new_ids(1), stages)
        return None


TestRings = RingsMachine.TestCase
TestRings.settings = settings(max_examples=examples(20), stateful_step_count=40)


def _spec(number: int, num_layers: int, kv_units: int, period: int) -> InstanceSpec:
    return instance_spec(number, num_layers, kv_units, kv_ring=ring_of(8, period, 16, 16))


@settings(max_examples=examples(40))
@given(
    num_layers=st.integers(4, 13),
    period=st.integers(2, 5),
    units=st.lists(st.integers(100, 900), min_size=2, max_size=3),
    head=st.integers(0, 2),
)
def test_the_best_of_all_cuts_between_periods(
    num_layers: int, period: int, units: list[int], head: int
) -> None:
    whole = LayerRange(0, num_layers)
    specs = [_spec(i, num_layers, num, period) for i, num in enumerate(units)]
    members = [Member(spec.instance_id, whole, spec) for spec in specs]
    ends = range(period, num_layers, period)
    best = None
    for inner in combinations(ends, len(units) - 1):
        cuts = [0, *inner, num_layers]
        counts = [end - first for first, end in pairwise(cuts)]
        cost = max(*counts[:-1], counts[-1] + head)
        for order in permutations(specs):
            capacity = min(
                spec.blocks_when_holding(count) for spec, count in zip(order, counts, strict=True)
            )
            found = (-cost, capacity, -sum(count * count for count in counts))
            best = found if best is None else max(best, found)
    stages = split_layers(members, num_layers, head_cost_layers=head)
    if best is None:
        assert stages is None
        return
    assert stages is not None
    counts = [stage.layers.num_layers for stage in stages]
    cost = max(*counts[:-1], counts[-1] + head)
    capacity = min(specs[s.instance_id].blocks_when_holding(s.layers.num_layers) for s in stages)
    assert all(stage.layers.first % period == 0 for stage in stages)
    assert (-cost, capacity, -sum(count * count for count in counts)) == best
