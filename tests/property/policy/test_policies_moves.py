"""Exchange shares, restore plans and assignments: nothing lost, nothing twice, everything fits."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport
from kunserve.core.messages import SequenceKv
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.assignment import SequenceToPlace, assign_sequences
from kunserve.policy.drop.restore import Postponed, choose_sources, plan_restore
from kunserve.policy.exchange.moves import plan_moves
from kunserve.policy.exchange.order import cut_pieces, plan_exchange, receivers
from tests.specs import instance_spec


def make_spec(instance: int, num_layers: int, kv_units: int) -> InstanceSpec:
    return instance_spec(
        instance, num_layers, kv_units, unit_bytes=8, layer_bytes=96, granule_bytes=16
    )


def make_load(used: int, growth: int, largest: int) -> LoadReport:
    return LoadReport(
        GroupId(0),
        sequence_number=1,
        num_running=1,
        used_blocks=used,
        capacity_blocks=10**6,
        growth_blocks=growth,
        largest_request_blocks=largest,
        largest_expected_blocks=largest,
    )


@st.composite
def layouts_of(draw: st.DrawFn, num_layers: int, group_id: int) -> GroupLayout:
    num_stages = draw(st.integers(1, min(5, num_layers)))
    members = draw(st.permutations(range(6)))[:num_stages]
    inner = draw(
        st.lists(
            st.integers(1, max(1, num_layers - 1)),
            min_size=num_stages - 1,
            max_size=num_stages - 1,
            unique=True,
        )
    )
    ranges = itertools.pairwise([0, *sorted(inner), num_layers])
    return GroupLayout(
        GroupId(group_id),
        tuple(
            Stage(InstanceId(m), LayerRange(a, b))
            for m, (a, b) in zip(members, ranges, strict=True)
        ),
    )


@given(st.data(), st.integers(1, 12))
def test_every_layer_is_kept_or_received_once_from_its_holder(data, num_layers):
    old = data.draw(layouts_of(num_layers, 0))
    new = data.draw(layouts_of(num_layers, 1))
    everyone = sorted({*old.members, *new.members})
    shares = {me: plan_exchange(old, new, me) for me in everyone}
    for me, share in shares.items():
        before, after = old.layers_of(me), new.layers_of(me)
        got = list(range(share.keep.first, share.keep.end))
        for src, layers in share.receives:
            assert src != me
            assert layers.num_layers > 0
            assert (me, layers) in shares[src].sends
            assert old.layers_of(src).covers(layers)
            got += range(layers.first, layers.end)
        assert sorted(got) == ([] if after is None else list(range(after.first, after.end)))
        assert share.keep.num_layers == 0 or before.covers(share.keep)
        for dst, layers in share.sends:
            assert (me, layers) in shares[dst].receives
        gone = share.keep.num_layers + sum(layers.num_layers for _, layers in share.sends)
        assert gone == (0 if before is None else before.num_layers), "sent once each"
    assert set(receivers(old, new)) == {me for me, share in shares.items() if share.receives}


@given(st.integers(0, 5000), st.integers(1, 300))
def test_pieces_cover_every_block_once_and_are_even(num_blocks, most):
    pieces = cut_pieces(num_blocks, most)
    assert [b for first, end in pieces for b in range(first, end)] == list(range(num_blocks))
    sizes = [end - first for first, end in pieces]
    assert len(pieces) == -(-num_blocks // most)
    assert all(0 < size <= most for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(st.data(), st.integers(1, 12))
def test_sources_fill_every_gap_and_spread(data, num_layers):
    layout = data.draw(layouts_of(num_layers, 0))
    holders = {stage.instance_id: stage.layers for stage in layout.stages}
    whole = LayerRange(0, num_layers)
    num_helpers = data.draw(st.integers(0, 4))
    for helper in range(num_helpers):
        holders[InstanceId(100 + helper)] = whole
    lost = data.draw(st.sets(st.sampled_from(layout.members), max_size=len(layout.members) - 1))
    known = {i: layers for i, layers in holders.items() if i not in lost}
    specs = {i: instance_spec(int(i), num_layers) for i in holders}
    plan = choose_sources(layout, known, specs)
    assert [m.instance_id for m in plan] == list(layout.members)
    gives = dict.fromkeys(known, 0)
    for member, (_, mine) in zip(plan, layout.stages, strict=True):
        covered = list(range(mine.first, mine.end))
        for source in member.sources:
            covered += range(source.layers.first, source.layers.end)
            assert source.instance_id != member.instance_id
            if source.instance_id is not None:
                assert known[source.instance_id].covers(source.layers)
                gives[source.instance_id] += source.layers.num_layers
            else:
                for layer in range(source.layers.first, source.layers.end):
                    one = LayerRange(layer, layer + 1)
                    others = [h for i, h in known.items() if i != member.instance_id]
                    assert not any(h.covers(one) for h in others)
        assert sorted(covered) == list(range(num_layers))
    helpers = [given for i, given in gives.items() if i >= 100]
    assert not helpers or max(helpers) - min(helpers) <= 1


@st.composite
def sequences(draw: st.DrawFn, largest: int, total: int) -> list[SequenceToPlace]:
    sizes: list[int] = []
    while sum(sizes) < total and len(sizes) < 40:
        sizes.append(draw(st.integers(1, max(1, min(largest, total - sum(sizes))))))
    waiting = draw(st.lists(st.integers(0, max(0, largest)), max_size=10))
    return [
        SequenceToPlace(RequestId(f"r{n}"), blocks, need, draw(st.sampled_from([0.0, 1.0, 2.0])))
        for n, (blocks, need) in enumerate([(s, s) for s in sizes] + [(0, w) for w in waiting])
    ]


@given(st.data(), st.integers(1, 12))
def test_a_planned_restore_always_fits(data, num_layers):
    """Whatever runs when it parts: every request keeps its KV.

    ``plan_moves`` recomputes what has no room before, after or on the way (``test_moves``).
    """
    layout = data.draw(layouts_of(num_layers, 0))
    budgets = data.draw(st.sampled_from([st.just(1200), st.integers(0, 3000)]))
    specs = {m: make_spec(m, num_layers, data.draw(budgets)) for m in layout.members}
    largest = data.draw(st.integers(1, 60))
    used = data.draw(st.integers(0, 300))
    load = make_load(used, 0, largest)
    plan = plan_restore(layout, specs, load, first_id=GroupId(50))
    if isinstance(plan, Postponed):
        assert plan.reason
        return
    assert used <= plan.capacity_blocks
    assert [g.group_id for g in plan.new] == list(range(50, 50 + len(layout.stages)))
    assert sorted(m for g in plan.new for m in g.members) == sorted(layout.members)
    loads = {member.instance_id: member.sources for member in plan.members}
    for group in plan.new:
        group.check(num_layers)
        for member, layers in group.stages:
            held = layout.layers_of(member)
            assert held is not None and layers.covers(held)
            assert sum(s.layers.num_layers for s in loads[member]) == (
                layers.num_layers - held.num_layers
            )
    live = data.draw(sequences(largest, plan.capacity_blocks))
    states = [SequenceKv(s.request_id, s.arrival_s, s.num_blocks, s.num_blocks) for s in live]
    moves = plan_moves([(layout, states)], plan.new, specs)
    assert {move.request_id for move in moves.moves} == {s.request_id for s in live if s.num_blocks}


@given(st.data(), st.integers(1, 5))
def test_assignment_is_whole_fitting_and_the_same_for_everyone(data, num_groups):
    capacities = {
        GroupId(g): data.draw(st.integers(0, 100), label="capacity") for g in range(num_groups)
    }
    live = data.draw(sequences(40, sum(capacities.values()) * 3 // 4))
    placed = assign_sequences(live, capacities)
    shuffled = data.draw(st.permutations(live))
    again = dict(reversed(capacities.items()))
    assert assign_sequences(shuffled, again) == placed
    if placed is None:
        return
    assert set(placed) == {s.request_id for s in live}
    for group, capacity in capacities.items():
        mine = [s for s in live if placed[s.request_id] == group]
        assert sum(s.num_blocks for s in mine) <= capacity
        assert all(s.need_blocks <= capacity for s in mine)


@given(st.data(), st.integers(1, 5), st.integers(10, 100))
def test_equal_pools_are_balanced_within_one_request(data, num_groups, capacity):
    live = data.draw(sequences(10, num_groups * (capacity - 10)))
    live = [s for s in live if s.need_blocks > 0]
    placed = assign_sequences(live, {GroupId(g): capacity for g in range(num_groups)})
    assert placed is not None
    totals = dict.fromkeys(range(num_groups), 0)
    for sequence in live:
        totals[placed[sequence.request_id]] += sequence.need_blocks
    assert max(totals.values()) - min(totals.values()) <= 10
