"""What a drop would have done: the load of groups as if they had merged.

Used by the overload policy ``observe``, which drops nothing. The monitor judges the imagined load
as it judges a real one, so ``observe`` drops and restores in thought when ``drop`` would in deed.

Requests that memory holds up are admitted in thought while the merged group has room:

    room     = capacity of the merge - what its scheduler keeps back - used blocks of its parts
    admitted = waiting requests * min(1, room / blocks that they need)

Each of them would run and waits instead, so a second of it is a second of avoidable waiting.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LeaderTotals, LoadReport
from kunserve.policy.drop.monitor import free_blocks


class ImaginedLoad(NamedTuple):
    """A merged group that does not exist."""

    load: GroupLoad
    num_admitted: int
    """Requests that wait, and would run."""


def imagine_merged(
    group_id: GroupId, capacity_blocks: int, formed_s: float, parts: Sequence[GroupLoad]
) -> ImaginedLoad:
    """The load of ``parts`` in one pipeline with ``capacity_blocks``, which formed at ``formed_s``.

    Preemptions of the parts are left out: with room for all that wait there would be none.
    """
    reports = [part.report for part in parts]
    held_up = [part for part in parts if part.report.head_of_line_blocks > free_blocks(part.report)]
    for_compute = [part for part in parts if part not in held_up]
    num_held_up = sum(part.num_waiting + part.num_backlog for part in held_up)
    needed = sum(_queue_blocks(part) + part.backlog_blocks for part in held_up)
    used = sum(report.used_blocks for report in reports)
    whole = LoadReport(group_id, used_blocks=used, capacity_blocks=capacity_blocks)
    admitted_blocks = min(needed, max(0, free_blocks(whole)))
    num_admitted = num_held_up * admitted_blocks // needed if needed else 0
    num_waiting = num_held_up - num_admitted + sum(part.num_waiting for part in for_compute)
    waiting_blocks = needed - admitted_blocks + sum(map(_queue_blocks, for_compute))
    done = sum((report.totals for report in reports), LeaderTotals())
    report = replace(
        whole,
        sequence_number=sum(report.sequence_number for report in reports),
        num_running=sum(report.num_running for report in reports) + num_admitted,
        num_waiting=num_waiting,
        used_blocks=used + admitted_blocks,
        growth_blocks=sum(report.growth_blocks for report in reports),
        head_of_line_blocks=-(-waiting_blocks // num_waiting) if num_waiting else 0,
        waiting_blocks=waiting_blocks,
        totals=replace(done, num_preemptions=0),
    )
    load = GroupLoad(
        report=report,
        capacity_blocks=capacity_blocks,
        num_instances=sum(part.num_instances for part in parts),
        undropped_blocks=sum(part.undropped_blocks for part in parts),
        num_unreported=sum(part.num_unreported for part in parts),
        unreported_blocks=sum(part.unreported_blocks for part in parts),
        backlog_blocks=sum(part.backlog_blocks for part in for_compute),
        num_backlog=sum(part.num_backlog for part in for_compute),
        formed_s=formed_s,
    )
    return ImaginedLoad(load, num_admitted)


def _queue_blocks(part: GroupLoad) -> int:
    """Blocks that the leader's own queue needs."""
    return max(0, part.report.waiting_blocks - part.returning_blocks)
