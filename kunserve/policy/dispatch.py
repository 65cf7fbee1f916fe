"""Which group a request is sent to, and when it is refused (paper section 3; Llumnix).

Load, as Llumnix has it, is ``(running demand + head-of-line queue) / capacity``. Reports are
about 100 ms old, so what was sent since is added: a burst inside one report period spreads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from kunserve.core.errors import MAX_QUEUED_REQS, MAX_QUEUED_TOKENS
from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad


def choose_group(groups: Iterable[GroupLoad], request_blocks: int) -> GroupId | None:
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


def choose_empty(
    groups: Iterable[GroupLoad], request_blocks: int, num_at: Mapping[GroupId, int]
) -> GroupId | None:
    """The group with the fewest requests of those that can hold the request; None of none.

    Ties go to the higher group id: the one formed last.
    """
    ranked = [
        (num_at[group.group_id], -group.group_id)
        for group in groups
        if request_blocks <= group.capacity_blocks
    ]
    return GroupId(-min(ranked)[1]) if ranked else None


def _rank(group: GroupLoad, request_blocks: int) -> tuple[bool, float, GroupId]:
    report = group.report
    demand = group.demand_blocks + request_blocks
    queues = demand > group.capacity_blocks or group.num_waiting > 1
    if queues:
        demand = group.need_blocks + request_blocks
    return queues, demand / group.capacity_blocks, report.group_id


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse the request with 503."""

    reason: str
    retry_after_s: int
    """When the queue will have shrunk, as far as can be told."""
    limit: str
    """Which one is reached: of ``core.errors.LIMITS``."""


ShedDecision: TypeAlias = Shed | None

MAX_RETRY_AFTER_S = 60


def should_shed(
    groups: Iterable[GroupLoad],
    request_tokens: int,
    *,
    num_backlog_reqs: int = 0,
    num_backlog_tokens: int = 0,
    drop_may_help: bool,
    max_num_queued_reqs: int | None,
    max_num_queued_tokens: int | None,
) -> ShedDecision:
    """Whether the queue limits refuse a request; None admits it.

    A request never waits behind an empty queue, so one longer than the token limit is admitted
    when nothing waits. A drop that is under way (``drop_may_help``) is tried before anything is
    shed. The backlog is what no group has yet.
    """
    groups = tuple(groups)
    num_reqs = num_backlog_reqs
    num_reqs += sum(group.report.num_waiting + group.num_unreported for group in groups)
    if drop_may_help or num_reqs <= 0:
        return None
    queued_tokens = num_backlog_tokens + sum(group.report.waiting_tokens for group in groups)
    if max_num_queued_reqs is not None and num_reqs >= max_num_queued_reqs:
        reason = f"{num_reqs} requests are waiting, the limit is {max_num_queued_reqs}"
        return Shed(reason, _retry_after_s(groups, queued_tokens), MAX_QUEUED_REQS)
    if max_num_queued_tokens is not None:
        tokens = queued_tokens + request_tokens
        if tokens > max_num_queued_tokens:
            reason = f"{tokens} tokens would be waiting, the limit is {max_num_queued_tokens}"
            return Shed(reason, _retry_after_s(groups, queued_tokens), MAX_QUEUED_TOKENS)
    return None


def share_out(num_blocks: int, capacities: Sequence[int]) -> list[int]:
    """Parts of what waits for any group, by the groups' capacities. Their sum is the whole."""
    total = max(1, sum(capacities))
    bounds = [num_blocks * end // total for end in accumulate(capacities, initial=0)]
    return [end - first for first, end in pairwise(bounds)]


def _retry_after_s(groups: Iterable[GroupLoad], tokens: int) -> int:
    """Time to compute the queued tokens, in whole seconds from 1 to ``MAX_RETRY_AFTER_S``."""
    tokens_per_s = sum(group.prompt_tokens_per_s for group in groups)
    if tokens_per_s <= 0.0:
        return 1
    return max(1, min(MAX_RETRY_AFTER_S, round(tokens / tokens_per_s)))
