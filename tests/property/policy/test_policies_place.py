"""Where instances stand: the near merge first, the near give layers, one host changes nothing."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport
from kunserve.core.place import ONE_HOST, Place
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.merge_cache import MergeCache
from kunserve.policy.drop.nearness import (
    ANYWHERE,
    SAME_HOST,
    SAME_RACK,
    distance,
    exchange_s,
    reaches,
    site_of,
)
from kunserve.policy.drop.plan import DropPlan
from kunserve.policy.drop.restore import RestorePlan, choose_sources, plan_restore
from tests.specs import instance_spec
from tests.unit.policy.drop.plans import FIRST_ID, planned

NUM_LAYERS = 12
WHOLE = LayerRange(0, NUM_LAYERS)
places = st.builds(
    lambda host, gbps: Place(f"h{host}", f"r{host // 2}", gbps),
    st.integers(0, 4),
    st.sampled_from([None, 1.0, 10.0]),
)


def whole(instance: int) -> GroupLayout:
    return GroupLayout(GroupId(instance), (Stage(InstanceId(instance), WHOLE),))


def specs_at(where: list[Place], kv_units: int = 1200) -> dict[InstanceId, InstanceSpec]:
    return {
        InstanceId(i): replace(instance_spec(i, NUM_LAYERS, kv_units), place=place)
        for i, place in enumerate(where)
    }


def plan(specs: dict[InstanceId, InstanceSpec], required: int, **options: object) -> DropPlan:
    layouts = [whole(i) for i in specs]
    return planned(layouts, specs, required, **options)


def members(found: DropPlan) -> list[set[int]]:
    return [set(merge.new.members) for merge in found.merges]


def spans(found: DropPlan, specs: dict[InstanceId, InstanceSpec]) -> list[GroupLayout]:
    return [
        merge.new for merge in found.merges if site_of(merge.new.members, specs, SAME_HOST) is None
    ]


@given(st.lists(places, min_size=2, max_size=14), st.integers(0, 3000), st.floats(0.0, 0.3))
def test_no_merge_across_hosts_while_one_within_a_host_gains(where, required, deep):
    """Of groups that nobody presses: what is left on each host could not merge to any gain."""
    specs = specs_at(where)
    found = plan(specs, required, min_deep_gain=deep)
    if not spans(found, specs):
        return
    merged = {old.group_id for merge in found.merges for old in merge.old}
    left = [whole(i) for i in specs if GroupId(i) not in merged] + [m.new for m in found.merges]
    cache = MergeCache(specs, deep, 0)
    by_host: dict[object, list[GroupLayout]] = {}
    for layout in left:
        by_host.setdefault(site_of(layout.members, specs, SAME_HOST), []).append(layout)
    by_host.pop(None, None)
    for there in by_host.values():
        shapes = [cache.shape_of(layout) for layout in there]
        for index, one in enumerate(shapes):
            assert not any(cache.merge(one, other) for other in shapes[index + 1 :]), there


@given(st.lists(places, min_size=2, max_size=14), st.data())
def test_a_pressed_group_merges_within_its_host_first(where, data):
    specs = specs_at(where)
    pressed = data.draw(st.integers(0, len(where) - 1))
    found = plan(specs, 50, pressed=[GroupId(pressed)])
    here = [i for i, place in enumerate(where) if distance(place, where[pressed]) == SAME_HOST]
    rack = [i for i, place in enumerate(where) if distance(place, where[pressed]) <= SAME_RACK]
    (one,) = members(found)
    assert pressed in one
    if len(here) > 1:
        assert one <= set(here)
    elif len(rack) > 1:
        assert one <= set(rack)


@given(
    st.lists(st.integers(300, 2000), min_size=2, max_size=12),
    st.integers(0, 6000),
    st.sets(st.integers(0, 11)),
    st.integers(1, 3),
)
def test_on_one_host_nothing_is_otherwise(units, required, pressed, size):
    """Whatever the host is called, and however slow its link."""
    one = {
        InstanceId(i): replace(instance_spec(i, NUM_LAYERS, kv), place=Place("a", "b", 1e-6))
        for i, kv in enumerate(units)
    }
    none = {i: replace(spec, place=ONE_HOST) for i, spec in one.items()}
    options = {"pressed": [GroupId(i) for i in pressed if i < len(units)], "max_group_size": size}
    used = {GroupId(i): 50 for i in range(len(units))}
    assert plan(one, required, **options) == plan(
        none, required, used_blocks=used, patience_s=0.0, **options
    )


@given(st.lists(places, min_size=1, max_size=12))
def test_reaches_tell_groups_apart(where):
    specs = specs_at(where)
    layouts = [whole(i) for i in specs]
    found = reaches(layouts, specs)
    assert found[-1] == ANYWHERE and list(found) == sorted(set(found))
    for reach in found[:-1]:
        assert len({site_of(layout.members, specs, reach) for layout in layouts}) > 1


def test_two_across_hosts_when_nothing_is_left_within():
    """Two hosts of three instances: pairs within, then the deep ones, then across."""
    where = [Place(f"h{i // 3}") for i in range(6)]
    specs = specs_at(where)
    assert members(plan(specs, 150)) == [{0, 1}, {3, 4}]
    assert members(plan(specs, 250)) == [{0, 1, 2}, {3, 4}]
    across = plan(specs, 10_000)
    assert spans(across, specs) and sum(map(len, members(across))) == 6


def test_a_rack_before_another():
    where = [Place("a", "x"), Place("b", "y"), Place("c", "y")]
    assert members(plan(specs_at(where), 50)) == [{1, 2}]


def test_a_slow_exchange_is_not_begun_when_memory_is_free_before_it_ends():
    """600 units of 10 bytes cross at 1e-6 Gbit/s: each side gives half its layers' blocks."""
    where = [Place("a", "", 1e-6), Place("b", "", 1e-6)]
    specs, used = specs_at(where), {GroupId(0): 50, GroupId(1): 50}
    found = plan(specs, 50, used_blocks=used, patience_s=30.0)
    (merge,) = found.merges
    assert merge.exchange_s == exchange_s(merge.old, merge.new.stages, used, specs)
    assert merge.exchange_s == 50 * 6 * 10 * 8 / 1000.0  # 24 s, each direction by itself
    assert plan(specs, 50, used_blocks=used, patience_s=20.0).merges == ()


