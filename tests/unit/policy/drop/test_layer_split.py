from collections.abc import Sequence

from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.policy.drop.layer_split import Member, split_layers
from tests.specs import instance_spec


def member(instance: int, first: int, end: int, num_layers: int, kv_units: int = 1000) -> Member:
    spec = instance_spec(instance, num_layers, kv_units, layer_bytes=100)
    return Member(InstanceId(instance), LayerRange(first, end), spec)


def split(members: Sequence[Member], num_layers: int, **aims: object) -> dict[int, tuple[int, int]]:
    stages = split_layers(members, num_layers, **aims)  # type: ignore[arg-type]
    assert stages is not None
    return {int(i): tuple(layers) for i, layers in stages}


def test_a_pipeline_and_a_whole_instance():
    """The example of the design: nobody needs a layer that it does not hold."""
    members = [member(1, 0, 24, 48), member(2, 24, 48, 48), member(3, 0, 48, 48)]
    assert split(members, 48) == {1: (0, 16), 3: (16, 32), 2: (32, 48)}


def test_two_whole_instances_of_an_odd_model():
    assert split([member(1, 0, 7, 7), member(2, 0, 7, 7)], 7) in (
        {1: (0, 3), 2: (3, 7)},
        {1: (0, 4), 2: (4, 7)},
    )


def test_two_pairs_interleave():
    members = [member(k, 15 * (k % 2), 15 * (k % 2) + 15, 30) for k in range(4)]
    found = split(members, 30)
    assert {end - first for first, end in found.values()} == {7, 8}
    assert {found[0][1], found[2][1]} >= {15}


def test_the_scarcer_instance_takes_fewer_of_an_odd_model():
    members = [member(1, 0, 7, 7, kv_units=100), member(2, 0, 7, 7, kv_units=1000)]
    assert split(members, 7) == {1: (0, 3), 2: (3, 7)}


def test_capacity_first_gives_a_scarce_instance_few_layers():
    members = [member(1, 0, 8, 8, kv_units=0), member(2, 0, 8, 8, kv_units=200)]
    assert split(members, 8) == {1: (0, 4), 2: (4, 8)}
    found = split(members, 8, prefer="capacity")
    assert found[1][1] - found[1][0] == 2


def test_the_output_head_makes_the_last_stage_shorter():
    members = [member(1, 0, 30, 30), member(2, 0, 30, 30)]
    assert split(members, 30, head_cost_layers=8) == {1: (0, 19), 2: (19, 30)}


def test_a_head_of_one_layer_moves_the_shorter_stage_to_the_end_and_takes_no_memory():
    for count in (2, 3, 4, 7):
        members = [member(k, 0, 30, 30) for k in range(count)]
        without, found = split(members, 30), split(members, 30, head_cost_layers=1)
        sizes = [end - first for first, end in sorted(found.values())]
        assert max(sizes) == max(end - first for first, end in without.values())
        assert sizes[-1] == min(sizes)


def test_uneven_pipelines_keep_within_what_they_hold():
    members = [
        member(1, 0, 10, 12),
        member(2, 10, 12, 12),
        member(3, 0, 2, 12),
        member(4, 2, 12, 12),
    ]
    found = split(members, 12)
    assert found == {3: (0, 2), 1: (2, 6), 4: (6, 10), 2: (10, 12)}


def test_more_members_than_layers_cannot_share():
    assert split_layers([member(k, 0, 2, 2) for k in range(3)], 2) is None
    assert split_layers([], 2) is None


def test_two_members_with_the_same_single_layer_cannot_share():
    members = [member(1, 0, 1, 4), member(2, 1, 4, 4), member(3, 0, 1, 4), member(4, 1, 4, 4)]
    assert split_layers(members, 4) is None


def test_sixteen_unequal_members_are_no_trouble():
    members = [member(k, 0, 80, 80, kv_units=900 + 13 * k) for k in range(16)]
    assert {end - first for first, end in split(members, 80).values()} == {5}
