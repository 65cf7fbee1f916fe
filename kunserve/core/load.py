"""A group's load: what its leader reports, and what the controller knows besides."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from kunserve.core.ids import GroupId

STEP_TOKEN_BOUNDS = (1, *(2**power for power in range(3, 15)))
"""Upper bounds of the classes in which steps are counted by their tokens; one more has no bound."""
PAUSE_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)
"""The same of the classes in which pauses are counted by their length."""
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
"""The same of requests, by how often they were preempted. These and the next are vLLM's."""
_OF_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
RESIDENCY_BOUNDS_S = (*_OF_SECONDS, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)
"""The same of blocks in the prefix cache."""


@dataclass(slots=True)
class LeaderTotals:
    """What an instance has done as a leader of groups, one after the other, since it started.

    Only who counts changes one (``SchedulerTotals``); what is told is a copy. A new counter is a
    field here, added to where it is counted.
    """

    num_preemptions: int = 0
    lost_tokens: int = 0
    """Tokens of KV thrown away by preemptions."""
    prompt_tokens: int = 0
    """Prompt tokens computed (recomputation included)."""
    generation_tokens: int = 0
    steps: tuple[int, ...] = ()
    """Steps by their tokens (``STEP_TOKEN_BOUNDS``); empty before the first."""
    swapped_out_blocks: int = 0
    """KV copied to host memory, in blocks of all layers; as is the next."""
    swapped_back_blocks: int = 0
    pauses: tuple[int, ...] = ()
    """Stays in host memory by their length (``PAUSE_BOUNDS_S``); empty before the first."""
    paused_s: float = 0.0
    """Of all of them together."""
    prefix_queried_tokens: int = 0
    """Prompt tokens that were looked for in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Of those, the ones whose KV was there."""
    num_drafts: int = 0
    """Times that guesses of a request were checked."""
    num_draft_tokens: int = 0
    """Guesses that were checked."""
    num_accepted_tokens: int = 0
    """Guesses that were right, as were all before them."""
    preemptions: tuple[int, ...] = ()
    """Requests that ended by themselves, by their preemptions (``PREEMPTION_BOUNDS``)."""
    ended_preemptions: int = 0
    """Of all of them together."""
    block_lives: tuple[int, ...] = ()
    """Blocks that left the prefix cache, by the time since they were filled
    (``RESIDENCY_BOUNDS_S``); the same since their last use; and blocks that were shared again, by
    the time between."""
    block_lived_s: float = 0.0
    block_idles: tuple[int, ...] = ()
    block_idle_s: float = 0.0
    reuse_gaps: tuple[int, ...] = ()
    reuse_gap_s: float = 0.0

    def __add__(self, other: "LeaderTotals") -> "LeaderTotals":
        return LeaderTotals(
            *[_sum(getattr(self, name), getattr(other, name)) for name in _COUNTERS]
        )

    def since(self, before: "LeaderTotals") -> "LeaderTotals":
        """What was added; nothing is ever taken away."""
        return LeaderTotals(
            *[_growth(getattr(self, name), getattr(before, name)) for name in _COUNTERS]
        )


_COUNTERS = tuple(field.name for field in fields(LeaderTotals))


def one_more(
    counts: tuple[int, ...], bounds: Sequence[float], value: float, num: int = 1
) -> tuple[int, ...]:
    """The counts with a value in its class, ``num`` times."""
    grown = list(counts) or [0] * (len(bounds) + 1)
    grown[bisect_left(bounds, value)] += num
    return tuple(grown)


def _sum(one: Any, other: Any) -> Any:
    """Of two numbers, or of each class of two counts."""
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
    return one + other


def _growth(now: Any, before: Any) -> Any:
    if isinstance(now, tuple):
        more = tuple(max(0, a - b) for a, b in zip_longest(now, before, fillvalue=0))
        return more if any(more) else ()
    return max(type(now)(), now - before)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A leader's account of its group, sent about ten times a second and on sharp change.

    The defaults are those of a group that has not reported yet.
    """

    group_id: GroupId
    sequence_number: int = 0
    """Counts this leader's reports from 1, so that an old one is not taken for news."""
    num_received: int = 0
    """Requests the leader has accepted so far: what was sent after it is not in this report."""
    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    """Blocks of requests, and of prefixes that an exchange brings until it is over."""
    capacity_blocks: int = 0
    growth_blocks: int = 0
    """Blocks that the running requests are still expected to need."""
    head_of_line_blocks: int = 0
    """Blocks that the first waiting request needs, beside those that it shares with others."""
    waiting_blocks: int = 0
    """The same of all waiting requests."""
    waiting_tokens: int = 0
    """Tokens of all waiting requests that are to be computed: the prefix cache has the others."""
    num_stalled: int = 0
    """Requests that wait for their KV in an exchange."""
    stuck_s: float = 0.0
    """Seconds since the last completed step while there was work; 0 when idle."""
    largest_request_blocks: int = 0
    """Blocks the largest live request may come to need: some pool must hold it after a restore."""
    largest_expected_blocks: int = 0
    """Blocks the largest live request is expected to need: how unevenly they part at most."""
    num_away: int = 0
    """Requests whose KV is in host memory now, or on its way there or back."""
    cached_blocks: int = 0
    """Blocks that only the prefix cache holds: they are free as soon as someone needs them."""
    taken_blocks: int | None = None
    """Blocks that requests have grown by, less those of preempted ones. None where tokens tell: KV
    of every layer is kept whole."""
    totals: LeaderTotals = field(default_factory=LeaderTotals)
    """The leader's counters, which survive its groups."""

    @property
    def demand_blocks(self) -> int:
        """Running demand with growth, plus the queue's head (Llumnix's virtual usage)."""
        return self.used_blocks + self.growth_blocks + self.head_of_line_blocks

    def of_live(self, num_live: int) -> "LoadReport":
        """The same report told of ``num_live`` requests: those it does not know of wait."""
        num_stalled = min(self.num_stalled, num_live)
        num_running = min(self.num_running, num_live - num_stalled)
        num_waiting = num_live - num_stalled - num_running
        return replace(
            self, num_stalled=num_stalled, num_running=num_running, num_waiting=num_waiting
        )


