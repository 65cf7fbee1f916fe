"""When memory is overloaded, and when the overload has faded (paper sections 4.1 and 4.4).

Per group, in blocks:

    demand   = used + growth + head of the queue + sent and not yet reported     (Llumnix's load)
    need     = used + growth + whole queue + sent and not yet reported  (what Algorithm 1 must fit)
               + its share of what waits for any group

A group is *short* when memory is what holds work up: the head of the queue does not fit beside
what is used, a request was preempted, or more is used than there is (while a restore is prepared).
Requests that wait although there is room wait for compute (``max_num_seqs``, the token budget):
a drop would only make the pipeline longer. Nor is a drop made when finishing requests free the
missing blocks before it could:

    brief:  (used + whole queue + share + unreported - capacity) / release rate < transition time

A dropped group is *relaxed* when its need has been under ``restore_below`` of what its
members hold undropped for ``restore_hold_s``. The distance between the two thresholds, the hold
and the dwell after each transition keep it from flapping.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from kunserve.core.config import OverloadConfig
from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport

RELEASE_SMOOTHING_S = 3.0
"""Time constant of the release rate: requests end in lumps."""
HEADROOM = 0.02
"""Share of a group's blocks (one at least) that its scheduler may keep back at admission."""


@dataclass(frozen=True, slots=True)
class ClusterLoadView:
    """Every group's load at one moment."""

    groups: tuple[GroupLoad, ...]
    block_size: int
    transition_s: float = 0.0
    """From a drop's decision to its commit, as measured; none was made yet when 0.

    Not to the end of its exchange: new requests run in the freed memory from the commit on.
    """


class GroupTrend(NamedTuple):
    """What is remembered of a group from one report to the next."""

    sequence_number: int
    seen_s: float
    used_blocks: int
    kept: int
    """Tokens whose KV was ever made, less those that preemptions threw away; or their blocks."""
    num_preemptions: int
    release_rate: float
    """Blocks per second that ending requests give back, smoothed."""
    preempted: bool
    """Whether the last report told of new preemptions."""
    low_since_s: float | None
    """Since when the need has been under the restore threshold."""


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The monitor's memory; a value, replaced by each observation."""

    trends: Mapping[GroupId, GroupTrend] = field(default_factory=lambda: MappingProxyType({}))


class Excuse(NamedTuple):
    """Why nothing is done about a group whose load asks for something."""

    group_id: GroupId
    cause: str
    """The same as long as the reason differs in its numbers only."""
    reason: str
    """For people."""


@dataclass(frozen=True, slots=True)
class Overloaded:
    """Memory is short: free at least this much."""

    required_blocks: int
    group_ids: tuple[GroupId, ...]
    trigger: str
    wait_s: float = math.inf
    """Until ending requests would have made room for all that wait, in the slowest group."""
    waiting_blocks: int = 0
    """Of what is required, the part of requests that wait: they may run in any group."""
    largest_waiting_blocks: int = 0
    """What the largest head of a queue needs."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """These dropped groups would fit their undropped memory again."""

    group_ids: tuple[GroupId, ...]
    trigger: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the load asks for, each group judged by itself."""

    overloaded: Overloaded | None = None
    relaxed: Relaxed | None = None
    squeezed: tuple[GroupId, ...] = ()
    """Groups that their own restore makes short of memory: it is to be called off."""
    excuses: tuple[Excuse, ...] = ()
    """Why other groups that look loaded do not count."""


def observe(
    state: MonitorState, view: ClusterLoadView, now_s: float, config: OverloadConfig
) -> tuple[MonitorState, Verdict]:
    """Called at every report (and at least every report period): what the load asks for.

    A shortage is seen with the first report that shows it. The verdict repeats while its cause
    lasts; groups in a transition, or formed less than ``dwell_s`` ago, have no say, but for those
    whose restore is being prepared: they may want it called off.
    """
    trends: dict[GroupId, GroupTrend] = {}
    short: list[tuple[GroupLoad, int, float]] = []
    relaxed: list[GroupLoad] = []
    squeezed: list[GroupId] = []
    excuses: list[Excuse] = []
    for load in view.groups:
        group_id = load.report.group_id
        trend = _follow(state.trends.get(group_id), load, now_s, view.block_size, config)
        trends[group_id] = trend
        if load.in_transition and not load.is_restoring:
            continue
        if _dwells(load, now_s, config):
            continue
        missing = _missing_blocks(load, trend)
        wait_s = _wait_for_memory_s(load, trend)
        if load.is_restoring:
            if missing > 0 and wait_s >= view.transition_s:
                squeezed.append(group_id)
        elif missing > 0:
            if wait_s < view.transition_s:
                reason = f"memory is free again in {wait_s:.2f} s"
                excuses.append(Excuse(group_id, "brief", reason))
            else:
                short.append((load, missing, wait_s))
        elif load.demand_blocks > load.report.capacity_blocks:
            reason = "demand exceeds capacity, but memory holds nothing up"
            excuses.append(Excuse(group_id, "not short", reason))
        elif load.num_instances > 1 and _low_long_enough(trend, now_s, config):
            relaxed.append(load)
    return MonitorState(MappingProxyType(trends)), Verdict(
        _overloaded(short), _relaxed(relaxed), tuple(squeezed), tuple(excuses)
    )


