"""The steps of a group that are on their way through its stages."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kunserve.control.arrays import Int32Array
from kunserve.control.group.guessing import NO_GUESSES, Guesses, keep_right
from kunserve.control.group.load import SchedulerTotals
from kunserve.control.group.prefix_cache import NO_ORDERS, CacheOrders
from kunserve.control.group.sequence import Progress, Sequence
from kunserve.core.ids import GroupId, RequestId, StepId
from kunserve.core.step import (
    BlockRun,
    Chunk,
    SampledToken,
    ScoreRun,
    SequenceStart,
    StepPlan,
    StepResult,
)


@dataclass(slots=True)
class PlannedStep:
    """A plan whose result has not come yet."""

    sequences: list[Sequence]
    """One per chunk."""
    sampling: list[Sequence | None]
    """One per chunk that samples; None where its tokens are to be ignored."""
    num_prompt_tokens: int
    scored: list[Sequence]
    """One per run of scores to come."""
    guesses: Guesses
    """What is computed behind known tokens. It counts as computed only when it is confirmed."""

    def owned(
        self, tokens: tuple[SampledToken, ...], totals: SchedulerTotals
    ) -> Iterator[tuple[SampledToken, Sequence | None]]:
        """The step's tokens that count, and whose each is; None where it is to be ignored."""
        if self.guesses:
            return keep_right(tokens, self.sampling, self.guesses, totals)
        return zip(tokens, self.sampling, strict=True)


