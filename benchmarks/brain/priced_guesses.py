"""Guesses priced by memory: what they gain where KV is short, if checking reads KV once.

    python -m benchmarks.brain.priced_guesses >> benchmarks/results/priced_guesses.jsonl
    python -m benchmarks.brain.priced_guesses --table

Simulated instances that guess. No tokens are looked up: a request has guesses at a share of its
steps, and each is right with a chance that the policy learns as it does today. Unlike today's
policy, steps with prompts and with many decodes have guesses too.

How many: the most tokens per time of the decodes (a step's prompts are left out of the time: while
memory is short each token of an answer brings its share of prompts). Priced, a token counts
``1 + price * KV / mean KV``, and the price is the number of waiting requests per running one.
A request's KV is read once however many of its rows a step has (but in `by row`), guesses cost no
lookup, and step times are known exactly: a bound. `rule` is no bound: its steps take what the
simulator has chunks take, arithmetic of every row included, and the fitted cost model chooses, by
the margins of today's policy (`MIN_GAIN`, `MOST_DELAY`). It is kind all the same: neither a
step's tokens nor `MOST_ROWS` and `LEAST_ROW_SHARE` bound its guesses.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks.brain.study import run_study
from benchmarks.paper.points import HEAVY_27, LONGBENCH_44, UNSEEN, Named, figures_of_run
from kunserve.control.group.guessing import Guesses
from kunserve.control.group.scheduler import Scheduler
from kunserve.control.group.sequence import Sequence as Sequence_
from kunserve.control.instance.work import Work
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve.policy.batch.cost import batch_cost
from kunserve.policy.batch.speculation import (
    FIRST_RATE,
    MIN_GAIN,
    MOST_DELAY,
    learned_rate,
)
from kunserve_lab.compare.simulated.prompts import ANSWER
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.devices import Device, find_device
from kunserve_lab.sim.instance import SimInstance
from kunserve_lab.sim.models import SimModel
from kunserve_lab.sim.profile import RooflineTimes

BENCHMARK = "priced_guesses"
POINTS = (*(one for one in UNSEEN if one.name.startswith("LongBench")), LONGBENCH_44, HEAVY_27)
SEEDS = (5, 6)
MOST_GUESSES = 3
"""Of a request in a step."""


class Text(NamedTuple):
    """What lookups give in one kind of text."""

    coverage: float
    """Share of steps at which something is found."""
    rate: float
    """Share of guesses that are right where the one before was."""


MEASURED = (Text(0.26, 0.84), Text(0.76, 0.60), Text(1.0, 0.82), Text(0.93, 0.86), Text(0.0, 0.0))
"""SmolLM2's chats, summaries, extractions, edits and noise (docs/decisions/speculative.md at
71e062a4). Shares of steps are reckoned from the speed of one stream."""
TEXTS = {
    "weak": (Text(0.3, 0.3),),
    "0.3": (Text(1.0, 0.3),),
    "0.45": (Text(1.0, 0.45),),
    "0.6": (Text(1.0, 0.6),),
    "chat": MEASURED[:1],
    "measured": MEASURED,
}
"""Each request is one of these, drawn evenly."""


@dataclass(frozen=True, slots=True)
class Guessed:
    """A system with guesses."""

    system: str
    texts: tuple[Text, ...]
    is_priced: bool = True
    reads_once: bool = True
    """False: each row reads the request's KV, as GPUs' decodes have it."""
    is_rule: bool = False
    """Chosen by the fitted cost model; steps cost what the simulator has them cost."""


GUESSED = (
    {
        f"{system}, guesses {name}": Guessed(system, texts)
        for name, texts in TEXTS.items()
        for system in ("recompute", "drop")
    }
    | {
        f"{system}, rule {name}": Guessed(system, texts, is_priced=False, is_rule=True)
        for name, texts in TEXTS.items()
        for system in ("recompute", "drop")
    }
    | {
        "recompute, unpriced 0.45": Guessed("recompute", TEXTS["0.45"], is_priced=False),
        "recompute, by row 0.3": Guessed("recompute", TEXTS["0.3"], reads_once=False),
        "recompute, by row 0.6": Guessed("recompute", TEXTS["0.6"], reads_once=False),
    }
)
VARIANTS = ("recompute", "drop", "endless", *GUESSED)


class RowTimes(RooflineTimes):
    """Steps in which a decode has rows for its guesses. They read its KV once, or once for each."""

    def __init__(self, model: SimModel, device: Device, num_gpus: int, *, reads_once: bool) -> None:
        super().__init__(model, device, num_gpus)
        self._reads_once = reads_once

    def stage_s(self, chunks: Sequence[Chunk], num_layers: int, is_last: bool) -> float:
        """A decode of its last position, and rows that only weights see."""
        plain = []
        num_rows = context = 0
        for request_id, start, count, samples in chunks:
            if samples > 1:
                num_rows += count - 1
                context += (count - 1) * (start + count)
                plain.append(Chunk(request_id, start + count - 1, 1, samples))
            else:
                plain.append(Chunk(request_id, start, count, samples))
        seconds = super().stage_s(plain, num_layers, is_last)
        if not num_rows:
            return seconds
        num_tokens = sum(chunk.num_tokens for chunk in plain)
        return seconds + num_layers * self._rows_s(num_tokens, num_rows, context)

    def _rows_s(self, num_tokens: int, num_rows: int, context: float) -> float:
        """In a layer; ``context``: of all these rows together."""
        model = self._model
        seconds = self.matmul_s(num_tokens + num_rows) - self.matmul_s(num_tokens)
        seconds += model.activation_width * model.dtype_bytes * num_rows / self._weight_rate
        if not self._reads_once:
            seconds += context * model.kv_token_bytes / self._kv_rate
        if self._num_gpus > 1:
            seconds += 2.0 * (self._reduce_s(num_tokens + num_rows) - self._reduce_s(num_tokens))
        return seconds

    def more_s(self, num_tokens: int, num_sampled: int, num_rows: int, context: float) -> float:
        """What so many rows add to a step of a whole model."""
        head_s = self._head_s(num_sampled + num_rows) - self._head_s(num_sampled)
        return self._model.num_layers * self._rows_s(num_tokens, num_rows, context) + head_s


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
    """By predicted time, as a scheduler could: beside prompts, and however many decode."""

    def _num_chosen(
        self,
        ranked: list[Candidate],
        weight: float,
        chosen: list[tuple[Sequence_, int]],
        decodes: list[Sequence_],
    ) -> int:
        """How many give most per time, with today's margins; nobody's step grows for others."""
        cost = self._cost
        prefixes = [seq.num_computed for seq, _ in chosen]
        lengths = [count for _, count in chosen]
        place = {seq.request_id: at for at, (seq, _) in enumerate(chosen)}
        ones = [seq.num_computed for seq in decodes]
        plain_s = batch_cost(cost, ones, [1] * len(ones), 1)
        alone_s = batch_cost(cost, prefixes, lengths, 1)
        each = [1.0] * len(decodes)
        best, num_best = MIN_GAIN * weight / plain_s, 0
        for number, one in enumerate(ranked, 1):
            weight += one.value
            each[one.decode] += one.value
            lengths[place[decodes[one.decode].request_id]] += 1
            more_s = batch_cost(cost, prefixes, lengths, 1) - alone_s + cost.sample_s * number
            delay = 1.0 + more_s / plain_s
            is_fair = 1.0 + more_s / alone_s <= MOST_DELAY or delay <= min(each)
            if is_fair and weight / (plain_s + more_s) > best:
                best, num_best = weight / (plain_s + more_s), number
        return num_best

    @property
    def _cost(self) -> CostCoefficients:
        cost = self._world.cost
        assert cost is not None, "nobody has fitted what steps cost"
        return cost


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
                kind = RuleGuessing if self._guessed.is_rule else PricedGuessing
                held._guessing = kind(self, scheduler)
        work = super().begin_step(member)
        if work is not None:
            chunks = work.step.plan.chunks
            self._checked.num_steps += 1
            self._checked.num_guesses += sum(chunk.num_guesses for chunk in chunks)
        return work


def run(variant: str, scenario: Scenario) -> Iterator[Named]:
    """One variant of one draw."""
    guessed = GUESSED.get(variant)
    if guessed is None:
        yield from figures_of_run(simulate(find_system(variant), scenario), scenario)
        return
    profile = scenario.profile
    device, once = find_device("a800"), guessed.reads_once
    times = RowTimes(profile.model, device, profile.num_gpus, reads_once=once)
    if not guessed.is_rule:
        scenario = replace(scenario, profile=replace(profile, times=times))
    checked = Checked()

    def make_world(*args: Any) -> GuessingWorld:
        return GuessingWorld(
            *args, guessed=guessed, times=times, cost=scenario.cost, checked=checked
        )

    result = simulate(find_system(guessed.system), scenario, make_world=make_world)
    yield from figures_of_run(result, scenario)
    yield "guesses", checked.num_guesses / max(1, checked.num_steps), "of a step"


def main() -> None:
    """Every variant at every point."""
    run_study(BENCHMARK, __doc__, POINTS, VARIANTS, SEEDS, run)


if __name__ == "__main__":
    main()
