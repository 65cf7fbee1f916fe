"""The common order of an exchange keeps every instance within its memory at every moment."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId, InstanceId, PrefixId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import PrefixPart, PrefixState, SequenceKv
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.restore import parts_of
from kunserve.policy.exchange.moves import (
    Move,
    MovePlan,
    choose_piece_blocks,
    float_units,
    plan_moves,
)
from kunserve.policy.exchange.order import plan_exchange
from kunserve_lab.world.fake_body import fake_spec

Handed = list[tuple[GroupLayout, list[SequenceKv]]]


Change = tuple[Handed, list[GroupLayout], dict[InstanceId, InstanceSpec], list[PrefixState]]


def state(
    name: str, num_blocks: int, arrival_s: float, shared: tuple[PrefixPart, ...] = ()
) -> SequenceKv:
    num_blocks += shared[-1].end_block if shared else 0
    return SequenceKv(RequestId(name), arrival_s, num_blocks, max(1, num_blocks) + 3, shared)


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """A merge of whole instances into a pipeline, or the way back, with full pools or not.

    Some requests of a group begin with its prefix, and of these some go on with a second one.
    """
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
    prefixes: list[PrefixState] = []
    for layout in old:
        parts: list[PrefixPart] = []
        left = min(specs[m].kv_units // held.num_layers for m, held in layout.stages)
        left = left * draw(st.integers(1, 4)) // 4
        states: list[SequenceKv] = []
        while left > 4 and len(parts) < 2 and chance.random() < 0.7:
            first = parts[-1].end_block if parts else 0
            end = first + chance.randint(1, left // 2)
            prefix_id = PrefixId(RequestId(f"prefix-{layout.group_id}-{first}"))
            prefixes.append(PrefixState(prefix_id, first, (b"",) * (end - first)))
            parts.append(PrefixPart(prefix_id, end))
            left -= end - first
        while left > 0 and len(states) < 30:
            blocks = chance.randint(0, min(left, chance.choice([2, 5, 40])))
            left -= max(1, blocks)
            shared = tuple(parts[: chance.randint(0, len(parts))]) if blocks else ()
            name = f"{layout.group_id}-{len(states)}"
            states.append(state(name, blocks, chance.random(), shared))
        handed.append((layout, states))
    new = [pipeline] if is_drop else list(parts_of(pipeline, GroupId(0)))
    return handed, new, specs, prefixes


@given(changes())
def test_memory_suffices_at_every_moment(change: Change) -> None:
    handed, new, specs, prefixes = change
    plan = plan_moves(handed, new, specs, prefixes)
    old = [layout for layout, _ in handed]
    piece_blocks = choose_piece_blocks(specs.values())
    for me in specs:
        held = next(held for g in new if (held := g.layers_of(me)) is not None)
        units = specs[me].units_when_holding(held.num_layers)
        spare = float_units(me, old, new, piece_blocks)
        used = sum(m.num_own * held_in(m.old, me) for m in plan.moves)
        after = sum(m.num_own * held_in(m.new, me) for m in plan.moves)
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
def test_every_instance_finds_the_same_plan(change: Change, seed: int) -> None:
    handed, new, specs, prefixes = change
    plan = plan_moves(handed, new, specs, prefixes)
    chance = random.Random(seed)
    shuffled = dict(chance.sample(list(specs.items()), len(specs)))
    assert plan_moves(handed, new, shuffled, chance.sample(prefixes, len(prefixes))) == plan
    covered(handed, new, plan)


def covered(handed: Handed, new: list[GroupLayout], plan: MovePlan) -> None:
    """Everybody has a home, and the pieces of a move are its blocks, in order."""
    everybody = {s.request_id: s for _, states in handed for s in states}
    assert plan.homes.keys() == everybody.keys()
    assert set(plan.homes.values()) <= {layout.group_id for layout in new}
    blocks: dict[RequestId, int] = {}
    for move, first, end in plan.pieces:
        assert blocks.get(move.request_id, move.first_block) == first < end
        blocks[move.request_id] = end
    assert blocks == {move.request_id: move.num_blocks for move in plan.moves if move.num_own}
    moved: dict[RequestId, Move] = {}
    for move in plan.moves:
        assert move.request_id not in moved, "it moves once"
        moved[move.request_id] = move
        if move.request_id in everybody:
            old = everybody[move.request_id]
            assert (old.num_blocks, old.first_own_block) == (move.num_blocks, move.first_block)
            assert plan.homes[move.request_id] == move.new.group_id
            end = 0
            for prefix_id, stop in plan.shared[move.request_id]:
                prefix = moved[prefix_id]
                assert prefix.new == move.new and prefix.old == move.old, "it comes before"
                assert prefix.first_block <= end < stop <= prefix.num_blocks
                end = stop
            assert end == move.first_block
    assert {one.prefix_id for one in plan.prefixes} == moved.keys() - everybody.keys()


@given(changes())
def test_who_came_first_keeps_its_kv(change: Change) -> None:
    handed, new, specs, prefixes = change
    kept = {move.request_id for move in plan_moves(handed, new, specs, prefixes).moves}
    for _, states in handed:
        with_kv = sorted((s for s in states if s.num_blocks), key=lambda s: (s.arrival_s,))
        fates = [s.request_id in kept for s in with_kv]
        assert fates == sorted(fates, reverse=True)
