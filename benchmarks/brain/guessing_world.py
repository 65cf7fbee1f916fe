"""A simulated world whose schedulers guess: what lookups find, and which guesses a step checks."""

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks.brain.row_times import RowTimes
from kunserve.control.group.guessing import Guesses
from kunserve.control.group.scheduler import Scheduler
from kunserve.control.group.sequence import Sequence as Sequence_
from kunserve.control.instance.work import Work
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve.policy.batch.batch_form import FormationView, Microbatch, OngoingFormation
from kunserve.policy.batch.cost import BatchTotals, head_cost, layers_cost
from kunserve.policy.batch.speculation import (
    FIRST_RATE,
    LEAST_ROW_SHARE,
    MIN_GAIN,
    MOST_DELAY,
    MOST_ROWS,
    learned_rate,
)
from kunserve_lab.compare.simulated.prompts import ANSWER
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.instance import SimInstance

MOST_GUESSES = 3
"""Of a request in a step."""


class Text(NamedTuple):
    """What lookups give in one kind of text."""

    coverage: float
    """Share of steps at which something is found."""
    rate: float
    """Share of guesses that are right where the one before was."""


class Limits(NamedTuple):
    """What bounds a rule's guesses, beside a step's tokens and today's margins."""

    most_rows: int = MOST_ROWS
    """Decodes and guesses of a step."""
    least_row_share: float = LEAST_ROW_SHARE
    """Of a step of the decodes alone, what each guess takes at least."""


@dataclass(frozen=True, slots=True)
class Guessed:
    """A system with guesses."""

    system: str
    texts: tuple[Text, ...]
    is_priced: bool = True
    reads_once: bool = True
    """False: each row reads the request's KV, as GPUs' decodes have it."""
    limits: Limits | None = None
    """Chosen by the fitted cost model, within these."""


@dataclass(slots=True)
class Lookup:
    """Stands for one request's text."""

    text: Text
    chance: random.Random
    num_tokens: int
    """Of the request, when something was last looked up."""
    found: tuple[int, ...] = ()
    rate: float = FIRST_RATE

    def find(self, num_tokens: int) -> tuple[int, ...]:
        """Learn from what came since; what may come next. Every answer is `ANSWER` over and over,
        so any other token is a wrong guess.
        """
        came = [ANSWER] * (num_tokens - self.num_tokens)
        self.rate = learned_rate(self.rate, self.found, came)
        self.num_tokens = num_tokens
        self.found = ()
        if self.chance.random() < self.text.coverage:
            right = (self.chance.random() < self.text.rate for _ in range(MOST_GUESSES))
            self.found = tuple(ANSWER if one else ANSWER + 1 for one in right)
        return self.found


class Candidate(NamedTuple):
    """A guess that a step could check."""

    value: float
    """Tokens that it gives, probably, weighed."""
    decode: int
    """Whose, by its place in the step."""


class PricedGuessing:
    """In the place of a scheduler's `Guessing`."""

    def __init__(self, world: "GuessingWorld", scheduler: Scheduler) -> None:
        self._world = world
        self._scheduler = scheduler
        self._block_size = world.profile.spec.block_size

    def choose(self, chosen: list[tuple[Sequence_, int]]) -> Guesses:
        """Guesses for the step of these chunks."""
        decodes = [s for s, _ in chosen if s.num_left == 1 and s.num_computed >= s.num_prompt]
        if not decodes:
            return {}
        found = [self._find(seq) for seq in decodes]
        weights = self._weights(decodes)
        ranked: list[Candidate] = []
        for index, (seq, guesses) in enumerate(zip(decodes, found, strict=True)):
            rate = self._world.lookups[seq.request_id].rate
            ranked += (
                Candidate(weights[index] * rate ** (number + 1), index)
                for number in range(len(guesses))
            )
        ranked.sort(key=lambda one: -one.value)
        counts = [0] * len(decodes)
        for one in ranked[: self._num_chosen(ranked, sum(weights), chosen, decodes)]:
            counts[one.decode] += 1
        return {
            seq.request_id: guesses[:count]
            for seq, guesses, count in zip(decodes, found, counts, strict=True)
            if count
        }

    def _find(self, seq: Sequence_) -> tuple[int, ...]:
        lookup = self._world.lookup_of(seq.request_id, seq.num_tokens)
        most = min(seq.max_total_tokens - seq.num_tokens - 1, -seq.num_tokens % self._block_size)
        return lookup.find(seq.num_tokens)[: max(0, most)]

    def _weights(self, decodes: list[Sequence_]) -> list[float]:
        """What a token of each counts."""
        price = self._world.price(self._scheduler, len(decodes))
        mean = sum(seq.num_computed for seq in decodes) / len(decodes)
        return [1.0 + price * seq.num_computed / mean for seq in decodes]

    def _num_chosen(
        self,
        ranked: list[Candidate],
        weight: float,
        chosen: list[tuple[Sequence_, int]],
        decodes: list[Sequence_],
    ) -> int:
        """How many of the ranked ones give most per time."""
        times = self._world.times
        num_tokens = sum(count for _, count in chosen)
        plain = [Chunk(s.request_id, s.num_computed, 1, 1) for s in decodes]
        plain_s = times.stage_s(plain, self._world.profile.model.num_layers, True)
        best, num_best = weight / plain_s, 0
        context = 0
        for number, one in enumerate(ranked, 1):
            weight += one.value
            context += decodes[one.decode].num_computed
            per_s = weight / (plain_s + times.more_s(num_tokens, len(decodes), number, context))
            if per_s > best:
                best, num_best = per_s, number
        return num_best