class InFlight:
    """Owner of what was planned and not completed; makes the plans.

    Sequences advance when they are planned, not when results come: stages run plans in order, so
    the chunks of one prompt may follow each other closely. Only a sampled token is waited for.
    """

    def __init__(self, group_id: GroupId) -> None:
        self._group_id = group_id
        self._steps: dict[StepId, PlannedStep] = {}
        self._early: dict[StepId, StepResult] = {}
        """Results that came before those of earlier steps."""
        self._num_steps = 0
        self._ahead: tuple[StepPlan, PlannedStep] | None = None
        """A step behind all others, whose inputs are what the oldest samples, and known tokens."""
        self.version = 0
        """Counts completed steps."""
        self.filled: list[Sequence] = []
        """Those whose blocks the last plan fills, and want names."""

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        released: Iterable[RequestId],
        chosen: Collection[tuple[Sequence, int]],
        swapped_out: tuple[BlockRun, ...] = (),
        swapped_in: tuple[BlockRun, ...] = (),
        orders: CacheOrders = NO_ORDERS,
        guesses: Guesses = NO_GUESSES,
    ) -> StepPlan:
        """Plan so many tokens of each chosen sequence, and advance it. Who has guesses samples."""
        step = self._num_steps
        self._num_steps += 1
        planned = PlannedStep([seq for seq, _ in chosen], [], 0, [], guesses)
        chunks: list[Chunk] = []
        started: list[SequenceStart] = []
        scored: list[ScoreRun] = []
        self.filled = []
        for seq, num_tokens in chosen:
            start = seq.num_computed - seq.is_late
            end = start + num_tokens
            if num_tokens > 1 or start < seq.num_prompt:
                planned.num_prompt_tokens += num_tokens
            if not seq.is_started:
                started.append(seq.start())
            num_sampled = 0
            if seq.advance(step, end):
                num_sampled = 1
                planned.sampling.append(seq)
            if start < seq.num_to_score:
                first, last = max(start, seq.num_scored), min(end, seq.num_to_score)
                if first < last:
                    scored.append(ScoreRun(seq.request_id, first, last))
                    planned.scored.append(seq)
            if end >= seq.beginning.names_at:
                self.filled.append(seq)
            if guesses and (guessed := guesses.get(seq.request_id)):
                num_tokens += len(guessed)
                num_sampled += len(guessed)
            chunks.append(Chunk(seq.request_id, start, num_tokens, num_sampled))
        step_id = StepId(step)
        self._steps[step_id] = planned
        return StepPlan(
            self._group_id,
            step_id,
            tuple(released),
            tuple(started),
            tuple(chunks),
            swapped_out,
            swapped_in,
            tuple(scored),
            *orders,
        )

    def add_ahead(self, chosen: Collection[tuple[Sequence, int]], orders: CacheOrders) -> StepPlan:
        """As ``add``, behind all steps; they advance when the oldest ends.

        Who awaits a token of that one computes it. Who has ended by then computes for nothing, in a
        place that nobody reads.
        """
        assert self._steps and self._ahead is None, (self._steps, self._ahead)
        step_id = StepId(self._num_steps)
        self._num_steps += 1
        planned = PlannedStep([seq for seq, _ in chosen], [], 0, [], NO_GUESSES)
        chunks: list[Chunk] = []
        started: list[SequenceStart] = []
        for seq, num_tokens in chosen:
            start = seq.num_computed
            samples = start + num_tokens == seq.num_tokens + seq.is_awaiting
            chunks.append(Chunk(seq.request_id, start, num_tokens, int(samples)))
            if num_tokens > 1 or start < seq.num_prompt:
                planned.num_prompt_tokens += num_tokens
            if not seq.is_started:
                started.append(seq.start())
        plan = StepPlan(
            self._group_id, step_id, (), tuple(started), tuple(chunks), (), (), (), *orders
        )
        self._ahead = plan, planned
        return plan

    def feeds(self) -> Int32Array:
        """Which of the tokens that the oldest step samples is each input of the one ahead; -1 where
        it is a known token.
        """
        assert self._ahead is not None
        plan, planned = self._ahead
        before = self._steps[self.oldest]
        places = {seq: place for place, seq in enumerate(before.sampling)}
        feeds: list[int] = []
        for seq, chunk in zip(planned.sequences, plan.chunks, strict=True):
            feeds.extend([places[seq] if seq.is_awaiting else -1] * chunk.num_tokens)
        return np.array(feeds, dtype=np.int32)

    def begin_ahead(self) -> None:
        """The oldest step is complete: the one ahead is like any other from now on."""
        if self._ahead is None:
            return
        (plan, planned), self._ahead = self._ahead, None
        self._steps[plan.step_id], self.filled = planned, []
        for seq, chunk in zip(planned.sequences, plan.chunks, strict=True):
            is_wanted = seq.state is Progress.RUNNING
            if chunk.num_sampled:
                planned.sampling.append(seq if is_wanted else None)
            if not is_wanted:
                continue
            samples = seq.advance(plan.step_id, chunk.start + chunk.num_tokens)
            assert samples == chunk.num_sampled, seq
            if seq.num_computed >= seq.beginning.names_at:
                self.filled.append(seq)

    @property
    def is_ahead(self) -> bool:
        """Whether a step is planned whose tokens the oldest one is to give."""
        return self._ahead is not None

    @property
    def oldest(self) -> StepId:
        """The step whose result is awaited first."""
        return next(iter(self._steps))

    def complete(self, result: StepResult) -> Iterator[tuple[StepResult, PlannedStep]]:
        """Take a result; the steps that are over with it, in their order.

        A step that samples nothing may overtake one that samples, because the output head is then
        computed by all stages. Scores of a prompt must come in order, so its result waits here.
        Each step is forgotten when its turn comes: what the one before it ended is ignored in it.
        """
        assert result.step_id in self._steps, result.step_id
        self._early[result.step_id] = result
        while self._steps and (oldest := next(iter(self._steps))) in self._early:
            self.version += 1
            yield self._early.pop(oldest), self._steps.pop(oldest)

    def ignore(self, seq: Sequence) -> None:
        """The sequence is preempted or gone: a token of it still to come is not wanted."""
        if seq.is_awaiting:
            seq.ignore_token()
            for planned in self._steps.values():
                planned.sampling = [None if s is seq else s for s in planned.sampling]

    def token_ids_of(self, plan: StepPlan) -> Int32Array:
        """The plan's input tokens, chunk after chunk; 0 for those that are not known yet."""
        tokens: list[int] = []
        ahead = self._ahead
        if ahead is not None and ahead[0].step_id == plan.step_id:
            step = ahead[1]
        else:
            step = self._steps[plan.step_id]
        for (request_id, start, num_tokens, _), seq in zip(
            plan.chunks, step.sequences, strict=True
        ):
            if num_tokens == 1 and start >= seq.num_prompt:
                # Of a step that was formed ahead, and of who has gone since, it never came.
                tokens.append(next(iter(seq.output_token_ids[start - seq.num_prompt :]), 0))
                continue
            guessed = step.guesses.get(request_id, ())
            tokens.extend(seq.known_tokens(start, start + num_tokens - len(guessed)))
            tokens.extend(guessed)
        return np.array(tokens, dtype=np.int32)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that exactly the sequences that await a token have one coming."""
        assert self._early.keys() <= self._steps.keys(), "a result of no step"
        awaited = [s for p in self._steps.values() for s in p.sampling if s is not None]
        assert len(awaited) == len(set(awaited)), "a token awaited twice"
        assert set(awaited) == {seq for seq in running if seq.is_awaiting}, awaited
