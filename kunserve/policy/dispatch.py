"""Which group a request is sent to, and when it is refused (paper section 3; Llumnix).

Load, as Llumnix has it, is ``(running demand + head-of-line queue) / capacity``. Reports are
about 100 ms old, so what was sent since is added: a burst inside one report period spreads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import GroupId
from kunserve.core.snapshots import LoadReport


class GroupView(NamedTuple):
    """A group as the dispatcher sees it: its last report, and what was sent after it."""

    group_id: GroupId
    capacity_blocks: int
    demand_blocks: int
    """Reported: running with growth, plus the head of the queue."""
    head_of_line_blocks: int
    """Reported; part of ``demand_blocks``."""
    queued_blocks: int
    """Reported: all that wait, the head included."""
    num_queued: int
    """Reported."""
    unreported_blocks: int = 0
    """Of requests sent that the report does not know of (``LoadReport.num_received``)."""

    @classmethod
    def of(cls, report: LoadReport, unreported_blocks: int) -> "GroupView":
        """The view that a report and the caller's account of what it sent give."""
        return cls(
            group_id=report.group_id,
            capacity_blocks=report.capacity_blocks,
            demand_blocks=report.demand_blocks,
            head_of_line_blocks=report.head_of_line_blocks,
            queued_blocks=report.waiting_blocks,
            num_queued=report.num_waiting,
            unreported_blocks=unreported_blocks,
        )


def choose_group(groups: Sequence[GroupView], request_blocks: int) -> GroupId | None:
    """The group where the request starts soonest; None if no group can ever hold it.

    With ``load = (demand + unreported + request) / capacity`` a group is *open* when load <= 1
    and at most one request waits: there the request starts at once. Among open groups the least
    load wins. Where none is open the request joins a queue, and then the head of the queue says
    nothing: the least ``(demand - head + whole queue + unreported + request) / capacity`` wins.
    Ties go to the lower group id.
    """
    best: tuple[bool, float, GroupId] | None = None
    for group in groups:
        if request_blocks > group.capacity_blocks:
            continue
        rank = _rank(group, request_blocks)
        if best is None or rank < best:
            best = rank
    return None if best is None else best[2]


def _rank(group: GroupView, request_blocks: int) -> tuple[bool, float, GroupId]:
    demand = group.demand_blocks + group.unreported_blocks + request_blocks
    queues = demand > group.capacity_blocks or group.num_queued > 1
    if queues:
        demand += group.queued_blocks - group.head_of_line_blocks
    return queues, demand / group.capacity_blocks, group.group_id


class QueueView(NamedTuple):
    """What waits in the whole cluster."""

    num_reqs: int
    num_tokens: int
    """Prompt tokens not yet computed."""
    prompt_tokens_per_s: float
    """Lately computed; 0 when unknown."""
    drop_may_help: bool
    """A drop is under way, or would start now: it is tried before anything is shed."""


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse the request with 503."""

    reason: str
    retry_after_s: int
    """When the queue will have shrunk, as far as can be told."""


ShedDecision: TypeAlias = Shed | None

MAX_RETRY_AFTER_S = 60


def should_shed(
    queue: QueueView,
    request_tokens: int,
    *,
    max_num_queued_reqs: int | None,
    max_num_queued_tokens: int | None,
) -> ShedDecision:
    """Whether the queue limits refuse a request; None admits it.

    A request never waits behind an empty queue, so one longer than the token limit is admitted
    when nothing waits.
    """
    if queue.drop_may_help or queue.num_reqs == 0:
        return None
    if max_num_queued_reqs is not None and queue.num_reqs >= max_num_queued_reqs:
        reason = f"{queue.num_reqs} requests are waiting, the limit is {max_num_queued_reqs}"
        return Shed(reason, _retry_after_s(queue))
    if max_num_queued_tokens is not None:
        tokens = queue.num_tokens + request_tokens
        if tokens > max_num_queued_tokens:
            reason = f"{tokens} tokens would be waiting, the limit is {max_num_queued_tokens}"
            return Shed(reason, _retry_after_s(queue))
    return None


def _retry_after_s(queue: QueueView) -> int:
    """Time to compute the queued tokens, in whole seconds from 1 to ``MAX_RETRY_AFTER_S``."""
    if queue.prompt_tokens_per_s <= 0.0:
        return 1
    return max(1, min(MAX_RETRY_AFTER_S, round(queue.num_tokens / queue.prompt_tokens_per_s)))
