"""Layer splits and drop plans against brute force and against what they promise."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.capacity import group_capacity_blocks
from kunserve.policy.drop.layer_split import Member, split_layers
from kunserve.policy.exchange.moves import find_obstacle
from tests.specs import instance_spec
from tests.unit.policy.drop.plans import planned


def make_spec(
    instance: int, num_layers: int, kv_units: int, granule_bytes: int = 16
) -> InstanceSpec:
    return instance_spec(
        instance, num_layers, kv_units, unit_bytes=8, layer_bytes=96, granule_bytes=granule_bytes
    )


def cut_randomly(draw: st.DrawFn, num_layers: int, num_stages: int) -> list[LayerRange]:
    cuts = draw(
        st.lists(
            st.integers(1, num_layers - 1),
            min_size=num_stages - 1,
            max_size=num_stages - 1,
            unique=True,
        )
        if num_stages > 1
        else st.just([])
    )
    return [LayerRange(a, b) for a, b in itertools.pairwise([0, *sorted(cuts), num_layers])]


@st.composite
def old_groups(draw: st.DrawFn) -> tuple[int, list[Member]]:
    """Members of one to three groups that hold a whole model each, cut anyhow."""
    num_layers = draw(st.integers(2, 7))
    members: list[Member] = []
    for size in draw(st.sampled_from([(1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1)])):
        for held in cut_randomly(draw, num_layers, min(size, num_layers)):
            spec = make_spec(len(members), num_layers, draw(st.integers(0, 60)))
            members.append(Member(spec.instance_id, held, spec))
    return num_layers, members


@st.composite
def any_windows(draw: st.DrawFn) -> tuple[int, list[Member]]:
    """Members that hold anything at all."""
    num_layers = draw(st.integers(1, 6))
    members = []
    budgets = draw(st.sampled_from([st.just(30), st.integers(0, 60)]))
    for index in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, num_layers - 1))
        held = LayerRange(first, draw(st.integers(first + 1, num_layers)))
        spec = make_spec(index, num_layers, draw(budgets))
        members.append(Member(spec.instance_id, held, spec))
    return num_layers, members


Aims = tuple[int, int, int]


def aims(
    cut: list[tuple[Member, LayerRange]], num_layers: int, prefer: str, head_cost: int
) -> Aims:
    """The three aims of ``split_layers``, all to be made small."""
    cost = max(
        layers.num_layers + (head_cost if layers.end == num_layers else 0) for _, layers in cut
    )
    capacity = min(m.spec.blocks_when_holding(layers.num_layers) for m, layers in cut)
    squares = sum(layers.num_layers**2 for _, layers in cut)
    return (cost, -capacity, squares) if prefer == "balance" else (-capacity, cost, squares)


def best_by_trial(
    members: list[Member], num_layers: int, prefer: str, head_cost: int
) -> Aims | None:
    best: Aims | None = None
    for order in itertools.permutations(members):
        for inner in itertools.combinations(range(1, num_layers), len(members) - 1):
            ranges = [LayerRange(a, b) for a, b in itertools.pairwise([0, *inner, num_layers])]
            cut = list(zip(order, ranges, strict=True))
            if all(member.held.covers(layers) for member, layers in cut):
                found = aims(cut, num_layers, prefer, head_cost)
                best = found if best is None else min(best, found)
    return best


@given(
    st.one_of(old_groups(), any_windows()),
    st.sampled_from(["balance", "capacity"]),
    st.integers(0, 3),
)
def test_split_is_the_best_there_is(case, prefer, head_cost):
    num_layers, members = case
    split = split_layers(members, num_layers, prefer=prefer, head_cost_layers=head_cost)
    best = best_by_trial(members, num_layers, prefer, head_cost)
    if split is None:
        assert best is None
        return
    by_id = {m.instance_id: m for m in members}
    GroupLayout(GroupId(0), split).check(num_layers)
    assert len(split) == len(members)
    cut = [(by_id[stage.instance_id], stage.layers) for stage in split]
    assert all(member.held.covers(layers) for member, layers in cut), "a parameter would move"
    assert aims(cut, num_layers, prefer, head_cost) == best


@given(st.integers(2, 48), st.integers(1, 8), st.integers(1, 8), st.data())
def test_merging_two_even_pipelines_is_even(num_layers, one, other, data):
    """However two evenly cut groups of up to eight stages merge, no stage is longer than need be.

    The least possible is not always ceil(L / n), since nobody may take a layer it lacks.
    """
    members = []
    for size in (one, other):
        size = min(size, num_layers)
        cuts = [num_layers * k // size for k in range(size + 1)]
        for a, b in itertools.pairwise(cuts):
            spec = make_spec(len(members), num_layers, data.draw(st.integers(20, 40)))
            members.append(Member(spec.instance_id, LayerRange(a, b), spec))
    split = split_layers(members, num_layers)
    if split is None:
        return
    GroupLayout(GroupId(0), split).check(num_layers)
    held = {m.instance_id: m.held for m in members}
    assert all(held[i].covers(layers) for i, layers in split)
    longest = max(layers.num_layers for _, layers in split)
    assert longest <= -(-num_layers // max(one, other))


@st.composite
def clusters(
    draw: st.DrawFn, granule_bytes: int = 16
) -> tuple[int, list[GroupLayout], dict[InstanceId, InstanceSpec]]:
    num_layers = draw(st.integers(2, 12))
    budgets = draw(st.sampled_from([st.just(120), st.sampled_from([60, 200]), st.integers(0, 400)]))
    specs: dict[InstanceId, InstanceSpec] = {}
    layouts = []
    sizes = st.sampled_from(draw(st.sampled_from([(1,), (2,), (1, 2, 4)])))
    for group in range(draw(st.integers(1, 9))):
        stages = []
        num_ranks = draw(sizes)
        for layers in cut_randomly(draw, num_layers, min(num_layers, draw(st.integers(1, 3)))):
            instance = InstanceId(len(specs))
            one = make_spec(instance, num_layers, draw(budgets), granule_bytes)
            specs[instance] = replace(one, tensor_parallel_size=num_ranks)
            stages.append(Stage(instance, layers))
        layouts.append(GroupLayout(GroupId(group), tuple(stages)))
    return num_layers, layouts, specs


@given(clusters(), st.integers(0, 400), st.integers(2, 8) | st.none(), st.data())
def test_a_drop_plan_keeps_its_promises(cluster, required, max_size, data):
    num_layers, layouts, specs = cluster
    ids = [layout.group_id for layout in layouts]
    untouchable = data.draw(st.sets(st.sampled_from(ids)))
    pressed = data.draw(st.sets(st.sampled_from(ids)))
    plan = planned(
        layouts,
        specs,
        required,
        pressed=pressed,
        untouchable=untouchable,
        max_group_size=max_size,
    )
    assert plan.enough == (plan.gain_blocks >= required)
    assert [merge.new.group_id for merge in plan.merges] == list(range(100, 100 + len(plan.merges)))
    named = [layout for merge in plan.merges for layout in merge.old]
    assert len(named) == len({layout.group_id for layout in named})
    assert all(layout in layouts and layout.group_id not in untouchable for layout in named)
    for merge in plan.merges:
        merge.new.check(num_layers)
        assert len(merge.old) >= 2
        old_members = [m for layout in merge.old for m in layout.members]
        assert sorted(merge.new.members) == sorted(old_members)
        assert max_size is None or len(old_members) <= max_size
        held = {s.instance_id: s.layers for layout in merge.old for s in layout.stages}
        assert all(held[i].covers(layers) for i, layers in merge.new.stages)
        before = sum(group_capacity_blocks(layout, specs) for layout in merge.old)
        assert merge.gain_blocks == group_capacity_blocks(merge.new, specs) - before > 0
        freed_units = sum(
            specs[i].units_when_holding(layers.num_layers)
            - specs[i].units_when_holding(held[i].num_layers)
            for i, layers in merge.new.stages
        )
        assert merge.freed_bytes == freed_units * 8
        chosen = {member: specs[member] for member in merge.new.members}
        assert len({one.tensor_parallel_size for one in chosen.values()}) == 1
        obstacle = find_obstacle(merge.new.members, merge.old, (merge.new,), chosen)
        assert obstacle is None, "its members would refuse it"


@given(clusters(), st.integers(1, 400))
def test_a_drop_plan_exceeds_the_need_by_one_merge_at_most(cluster, required):
    """Merges come one by one in an order that does not depend on how much is required."""
    _, layouts, specs = cluster
    steps = [0]
    while True:
        plan = planned(layouts, specs, steps[-1] + 1)
        assert sum(len(merge.old) - 1 for merge in plan.merges) <= len(steps)
        if not plan.enough:
            break
        steps.append(plan.gain_blocks)
    needed = next((gain for gain in steps if gain >= required), None)
    plan = planned(layouts, specs, required)
    assert plan.enough == (needed is not None)
    assert plan.gain_blocks == (steps[-1] if needed is None else needed)


@given(clusters(granule_bytes=1), st.integers(1, 400))
def test_the_most_that_a_drop_can_give_is_found(cluster, required):
    """Not enough is said only when no two groups of the plan could still merge with a gain, by
    an even split that their members would accept.

    Granules of a byte: otherwise what a split frees depends a little on the members' order.
    """
    num_layers, layouts, specs = cluster
    plan = planned(layouts, specs, required)
    if plan.enough:
        return
    merged = {layout.group_id for merge in plan.merges for layout in merge.old}
    final = [(merge.new, merge.old) for merge in plan.merges]
    final += [(layout, (layout,)) for layout in layouts if layout.group_id not in merged]
    held = {s.instance_id: s.layers for layout in layouts for s in layout.stages}
    for (one, before), (other, beside) in itertools.combinations(final, 2):
        members = [Member(i, held[i], specs[i]) for i in (*one.members, *other.members)]
        split = split_layers(members, num_layers)
        if split is not None:
            new = GroupLayout(GroupId(99), split)
            chosen = {member.instance_id: member.spec for member in members}
            if find_obstacle(new.members, (*before, *beside), (new,), chosen) is None:
                old = group_capacity_blocks(one, specs) + group_capacity_blocks(other, specs)
                assert group_capacity_blocks(new, specs) <= old


@given(st.integers(1, 30), st.integers(1, 2000), st.integers(1, 300), st.data())
def test_promised_units_are_freed_wherever_the_layers_lie(
    num_layers, layer_bytes, granule_bytes, data
):
    """Counts the granules that no byte of the layers held lies in, one by one."""
    first = data.draw(st.integers(0, num_layers - 1))
    end = data.draw(st.integers(first + 1, num_layers))
    spec = instance_spec(
        0, num_layers, 100, unit_bytes=8, layer_bytes=layer_bytes, granule_bytes=granule_bytes
    )
    weights_bytes = num_layers * layer_bytes
    freed = sum(
        begin + granule_bytes <= first * layer_bytes or begin >= end * layer_bytes
        for begin in range(0, weights_bytes, granule_bytes)
    )
    backed = spec.backed_units(LayerRange(first, end))
    assert backed == 100 + freed * granule_bytes // 8
    assert spec.units_when_holding(end - first) <= backed
