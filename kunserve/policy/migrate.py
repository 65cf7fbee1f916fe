"""Which groups exchange a running request, and which one: Llumnix's live migration.

With a group's *virtual usage* (what runs, the head of the queue, what is on its way), in blocks,

    spare    = capacity - virtual usage
    freeness = spare * block_size / running requests

is about how many decode steps the group can still make before memory runs out (OSDI '24, section
4.4.3). The least free group gives a request to the freest one. Two thresholds apart from each
other, and a limit on the size of what moves, keep requests from going back and forth:

    source:  freeness < LOW_STEPS           target:  freeness > HIGH_STEPS, and nobody waits there
    size:    spare(target) - size >= spare(source) + size,  and then  freeness(target) >= LOW_STEPS
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kunserve.core.ids import GroupId, RequestId

LOW_STEPS = 16.0
"""A group that can make fewer decode steps than this gives requests away."""
HIGH_STEPS = 64.0
"""A group that can make more takes requests."""


class BalanceView(NamedTuple):
    """A group of one instance, by its last report and what was sent since."""

    group_id: GroupId
    capacity_blocks: int
    used_blocks: int
    head_of_line_blocks: int
    unreported_blocks: int
    num_running: int
    num_waiting: int

    @property
    def spare_blocks(self) -> int:
        """Blocks that virtual usage leaves; negative when the queue's head does not fit."""
        virtual = self.used_blocks + self.head_of_line_blocks + self.unreported_blocks
        return self.capacity_blocks - virtual

    def freeness_steps(self, block_size: int) -> float:
        """Decode steps that fit the spare memory, about."""
        return self.spare_blocks * block_size / max(1, self.num_running)


class Pair(NamedTuple):
    """Move one running request from a group to another."""

    source: GroupId
    target: GroupId
    max_blocks: int
    """The largest request that may move."""


class Movable(NamedTuple):
    """A request that decodes, so that all its KV but the newest block is final."""

    request_id: RequestId
    num_blocks: int


def plan_migrations(groups: Iterable[BalanceView], block_size: int) -> tuple[Pair, ...]:
    """The least free with the freest, the second least with the second freest, and so on.

    Called with the groups that have no part in a migration or transition already. Ties go to the
    lower group id.
    """
    ranked = sorted(groups, key=lambda group: (group.freeness_steps(block_size), group.group_id))
    sources = [group for group in ranked if group.freeness_steps(block_size) < LOW_STEPS]
    targets = [
        group
        for group in reversed(ranked)
        if group.freeness_steps(block_size) > HIGH_STEPS and group.num_waiting == 0
    ]
    pairs = []
    for source, target in zip(sources, targets, strict=False):
        most = _largest_move(source, target, block_size)
        if source.num_running and most > 0:
            pairs.append(Pair(source.group_id, target.group_id, most))
    return tuple(pairs)


def _largest_move(source: BalanceView, target: BalanceView, block_size: int) -> int:
    evened = (target.spare_blocks - source.spare_blocks) // 2
    kept = -(-LOW_STEPS * (target.num_running + 1) // block_size)
    return min(evened, target.spare_blocks - int(kept))


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