class RuleGuessing(PricedGuessing):
    """By predicted time, as a scheduler could: beside prompts, and with its limits.

    Guesses are chosen as soon as a step's chunks are, and prompts have what is left of its tokens.
    """

    def __init__(self, world: "GuessingWorld", scheduler: Scheduler) -> None:
        super().__init__(world, scheduler)
        self._form_batch = scheduler._forming._form_batch
        self._form = scheduler._forming._microbatch
        self._runnable: tuple[list[Sequence_], list[Sequence_]] = [], []
        self._chosen: Guesses = {}
        forming: Any = scheduler._forming
        forming._microbatch, forming._form_batch = self._form_these, self._form_with_guesses

    def choose(self, chosen: list[tuple[Sequence_, int]]) -> Guesses:
        """Those that the step was formed with."""
        running = {seq.request_id for seq, _ in chosen}
        return {one: guesses for one, guesses in self._chosen.items() if one in running}

    def _form_these(
        self, decodes: list[Sequence_], prompts: list[Sequence_], *args: Any, **named: Any
    ) -> Microbatch:
        self._runnable = decodes, prompts
        return self._form(decodes, prompts, *args, **named)

    def _form_with_guesses(
        self, view: FormationView, ongoing: OngoingFormation | None
    ) -> tuple[Microbatch, OngoingFormation | None]:
        """Once more with fewer tokens where guesses have no room beside all the chunks."""
        formed = self._form_batch(view, ongoing)
        decodes, prompts = self._runnable
        chosen = [(decodes[index], 1) for index in formed[0].decodes]
        chosen += ((prompts[index], count) for index, count in formed[0].prompts)
        self._chosen = super().choose(chosen)
        num_guesses = sum(map(len, self._chosen.values()))
        if sum(count for _, count in chosen) + num_guesses <= view.max_num_tokens:
            return formed
        left = replace(view, max_num_tokens=view.max_num_tokens - num_guesses)
        return self._form_batch(left, ongoing)

    def _num_chosen(
        self,
        ranked: list[Candidate],
        weight: float,
        chosen: list[tuple[Sequence_, int]],
        decodes: list[Sequence_],
    ) -> int:
        """See `num_by_rule`."""
        cost = self._world.cost
        assert cost is not None, "nobody has fitted what steps cost"
        place = {seq.request_id: at for at, (seq, _) in enumerate(chosen)}
        return num_by_rule(
            ranked,
            self._weights(decodes),
            [(seq.num_computed, count) for seq, count in chosen],
            [place[seq.request_id] for seq in decodes],
            cost,
            self._world.limits,
        )