def test_sources_are_the_nearest_that_have_the_layers():
    """Another group's whole copy on the same host goes before the pipeline's own far member."""
    near, far = Place("a", "x"), Place("b", "x")
    specs = specs_at([near, far, near, Place("c", "y")])
    pipeline = GroupLayout(
        GroupId(9),
        (Stage(InstanceId(0), LayerRange(0, 6)), Stage(InstanceId(1), LayerRange(6, 12))),
    )
    others = {InstanceId(2): WHOLE, InstanceId(3): WHOLE}
    idle = LoadReport(GroupId(9), sequence_number=1, capacity_blocks=500)
    found = plan_restore(pipeline, specs, idle, first_id=FIRST_ID, holders=others)
    assert isinstance(found, RestorePlan)
    by_member = {m.instance_id: {s.instance_id for s in m.sources} for m in found.members}
    assert by_member == {0: {2}, 1: {0}}
    blind = {i: replace(spec, place=ONE_HOST) for i, spec in specs.items()}
    found = plan_restore(pipeline, blind, idle, first_id=FIRST_ID, holders=others)
    assert isinstance(found, RestorePlan)
    by_member = {m.instance_id: {s.instance_id for s in m.sources} for m in found.members}
    assert by_member == {0: {1}, 1: {0}}


def test_a_survivor_pulls_from_its_host():
    specs = specs_at([Place("a"), Place("b"), Place("a"), Place("b")])
    alone = GroupLayout(GroupId(9), (Stage(InstanceId(0), WHOLE),))
    held = dict.fromkeys(specs, WHOLE) | {InstanceId(0): LayerRange(0, 6)}
    (mine,) = choose_sources(alone, held, specs)
    assert [source.instance_id for source in mine.sources] == [2]
    specs[InstanceId(2)] = replace(specs[InstanceId(2)], tensor_parallel_size=2)
    (mine,) = choose_sources(alone, held, specs)
    assert {1, 3} >= {source.instance_id for source in mine.sources}, "whose layers lie alike"


@given(
    st.lists(places, min_size=2, max_size=12),
    st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
    st.integers(1, 2000),
)
def test_who_is_to_stay_apart_comes_into_no_common_group(
    where: list[Place], cuts: set[tuple[int, int]], required: int
) -> None:
    specs = specs_at(where)
    apart = [(InstanceId(a), InstanceId(b)) for a, b in cuts if a != b]
    found = plan(specs, required, apart=apart)
    for group in members(found):
        assert not any({a, b} <= group for a, b in apart), group
    assert sum(map(len, members(found))) == len(set().union(*members(found), set()))
    if not apart:
        assert found == plan(specs, required)


def test_a_cut_pair_takes_other_partners() -> None:
    specs = specs_at([Place("a")] * 2 + [Place("b")] * 2)
    assert members(plan(specs, 60)) == [{0, 1}]
    assert {0, 1} not in members(plan(specs, 60, apart=[(InstanceId(0), InstanceId(1))]))
    every = [(InstanceId(a), InstanceId(b)) for a in range(4) for b in range(a)]
    assert plan(specs, 60, apart=every).merges == () and not plan(specs, 60, apart=every).enough