def _overloaded(short: list[tuple[GroupLoad, int, float]]) -> Overloaded | None:
    if not short:
        return None
    demand = sum(load.need_blocks for load, _, _ in short)
    capacity = sum(load.report.capacity_blocks for load, _, _ in short)
    return Overloaded(
        required_blocks=sum(missing for _, missing, _ in short),
        group_ids=tuple(load.group_id for load, _, _ in short),
        trigger=f"demand {demand} blocks, capacity {capacity}",
        wait_s=max(wait_s for _, _, wait_s in short),
        waiting_blocks=sum(min(missing, load.queue_blocks) for load, missing, _ in short),
        largest_waiting_blocks=max(load.report.head_of_line_blocks for load, _, _ in short),
    )


def _relaxed(relaxed: list[GroupLoad]) -> Relaxed | None:
    if not relaxed:
        return None
    demand = sum(load.need_blocks for load in relaxed)
    undropped = sum(load.undropped_blocks for load in relaxed)
    return Relaxed(
        group_ids=tuple(load.group_id for load in relaxed),
        trigger=f"demand {demand} blocks, undropped capacity {undropped}",
    )


def _dwells(load: GroupLoad, now_s: float, config: OverloadConfig) -> bool:
    return load.formed_s is not None and now_s - load.formed_s < config.dwell_s


def _low_long_enough(trend: GroupTrend, now_s: float, config: OverloadConfig) -> bool:
    return trend.low_since_s is not None and now_s - trend.low_since_s >= config.restore_hold_s


def free_blocks(report: LoadReport) -> int:
    """Blocks that the next admission may use, at least."""
    capacity = report.capacity_blocks
    return capacity - headroom_blocks(capacity) - report.used_blocks


def headroom_blocks(capacity_blocks: int) -> int:
    """Blocks of a group that its scheduler may keep back at admission."""
    return max(1, int(HEADROOM * capacity_blocks))


def _missing_blocks(load: GroupLoad, trend: GroupTrend) -> int:
    """Blocks that the group lacks; 0 if memory holds nothing up."""
    report = load.report
    capacity = report.capacity_blocks
    blocked = load.num_waiting > 0 and report.head_of_line_blocks > free_blocks(report)
    # What was preempted waits: if all that waits is taken elsewhere, nothing is short here.
    preempted = trend.preempted and (load.num_waiting > 0 or load.num_returning == 0)
    if not (blocked or preempted or report.used_blocks > capacity):
        return 0
    return max(1, load.need_blocks - capacity)


def _wait_for_memory_s(load: GroupLoad, trend: GroupTrend) -> float:
    """How long until ending requests have made room for all that wait, at the present rate."""
    report = load.report
    queue = report.used_blocks + report.waiting_blocks
    queue += load.unreported_blocks + load.backlog_blocks
    shortage = max(1.0, queue - report.capacity_blocks)
    return shortage / trend.release_rate if trend.release_rate > 0.0 else math.inf


def _follow(
    trend: GroupTrend | None,
    load: GroupLoad,
    now_s: float,
    block_size: int,
    config: OverloadConfig,
) -> GroupTrend:
    """The trend after a report; unchanged, but for how long demand is low, by an old report.

    What ending requests released is what was filled and is not in use any more:
    ``d(prompt + generated - lost tokens) / block_size - d(used)``, or where tokens do not tell
    blocks ``d(taken) - d(used)``.
    """
    report = load.report
    low = load.need_blocks < config.restore_below * load.undropped_blocks
    if trend is not None and report.sequence_number <= trend.sequence_number:
        return trend._replace(low_since_s=trend.low_since_s if low else None)
    done = report.totals
    kept = done.prompt_tokens + done.generation_tokens - done.lost_tokens
    if report.taken_blocks is not None:
        kept, block_size = report.taken_blocks, 1
    if trend is None:
        release_rate = 0.0
        low_since_s = now_s if low else None
        preempted = False
    else:
        elapsed_s = max(1e-3, now_s - trend.seen_s)
        used_rate = (report.used_blocks - trend.used_blocks) / elapsed_s
        filled_rate = (kept - trend.kept) / block_size / elapsed_s
        weight = 1.0 - math.exp(-elapsed_s / RELEASE_SMOOTHING_S)
        released = max(0.0, filled_rate - used_rate)
        release_rate = trend.release_rate + weight * (released - trend.release_rate)
        preempted = done.num_preemptions > trend.num_preemptions
        low_since_s = (now_s if trend.low_since_s is None else trend.low_since_s) if low else None
    return GroupTrend(
        report.sequence_number,
        now_s,
        report.used_blocks,
        kept,
        done.num_preemptions,
        release_rate,
        preempted,
        low_since_s,
    )
