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
from kunserve.policy.dispatch.affinity import NOTHING_SAVED, Saved, is_near, per_instance

Rank: TypeAlias = tuple[bool, int, float, GroupId]
"""Of a group for a request; the least is the best."""


def choose_group(
    groups: Iterable[GroupLoad], request_blocks: int, saved: Saved = NOTHING_SAVED
) -> GroupId | None:
    """The group where the request starts soonest; None if no group can ever hold it.

    With ``load = (demand + unreported + request) / capacity`` a group is *open* when load <= 1
    and at most one request waits: there the request starts at once. Among open groups the least
    load wins. Where none is open the request joins a queue, and then the head of the queue says
    nothing: the least ``(demand - head + whole queue + unreported + request) / capacity`` wins.
    Ties go to the lower group id.

    ``saved`` counts for the chosen group and those that are near it (`affinity`). A group with
    something saved is open with more waiting too, if what waits behind the head is no more than
    what is saved. Among open groups the one that saves most wins, before load; where none is open,
    what is saved is taken from the need.
    """
    fitting = [group for group in groups if request_blocks <= group.capacity_blocks]
    if not fitting:
        return None
    best_id = min([_rank(group, request_blocks) for group in fitting])[-1]
    if saved:
        chosen = next(group for group in fitting if group.group_id == best_id)
        there = per_instance(chosen)
        near = [g for g in fitting if g.group_id in saved and is_near(per_instance(g), there)]
        chosen = min(
            (chosen, *near), key=lambda g: _rank(g, request_blocks, saved.get(g.group_id, 0))
        )
        return chosen.group_id
    return best_id


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


def _rank(group: GroupLoad, request_blocks: int, saved_blocks: int = 0) -> Rank:
    """See ``choose_group``."""
    capacity_blocks, demand_blocks = group.capacity_blocks, group.demand_blocks
    demand = demand_blocks + request_blocks
    if demand <= capacity_blocks and (
        group.num_waiting <= 1
        or (saved_blocks and group.need_blocks - demand_blocks < saved_blocks)
    ):
        return False, -saved_blocks, demand / capacity_blocks, group.group_id
    need = group.need_blocks + request_blocks - saved_blocks
    return True, 0, need / capacity_blocks, group.group_id


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
