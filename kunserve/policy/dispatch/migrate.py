"""Which groups exchange a running request, and which one: Llumnix's live migration.

A group that leaves gives its requests away whatever its load (``choose_refuge``). Of the others,
with a group's *virtual usage* (what runs, the head of the queue, what is on its way), in blocks,

    spare    = capacity - virtual usage
    freeness = spare * block_size / running requests

is about how many decode steps the group can still make before memory runs out (OSDI '24, section
4.4.3). The least free group gives a request to the freest one. Two thresholds apart from each
other, and a limit on the size of what moves, keep requests from going back and forth:

    source:  freeness < LOW_STEPS           target:  freeness > HIGH_STEPS, and nobody waits there
    size:    spare(target) - size >= spare(source) + size,  and then  freeness(target) >= LOW_STEPS
"""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from kunserve.core.ids import GroupId, RequestId
from kunserve.core.load import GroupLoad

LOW_STEPS = 16.0
"""A group that can make fewer decode steps than this gives requests away."""
HIGH_STEPS = 64.0
"""A group that can make more takes requests."""
REFUGE_HEADROOM = 0.05
"""Share of its capacity that a group keeps free of requests whose group leaves."""


class Pair(NamedTuple):
    """Move one running request from a group to another."""

    source: GroupId
    target: GroupId
    max_blocks: int
    """The largest request that may move."""


class Refuge(NamedTuple):
    """Where a request of a group that leaves may go on."""

    group_id: GroupId
    max_blocks: int
    """The largest request that it takes."""


class Movable(NamedTuple):
    """A request that decodes, so that all its KV but the newest block is final."""

    request_id: RequestId
    num_blocks: int


def plan_migrations(
    groups: Iterable[GroupLoad], block_size: int, apart: Set[frozenset[GroupId]] = frozenset()
) -> tuple[Pair, ...]:
    """The least free with the freest, the second least with the second freest, and so on.

    Called with the groups of one instance that have no part in a migration or transition already.
    Those ``apart`` do not reach each other. Ties go to the lower group id.
    """
    ranked = sorted((_freeness_steps(group, block_size), group.group_id, group) for group in groups)
    sources = [group for steps, _, group in ranked if steps < LOW_STEPS]
    targets = [
        group
        for steps, _, group in reversed(ranked)
        if steps > HIGH_STEPS and group.report.num_waiting == 0
    ]
    pairs = []
    for source in sources:
        reached = (t for t in targets if frozenset((source.group_id, t.group_id)) not in apart)
        target = next(reached, None)
        if target is None:
            continue
        targets.remove(target)
        most = _largest_move(source, target, block_size)
        if source.report.num_running and most > 0:
            pairs.append(Pair(source.group_id, target.group_id, most))
    return tuple(pairs)


def choose_refuge(groups: Iterable[GroupLoad], block_size: int, max_num_seqs: int) -> Refuge | None:
    """Where the next request of a group that leaves goes: to the most room. None if none has any.

    Called with the groups of one instance that stay and have no part in a migration or transition.
    Where somebody waits, or as many run as may, there is no room. Ties go to the lower group id.
    """
    ranked = [
        (_spare_blocks(group) - _kept_blocks(group, block_size), -group.group_id)
        for group in groups
        if group.report.num_waiting == 0
        and group.report.num_running + group.num_unreported < max_num_seqs
    ]
    most, group_id = max(ranked, default=(0, 0))
    return Refuge(GroupId(-group_id), most) if most > 0 else None


def _kept_blocks(group: GroupLoad, block_size: int) -> int:
    """What a refuge keeps for the growth of what runs there, and for whom it admits."""
    growth = -(-int(LOW_STEPS) * (group.report.num_running + 1) // block_size)
    return max(growth, int(REFUGE_HEADROOM * group.capacity_blocks))


def _spare_blocks(group: GroupLoad) -> int:
    """Blocks that virtual usage leaves; negative when the queue's head does not fit."""
    virtual = group.report.used_blocks + group.report.head_of_line_blocks
    return group.capacity_blocks - virtual - group.unreported_blocks


def _freeness_steps(group: GroupLoad, block_size: int) -> float:
    """Decode steps that fit the spare memory, about."""
    return _spare_blocks(group) * block_size / max(1, group.report.num_running)


def _largest_move(source: GroupLoad, target: GroupLoad, block_size: int) -> int:
    evened = (_spare_blocks(target) - _spare_blocks(source)) // 2
    kept = -(-LOW_STEPS * (target.report.num_running + 1) // block_size)
    return min(evened, _spare_blocks(target) - int(kept))


def choose_request(
    movable: Sequence[Movable], missing_blocks: int, max_blocks: int
) -> RequestId | None:
    """Which request leaves; None if none is small enough.

    ``missing_blocks`` is what the head of the queue lacks: the smallest request that makes room
    for it goes. Where none does, or nobody waits, the largest evens the loads with fewest moves.
    Ties go to the first.
    """
    fitting = [request for request in movable if request.num_blocks <= max_blocks]
    if not fitting:
        return None
    enough = [request for request in fitting if request.num_blocks >= missing_blocks > 0]
    if enough:
        return min(enough, key=lambda request: request.num_blocks).request_id
    return max(fitting, key=lambda request: request.num_blocks).request_id
