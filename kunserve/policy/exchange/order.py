"""Whose KV goes where when a group changes (paper section 4.2).

A request's KV lies by its group's old layout and must lie by the new one before the request can
run: A's requests need their upper layers' KV on B, B's their lower layers' on A. Bulk moves in
pieces that take about as long as one pipeline stage, request by request, and each request resumes
as soon as its own KV is complete.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout, LayerRange


@dataclass(frozen=True, slots=True)
class ExchangeShare:
    """One instance's part in moving one request's KV. In layer order."""

    keep: LayerRange
    """Layers whose KV is on this instance before and after; may be empty."""
    receives: tuple[tuple[InstanceId, LayerRange], ...]
    """(source, layers)"""
    sends: tuple[tuple[InstanceId, LayerRange], ...]
    """(destination, layers)"""


def plan_exchange(old: GroupLayout, new: GroupLayout, me: InstanceId) -> ExchangeShare:
    """What ``me`` does for a request that leaves ``old`` for ``new``.

    With ``held_old(i)``, ``held_new(i)`` the layers of i in the two layouts, i sends to j
    ``held_old(i) & held_new(j)``. Both cover every layer once, so each layer of ``new`` is
    either kept or received once.
    """
    mine_old, mine_new = old.layers_of(me), new.layers_of(me)
    keep = LayerRange(0, 0)
    receives: list[tuple[InstanceId, LayerRange]] = []
    sends: list[tuple[InstanceId, LayerRange]] = []
    if mine_new is not None:
        for src, layers in old.stages:
            shared = layers.intersect(mine_new)
            if shared.num_layers > 0 and src == me:
                keep = shared
            elif shared.num_layers > 0:
                receives.append((src, shared))
    if mine_old is not None:
        for dst, layers in new.stages:
            shared = layers.intersect(mine_old)
            if shared.num_layers > 0 and dst != me:
                sends.append((dst, shared))
    return ExchangeShare(keep, tuple(receives), tuple(sends))


def receivers(old: GroupLayout, new: GroupLayout) -> tuple[InstanceId, ...]:
    """Members of ``new`` that lack some of the KV: all must have it before the request runs."""
    lacking = []
    for member, layers in new.stages:
        held = old.layers_of(member)
        if held is None or not held.covers(layers):
            lacking.append(member)
    return tuple(lacking)


def cut_pieces(num_blocks: int, max_blocks_per_piece: int) -> tuple[tuple[int, int], ...]:
    """Cut blocks [0, num_blocks) into the fewest pieces [first, end), sizes differing by 1 at most.

    Even pieces rather than full ones and a rest: every piece costs one round trip.
    """
    assert max_blocks_per_piece > 0, max_blocks_per_piece
    if num_blocks <= 0:
        return ()
    count = -(-num_blocks // max_blocks_per_piece)
    cuts = [num_blocks * k // count for k in range(count + 1)]
    return tuple(itertools.pairwise(cuts))


class Movable(Protocol):
    """A request whose KV has to move."""

    @property
    def num_blocks(self) -> int:
        """Blocks of its KV."""
        ...


MovableT = TypeVar("MovableT", bound=Movable)


def order_moves(moves: Iterable[MovableT]) -> list[MovableT]:
    """The order in which requests' KV moves: the shortest first.

    The k-th request resumes when the first k have arrived, so the mean stall is least when the
    short ones go first (Smith's rule). The longest stall is the whole exchange in any order, and
    the set is finite, so nobody starves. Ties keep the order given, which is the queue's: all
    members find the same order by themselves, and a request's pieces on different members end at
    about the same time.
    """
    return sorted(moves, key=lambda move: move.num_blocks)