def inherited(
    group_id: GroupId, capacity_blocks: int, old: Iterable[LoadReport], part: int, whole: int
) -> LoadReport:
    """What is known of a group before its leader reports: its part of the old groups' loads.

    Only what has KV: waiting requests are sent anew. ``part`` of ``whole`` requests are its.
    """
    old = tuple(old)

    def share(total: int) -> int:
        return total * part // whole if whole else 0

    return LoadReport(
        group_id,
        capacity_blocks=capacity_blocks,
        num_running=share(sum(report.num_running + report.num_stalled for report in old)),
        used_blocks=share(sum(report.used_blocks for report in old)),
        growth_blocks=share(sum(report.growth_blocks for report in old)),
        largest_request_blocks=max((report.largest_request_blocks for report in old), default=0),
        largest_expected_blocks=max((report.largest_expected_blocks for report in old), default=0),
    )


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """One group's last report, and what was sent to its leader since."""

    report: LoadReport
    capacity_blocks: int
    """KV blocks of the group. The report may tell of less while a transition narrows them."""
    num_instances: int = 1
    undropped_blocks: int = 0
    """Capacity of its members if each held the whole model."""
    num_unreported: int = 0
    """Requests sent that the report does not know of (``LoadReport.num_received``)."""
    unreported_blocks: int = 0
    """KV blocks that those need."""
    num_returning: int = 0
    """Waiting requests in the report that were taken back since, or are about to be."""
    returning_blocks: int = 0
    """KV blocks that those need, about."""
    backlog_blocks: int = 0
    """The group's share of what waits for any group."""
    num_backlog: int = 0
    """Its share of the requests that do."""
    prompt_tokens_per_s: float = 0.0
    """Lately computed; 0 when unknown."""
    formed_s: float | None = None
    """When the transition that made the group was over; None if there was none."""
    in_transition: bool = False
    is_restoring: bool = False
    """In a restore that can still be called off: the report tells of the memory it leaves."""

    def in_cluster(
        self,
        backlog_blocks: int,
        num_backlog: int,
        formed_s: float | None,
        in_transition: bool,
        is_restoring: bool,
    ) -> "GroupLoad":
        """The same with what its cluster adds: ``dataclasses.replace`` takes five times as long,
        and a large cluster does it for every group at every look.
        """
        return GroupLoad(
            self.report,
            self.capacity_blocks,
            self.num_instances,
            self.undropped_blocks,
            self.num_unreported,
            self.unreported_blocks,
            self.num_returning,
            self.returning_blocks,
            backlog_blocks,
            num_backlog,
            self.prompt_tokens_per_s,
            formed_s,
            in_transition,
            is_restoring,
        )

    @property
    def group_id(self) -> GroupId:
        """The group."""
        return self.report.group_id

    @property
    def is_reported(self) -> bool:
        """Whether the leader has said anything yet."""
        return self.report.sequence_number > 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait there and are not about to leave."""
        return max(0, self.report.num_waiting - self.num_returning)

    @property
    def demand_blocks(self) -> int:
        """Running demand with growth, the queue's head, and what is on its way."""
        demand = self.report.demand_blocks + self.unreported_blocks
        if self.num_returning and self.num_waiting == 0:
            demand -= self.report.head_of_line_blocks
        return demand

    @property
    def queue_blocks(self) -> int:
        """What requests need that wait, its share of the backlog and what is sent included."""
        waiting = max(0, self.report.waiting_blocks - self.returning_blocks)
        return waiting + self.backlog_blocks + self.unreported_blocks

    @property
    def need_blocks(self) -> int:
        """Demand with the whole queue: the paper's memory demand of all queued requests."""
        return self.report.used_blocks + self.report.growth_blocks + self.queue_blocks