def num_by_rule(
    ranked: list[Candidate],
    weights: list[float],
    chunks: list[tuple[int, int]],
    places: list[int],
    cost: CostCoefficients,
    limits: Limits,
) -> int:
    """How many give most per time, with today's margins; nobody's step grows for others.

    ``chunks`` are (prefix, tokens) of the step, and ``places`` tell which of them are decodes.
    Without prompts and prices it is the policy's `choose_num_guesses`.
    """
    lengths = [count for _, count in chunks]
    contexts = [chunks[place][0] for place in places]
    plain_s = _seconds(cost, _totals([(context, 1) for context in contexts]))
    alone = _totals(chunks)
    alone_s, num_pairs = _seconds(cost, alone), alone.num_pairs
    each, weight = [1.0] * len(places), sum(weights)
    best, num_best = MIN_GAIN * weight / plain_s, 0
    for number, one in enumerate(ranked[: max(0, limits.most_rows - len(places))], 1):
        weight += one.value
        each[one.decode] += one.value / weights[one.decode]
        lengths[places[one.decode]] += 1
        num_pairs += contexts[one.decode] + lengths[places[one.decode]]
        step = alone._replace(
            num_tokens=alone.num_tokens + number,
            num_pairs=num_pairs,
            num_samples=alone.num_samples + number,
        )
        more_s = _seconds(cost, step) - alone_s
        more_s = max(more_s, limits.least_row_share * number * plain_s)
        delay = 1.0 + more_s / plain_s
        is_fair = 1.0 + more_s / alone_s <= MOST_DELAY or delay <= min(each)
        if is_fair and weight / (plain_s + more_s) > best:
            best, num_best = weight / (plain_s + more_s), number
    return num_best


def _totals(chunks: list[tuple[int, int]]) -> BatchTotals:
    """Of chunks that all sample. No layer has a window here."""
    return BatchTotals(
        num_chunks=len(chunks),
        num_tokens=sum(count for _, count in chunks),
        num_pairs=sum(prefix * count + count * (count + 1) // 2 for prefix, count in chunks),
        num_context_tokens=sum(prefix for prefix, _ in chunks),
        num_samples=len(chunks),
    )


def _seconds(cost: CostCoefficients, totals: BatchTotals) -> float:
    return layers_cost(cost, totals) + head_cost(cost, totals)


@dataclass(slots=True)
class Checked:
    """What a run has checked."""

    num_guesses: int = 0
    num_steps: int = 0


class GuessingWorld(TimedWorld):
    """Every scheduler guesses."""

    def __init__(
        self,
        *args: Any,
        guessed: Guessed,
        times: RowTimes,
        cost: CostCoefficients | None,
        checked: Checked,
    ) -> None:
        self._guessed = guessed
        self.cost = cost
        self._checked = checked
        self.times = times
        self.lookups: dict[RequestId, Lookup] = {}
        super().__init__(*args)

    @property
    def limits(self) -> Limits:
        """Of a rule."""
        assert self._guessed.limits is not None, self._guessed
        return self._guessed.limits

    def lookup_of(self, request_id: RequestId, num_tokens: int) -> Lookup:
        """One for each request, wherever it runs."""
        if request_id not in self.lookups:
            chance = random.Random(str(request_id))
            text = chance.choice(self._guessed.texts)
            self.lookups[request_id] = Lookup(text, chance, num_tokens)
        return self.lookups[request_id]

    def price(self, scheduler: Scheduler, num_running: int) -> float:
        """Requests that wait for KV, for each that runs."""
        if not (self._guessed.is_priced and scheduler.is_memory_short):
            return 0.0
        backlog = self.controller._requests.backlog
        num_waiting = len(scheduler._waiting) + len(backlog) / len(self.members)
        return num_waiting / num_running

    def begin_step(self, member: SimInstance) -> Work | None:
        """Whoever leads a group guesses from its first step on."""
        membership = member.agent.membership
        if membership is not None and (scheduler := membership.scheduler) is not None:
            held: Any = scheduler
            if not isinstance(held._guessing, PricedGuessing):
                kind = RuleGuessing if self._guessed.limits else PricedGuessing
                held._guessing = kind(self, scheduler)
        work = super().begin_step(member)
        if work is not None:
            chunks = work.step.plan.chunks
            self._checked.num_steps += 1
            self._checked.num_guesses += sum(chunk.num_guesses for chunk in chunks)
            if self._guessed.limits is not None:
                most_tokens = self._plan.config.scheduler.max_num_batched_tokens
                assert work.step.plan.num_tokens <= most_tokens, work.step.plan
        return work
