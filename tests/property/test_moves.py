"""The common order of an exchange keeps every instance within its memory at every moment."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kunserve.cluster.fake import fake_spec
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import SequenceKv
from kunserve.policy.exchange import plan_exchange
from kunserve.policy.moves import MovePlan, choose_piece_blocks, float_units, plan_moves

Handed = list[tuple[GroupLayout, list[SequenceKv]]]


def state(name: str, num_blocks: int, arrival_s: float) -> SequenceKv:
    return SequenceKv(RequestId(name), arrival_s, num_blocks, max(1, num_blocks) + 3)


@st.composite
def changes(
    draw: st.DrawFn,
) -> tuple[Handed, list[GroupLayout], dict[InstanceId, object]]:
    """A merge of whole instances into a pipeline, or the way back, with full pools or not."""
    count, num_layers = draw(st.integers(2, 4)), draw(st.integers(4, 9))
    pools = draw(st.lists(st.integers(6, 40), min_size=count, max_size=count))
    layer_units = draw(st.integers(8, 80))
    specs = {
        InstanceId(i): fake_spec(InstanceId(i), num_layers, n * num_layers, 1, layer_units * 8, 8)
        for i, n in enumerate(pools)
    }
    chance = random.Random(draw(st.integers(0, 2**16)))
    cuts = [0, *sorted(chance.sample(range(1, num_layers), count - 1)), num_layers]
    pipeline = GroupLayout(
        GroupId(100),
        tuple(Stage(InstanceId(i), LayerRange(cuts[i], cuts[i + 1])) for i in range(count)),
    )
    wholes = [
        GroupLayout(GroupId(i), (Stage(InstanceId(i), LayerRange(0, num_layers)),))
        for i in range(count)
    ]
    is_drop = draw(st.booleans())
    old = wholes if is_drop else [pipeline]
    handed: Handed = []
    for layout in old:
        left = min(specs[m].kv_units // held.num_layers for m, held in layout.stages)
        left = left * draw(st.integers(1, 4)) // 4
        states: list[SequenceKv] = []
        while left > 0 and len(states) < 30:
            blocks = chance.randint(0, min(left, chance.choice([2, 5, 40])))
            left -= max(1, blocks)
            states.append(state(f"{layout.group_id}-{len(states)}", blocks, chance.random()))
        handed.append((layout, states))
    return handed, [pipeline] if is_drop else wholes, specs  # type: ignore[return-value]


@given(changes())
def test_memory_suffices_at_every_moment(change: tuple[Handed, list[GroupLayout], dict]) -> None:  # type: ignore[type-arg]
    handed, new, specs = change
    plan = plan_moves(handed, new, specs)
    old = [layout for layout, _ in handed]
    piece_blocks = choose_piece_blocks(specs.values())
    for me in specs:
        held = next(held for g in new if (held := g.layers_of(me)) is not None)
        units = specs[me].units_when_holding(held.num_layers)
        spare = float_units(me, old, new, piece_blocks)
        used = sum(m.num_blocks * held_in(m.old, me) for m in plan.moves)
        after = sum(m.num_blocks * held_in(m.new, me) for m in plan.moves)
        if plan.moves:
            assert max(used, after) + spare <= units
        highest = max(used, after)
        for move, first, end in plan.pieces:
            share = plan_exchange(move.old, move.new, me)
            used += (end - first) * sum(layers.num_layers for _, layers in share.receives)
            assert used <= highest + spare
            used -= (end - first) * sum(layers.num_layers for _, layers in share.sends)
        assert used == after


def held_in(layout: GroupLayout, me: InstanceId) -> int:
    layers = layout.layers_of(me)
    return 0 if layers is None else layers.num_layers


@given(changes(), st.integers(0, 2**16))
def test_every_instance_finds_the_same_plan(
    change: tuple[Handed, list[GroupLayout], dict],  # type: ignore[type-arg]
    seed: int,
) -> None:
    handed, new, specs = change
    plan = plan_moves(handed, new, specs)
    chance = random.Random(seed)
    shuffled = dict(chance.sample(list(specs.items()), len(specs)))
    assert plan_moves(handed, new, shuffled) == plan
    covered(handed, new, plan)


def covered(handed: Handed, new: list[GroupLayout], plan: MovePlan) -> None:
    """Everybody has a home, and the pieces of a move are its blocks, in order."""
    everybody = {s.request_id: s for _, states in handed for s in states}
    assert plan.homes.keys() == everybody.keys()
    assert set(plan.homes.values()) <= {layout.group_id for layout in new}
    blocks: dict[RequestId, int] = {}
    for move, first, end in plan.pieces:
        assert blocks.get(move.request_id, 0) == first < end
        blocks[move.request_id] = end
    assert blocks == {move.request_id: move.num_blocks for move in plan.moves}
    for move in plan.moves:
        assert everybody[move.request_id].num_blocks == move.num_blocks
        assert plan.homes[move.request_id] == move.new.group_id


@given(changes())
def test_who_came_first_keeps_its_kv(change: tuple[Handed, list[GroupLayout], dict]) -> None:  # type: ignore[type-arg]
    handed, new, specs = change
    kept = {move.request_id for move in plan_moves(handed, new, specs).moves}
    for _, states in handed:
        with_kv = sorted((s for s in states if s.num_blocks), key=lambda s: (s.arrival_s,))
        fates = [s.request_id in kept for s in with_kv]
        assert fates == sorted(fates, reverse=True)
