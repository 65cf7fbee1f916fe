"""How many instances a cluster orders under overload, and which one it gives back afterwards.

Orders take minutes to arrive, so what was ordered counts as if it stood:

    order = ceil(missing blocks / blocks of an instance) - ordered, up to the limit

An instance is given back when the rest would hold twice the demand, and has for a while; then
another one not before it has for as long again.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad

GIVE_BACK_BELOW = 0.5
"""Share of the remaining instances' memory under which demand must be."""
GIVE_BACK_HOLD_S = 30.0
"""How long it must be."""


class ScaleView(NamedTuple):
    """A cluster as far as its size goes."""

    num_instances: int
    """Standing, without those about to be given back."""
    num_ordered: int
    """Not there yet."""
    fewest: int
    most: int
    instance_blocks: int
    """KV memory of one of them that holds the whole model."""


def instances_to_order(view: ScaleView, missing_blocks: int) -> int:
    """Called when memory is short by ``missing_blocks``, in spite of whatever was dropped."""
    wanted = -(-missing_blocks // view.instance_blocks) - view.num_ordered
    return max(0, min(wanted, view.most - view.num_instances - view.num_ordered))


def is_oversized(view: ScaleView, need_blocks: int, num_waiting: int) -> bool:
    """Whether one instance fewer would do. ``need_blocks``: demand with the whole queue."""
    if view.num_instances <= view.fewest or num_waiting or view.num_ordered:
        return False
    rest = (view.num_instances - 1) * view.instance_blocks
    return need_blocks < GIVE_BACK_BELOW * rest


def choose_leaver(candidates: Iterable[GroupLoad]) -> GroupId | None:
    """The one whose requests end soonest: the least loaded, the youngest of equals. None of none.

    Called with the groups of one instance that may be given back.
    """
    ranked = [(group.report.used_blocks, -group.group_id, group.group_id) for group in candidates]
    return min(ranked)[2] if ranked else None
