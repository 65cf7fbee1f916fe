"""A scheduler's counters and the load report made from them."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import islice
from typing import NamedTuple

from kunserve.control.group.ledger import BlockCounts
from kunserve.control.group.prefix_cache import PrefixCache
from kunserve.control.group.queue import WaitingQueue
from kunserve.control.group.sequence import Progress, Sequence
from kunserve.core.ids import GroupId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.load import (
    PAUSE_BOUNDS_S,
    PREEMPTION_BOUNDS,
    STEP_TOKEN_BOUNDS,
    LeaderTotals,
    LoadReport,
    one_more,
)

PRIOR_OUTPUT_TOKENS = 256.0
"""Expected output before anything has finished: about the mean of published chat traces."""
MAX_LOOKED_UP = 64
"""Waiting sequences, from the head on, whose beginnings are looked for in the prefix cache."""
OUTPUT_WEIGHT = 0.05
"""Of each finished output in the moving mean: it remembers about the last twenty."""


@dataclass(slots=True)
class SchedulerTotals(LeaderTotals):
    """What a leader has done so far. Handed on to its next scheduler, it goes on counting."""

    mean_output_tokens: float = PRIOR_OUTPUT_TOKENS
    """Exponentially weighted over finished requests."""

    def so_far(self) -> LeaderTotals:
        """What has been counted until now."""
        return LeaderTotals(*[getattr(self, field.name) for field in fields(LeaderTotals)])

    def note_first_admission(self, seq: Sequence) -> None:
        """A sequence has memory for the first time, and what the prefix cache had of it.

        A prompt whose scores are wanted is not looked for: all of it is computed.
        """
        if seq.beginning.is_looked_up and not seq.num_to_score:
            self.prefix_queried_tokens += seq.num_prompt
            self.prefix_hit_tokens += seq.num_cached

    def note_step(self, prompt_tokens: int, generation_tokens: int) -> None:
        """A step is complete. One that only freed blocks is not counted."""
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += generation_tokens
        num_tokens = prompt_tokens + generation_tokens
        if num_tokens:
            self.steps = one_more(self.steps, STEP_TOKEN_BOUNDS, num_tokens)

    def note_guesses(self, num_guesses: int, num_right: int) -> None:
        """A step has checked so many guesses of one request."""
        self.num_drafts += 1
        self.num_draft_tokens += num_guesses
        self.num_accepted_tokens += num_right

    def note_preemption(self, lost_tokens: int) -> None:
        """A request lost its place among the running, and so much KV."""
        self.num_preemptions += 1
        self.lost_tokens += lost_tokens

    def note_pause(self, pause_s: float) -> None:
        """A request runs again that was in host memory so long."""
        self.paused_s += pause_s
        self.pauses = one_more(self.pauses, PAUSE_BOUNDS_S, pause_s)

    def note_finished(self, seq: Sequence) -> None:
        """A request ended by itself."""
        self.mean_output_tokens += OUTPUT_WEIGHT * (seq.num_output - self.mean_output_tokens)
        num = seq.num_preemptions
        self.preemptions = one_more(self.preemptions, PREEMPTION_BOUNDS, num)
        self.ended_preemptions += num


class ProgressClock:
    """Since when a group has had work without completing a step."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def look(self, has_work: bool, now_s: float) -> None:
        """Called often."""
        if not has_work:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def completed(self, has_work: bool, now_s: float) -> None:
        """A step is complete."""
        self._since_s = now_s if has_work else None

    def stuck_s(self, now_s: float) -> float:
        """How long no step has been completed although there was work."""
        return 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)


def expected_tokens(seq: Sequence, mean_output_tokens: int) -> int:
    """KV tokens that a sequence is expected to need in the end.

    It generates like the mean of those that finished, one more than now at least, and never
    past its own limit.
    """
    total = max(seq.num_prompt + mean_output_tokens, seq.num_tokens + 1)
    return min(total, seq.max_total_tokens) - 1


class _Counts(NamedTuple):
    """What the sequences of a group add up to."""

    running: int
    stalled: int
    away: int
    growth_blocks: int
    largest_tokens: int
    largest_expected_tokens: int


def _count(
    live: Iterable[Sequence], ledger: BlockCounts, mean_output_tokens: int, blocks: KvBlocks
) -> _Counts:
    num_running = num_stalled = num_away = growth = largest = largest_expected = 0
    waits, stalls, away = Progress.WAITING, Progress.STALLED, Progress.SWAPPED
    blocks_of, holding = ledger.blocks_of, blocks.holding
    for seq in live:
        if seq.max_total_tokens > largest + 1:
            largest = seq.max_stored_tokens
        expected = expected_tokens(seq, mean_output_tokens)
        if expected > largest_expected:
            largest_expected = expected
        state = seq.state
        if state is waits:
            continue
        if state is stalls:
            num_stalled += 1
        else:
            num_running += 1
            num_away += state is away
        more = holding(expected) - blocks_of(seq.request_id)
        if more > 0:
            growth += more
    return _Counts(num_running, num_stalled, num_away, growth, largest, largest_expected)


class _Wanted(NamedTuple):
    """What waiting sequences want that the prefix cache does not have."""

    tokens: int
    blocks: int
    head_blocks: int


def _measure_waiting(waiting: WaitingQueue, cache: PrefixCache, sizes: KvBlocks) -> _Wanted:
    head = waiting.head
    head_blocks = 0 if head is None else sizes.holding(head.num_tokens)
    tokens, blocks = waiting.num_tokens, waiting.num_blocks
    for seq in islice(waiting, MAX_LOOKED_UP):
        num_fewer = cache.look_up(seq)
        tokens -= seq.beginning.found_tokens
        blocks -= num_fewer
        head_blocks -= num_fewer if seq is head else 0
    return _Wanted(tokens, blocks, head_blocks)


def measure_load(
    group_id: GroupId,
    sequence_number: int,
    num_received: int,
    live: Iterable[Sequence],
    waiting: WaitingQueue,
    ledger: BlockCounts,
    totals: SchedulerTotals,
    blocks: KvBlocks,
    stuck_s: float,
    cache: PrefixCache,
) -> LoadReport:
    """The leader's account of its group.

    ``num_running`` leaves stalled requests out and counts swapped ones: their KV will want its
    memory back.
    """
    counts = _count(live, ledger, int(totals.mean_output_tokens), blocks)
    wanted = _measure_waiting(waiting, cache, blocks)
    return LoadReport(
        group_id=group_id,
        sequence_number=sequence_number,
        num_received=num_received,
        num_running=counts.running,
        num_waiting=len(waiting),
        used_blocks=ledger.used_blocks,
        capacity_blocks=ledger.capacity_blocks,
        growth_blocks=counts.growth_blocks,
        head_of_line_blocks=wanted.head_blocks,
        waiting_blocks=wanted.blocks,
        waiting_tokens=wanted.tokens,
        num_stalled=counts.stalled,
        stuck_s=stuck_s,
        largest_request_blocks=blocks.holding(counts.largest_tokens),
        largest_expected_blocks=blocks.holding(counts.largest_expected_tokens),
        num_away=counts.away,
        cached_blocks=ledger.cached_blocks,
        taken_blocks=None if blocks.ring is None else ledger.taken_blocks,
        totals=totals.so_far(),
    )
