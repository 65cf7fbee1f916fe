"""Which waiting requests change groups: those that start at once elsewhere.

A waiting request has no KV, so it is cheap to move. In blocks, per group:

    spare    = capacity - demand - headroom, of a group where nobody waits and all that was sent is
               reported; 0 of others
    queues   if demand > capacity or more than one request waits

A group that queues gives its oldest waiting requests, as many of their mean size as the spare
memory of others takes: all of them where memory holds them up, and half of them where compute
does, because there the source works its queue off by itself. A group takes no more at once than it
computes until its next report: what waits longer waits better where it has not yet been decided. A
request moves only to where it need not wait, and what waits nowhere is not moved, so moves come to
an end.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad
from kunserve.policy.drop.monitor import free_blocks

STEPS_AHEAD = 2
"""Steps whose prompts a group is given at once: it computes them until its next report."""
HEADROOM = 0.05
"""Share of its capacity that a group keeps for the growth of what runs there."""
MAX_RECALLED = 256
"""Requests that are taken back after one look."""


class Recall(NamedTuple):
    """Take back a group's oldest waiting requests."""

    group_id: GroupId
    num_requests: int
    num_blocks: int
    """About what they need."""


def plan_recalls(
    sources: Iterable[GroupLoad], targets: Iterable[GroupLoad], step_tokens: int
) -> tuple[Recall, ...]:
    """Called after every report; O(groups) but for sorting them.

    ``sources`` may give and ``targets`` may take: a group can be both, and is one of them at most.
    ``step_tokens`` are computed in one step.
    """
    spare = sorted(blocks for group in targets if (blocks := _spare_blocks(group)) > 0)
    queueing = sorted(
        (group for group in sources if _queues(group)),
        key=lambda group: (-_queued_blocks(group) / group.capacity_blocks, group.group_id),
    )
    recalls = []
    left = MAX_RECALLED
    for group in queueing:
        if not spare or left == 0:
            break
        most = min(left, group.num_waiting if _is_memory_bound(group) else group.num_waiting // 2)
        size = max(1, -(-_queued_blocks(group) // group.num_waiting))
        tokens = max(1, group.report.waiting_tokens // group.report.num_waiting)
        num = _fit(spare, size, most, max(1, STEPS_AHEAD * step_tokens // tokens))
        if num:
            recalls.append(Recall(group.group_id, num, num * size))
            left -= num
    return tuple(recalls)


def may_leave(group: GroupLoad, saved_tokens: int) -> bool:
    """Whether a waiting request may go although the group saves it so many tokens.

    It may if that is no more than what is computed before it, or if it waits for memory.
    """
    return saved_tokens <= group.report.waiting_tokens or _is_memory_bound(group)


def spare_blocks(groups: Iterable[GroupLoad], request_blocks: int) -> int:
    """Memory in which requests of a size start at once, all groups together."""
    size = max(1, request_blocks)
    return sum(max(0, _spare_blocks(group)) // size * size for group in groups)


def _queued_blocks(group: GroupLoad) -> int:
    return max(0, group.report.waiting_blocks - group.returning_blocks)


def _queues(group: GroupLoad) -> bool:
    if not group.is_reported or group.num_waiting == 0:
        return False
    return group.num_waiting > 1 or _is_memory_bound(group)


def _is_memory_bound(group: GroupLoad) -> bool:
    """Whether the head of the queue waits for memory, as the leader sees it."""
    report = group.report
    return report.head_of_line_blocks > free_blocks(report)


def _spare_blocks(group: GroupLoad) -> int:
    report = group.report
    if not group.is_reported or report.num_waiting or group.num_unreported:
        return 0
    capacity_blocks = min(report.capacity_blocks, group.capacity_blocks)
    return capacity_blocks - group.demand_blocks - int(HEADROOM * capacity_blocks)


def _fit(spare: list[int], size: int, most: int, most_each: int) -> int:
    """How many requests of a size fit the spare memory of groups, which rises in the list.

    A group that takes any takes no more, and is taken out of the list.
    """
    num = 0
    while num < most and spare and spare[-1] >= size:
        num += min(most - num, most_each, spare.pop() // size)
    return num
