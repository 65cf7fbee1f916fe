from typing import NamedTuple

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.policy.exchange.order import (
    cut_pieces,
    order_moves,
    plan_exchange,
    receivers,
)


def layout(group: int, *stages: tuple[int, int, int]) -> GroupLayout:
    return GroupLayout(
        GroupId(group), tuple(Stage(InstanceId(i), LayerRange(a, b)) for i, a, b in stages)
    )


ALONE = layout(1, (1, 0, 8))
PAIR = layout(2, (1, 0, 5), (2, 5, 8))


def test_the_papers_example():
    """A keeps layers 0-4, B keeps 5-7: A's request needs its upper layers' KV on B."""
    on_a, on_b = (
        plan_exchange(ALONE, PAIR, InstanceId(1)),
        plan_exchange(ALONE, PAIR, InstanceId(2)),
    )
    assert (on_a.keep, on_a.receives, on_a.sends) == ((0, 5), (), ((2, (5, 8)),))
    assert (on_b.keep.num_layers, on_b.receives, on_b.sends) == (0, ((1, (5, 8)),), ())
    assert receivers(ALONE, PAIR) == (2,)


def test_a_restore_brings_it_back():
    share = plan_exchange(PAIR, ALONE, InstanceId(1))
    assert (share.keep, share.receives, share.sends) == ((0, 5), ((2, (5, 8)),), ())
    assert plan_exchange(PAIR, ALONE, InstanceId(2)).sends == ((1, (5, 8)),)
    assert receivers(PAIR, ALONE) == (1,)


def test_a_third_stage_receives_from_both():
    old = layout(1, (1, 0, 24), (2, 24, 48))
    new = layout(2, (1, 0, 16), (3, 16, 32), (2, 32, 48))
    share = plan_exchange(old, new, InstanceId(3))
    assert share.receives == ((1, (16, 24)), (2, (24, 32)))
    assert receivers(old, new) == (3,)


def test_strangers_have_no_part():
    share = plan_exchange(ALONE, PAIR, InstanceId(9))
    assert (share.keep.num_layers, share.receives, share.sends) == (0, (), ())


def test_pieces_are_even():
    assert cut_pieces(0, 4) == ()
    assert cut_pieces(4, 4) == ((0, 4),)
    assert cut_pieces(9, 4) == ((0, 3), (3, 6), (6, 9))


class Move(NamedTuple):
    name: str
    num_blocks: int


def test_the_shortest_move_first_and_ties_as_they_came():
    moves = [Move("a", 9), Move("b", 2), Move("c", 5), Move("d", 2)]
    assert [move.name for move in order_moves(moves)] == ["b", "d", "c", "a"]
