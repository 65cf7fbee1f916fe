"""Long prompts over two instances: the most that lending time could gain.

    python -m benchmarks.brain.long_prompts >> benchmarks/results/long_prompts.jsonl
    python -m benchmarks.brain.long_prompts --table

An instance that computes a chunk of a long prompt gives a part of its layers to others whose step
has no prompt. Nothing is dropped and no group changes. It is a bound: whoever lends has KV memory
for those layers, nobody waits for a plan, and the KV is back for nothing. What is counted: the
lender's next step takes as much longer, the activations' way, and (but in `lent-free`) that the
last chunk of a prompt has no next one to overlap with, so its layers take as long as ever.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.brain.study import run_study
from benchmarks.paper.points import Named, Point, figures_of_run
from kunserve.control.instance.body import StepWork
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.request import Request
from kunserve.core.step import Chunk
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.instance import SimInstance

BENCHMARK = "long_prompts"
POINTS = (
    Point("LongBench 0.28", "end_to_end_longbench_14b", 0.28),
    Point("LongBench 0.34", "end_to_end_longbench_14b", 0.34),
    Point("BurstGPT-like 3.4", "end_to_end_burstgpt_14b", 3.4, None),
    Point("ShareGPT 1.0", "end_to_end_sharegpt_14b", 1.0, 4096),
)
"""Loads at which nothing is dropped."""
SEEDS = (5, 6, 7, 8, 9)


@dataclass(frozen=True, slots=True)
class Lending:
    """A way to lend time."""

    least_tokens: int
    """Shorter prompts are computed at home."""
    num_parts: int = 2
    """Of a chunk's layers; one of them stays at home."""
    is_free: bool = False
    """The last chunk is shared like any other, and who lends loses nothing."""
    step_tokens: int | None = None
    """Token budget of a step; None: the scenario's."""


LENDINGS = {
    "lent": Lending(2048),
    "lent-above-4096": Lending(4096),
    "lent-free": Lending(2048, is_free=True),
    "lent-small-steps": Lending(2048, step_tokens=1024),
    "lent-four": Lending(2048, num_parts=4),
}
BUDGETS = {"steps-1024": 1024, "steps-8192": 8192}
"""`recompute` with other token budgets: what is to be had for nothing."""
VARIANTS = ("recompute", "static-pp", "tp-pairs", "drop", *LENDINGS, *BUDGETS)


@dataclass(slots=True)
class Lent:
    """What a run has lent."""

    num_long: int = 0
    """Steps with a chunk of a long prompt; the next had help."""
    num_helped: int = 0
    seconds: float = 0.0


class LendingWorld(TimedWorld):
    """Groups of one stage whose steps borrow time."""

    def __init__(self, *args: Any, lending: Lending, lent: Lent) -> None:
        self._lending = lending
        self._lent = lent
        self._prompt_tokens: dict[RequestId, int] = {}
        self._lends_until_s: dict[InstanceId, float] = {}
        """When an instance has done what it does for others: behind its step, or at once."""
        self._ends_s: dict[InstanceId, float] = {}
        """Of each one's last step."""
        self._chunks: dict[InstanceId, tuple[Chunk, ...]] = {}
        """What they compute."""
        super().__init__(*args)

    def submit(self, request: Request) -> None:
        """Note how long it is."""
        self._prompt_tokens[request.request_id] = len(request.prompt_token_ids)
        super().submit(request)

    def compute(self, instance: SimInstance, work: Work, blocked_s: float) -> None:
        """As long as it takes with what others do of it, and with what they have put off."""
        assert isinstance(work.step, StepWork), work
        me = instance.instance_id
        chunks = work.step.plan.chunks
        self._chunks[me] = chunks
        now_s = self.now_s
        seconds = instance.body.work_s(work.step, 1.0) - self._given_away_s(me, chunks)
        seconds += max(0.0, self._lends_until_s.get(me, 0.0) - now_s)
        self._num_computing += 1
        self._ends_s[me] = end_s = now_s + blocked_s + seconds
        self.heap.at(end_s, self._computed, instance, work, now_s + blocked_s)

    def _given_away_s(self, me: InstanceId, chunks: tuple[Chunk, ...]) -> float:
        """What this step need not do. Others owe it from now on."""
        lending = self._lending
        long = [one for one in chunks if self._is_long(one)]
        if not long:
            return 0.0
        self._lent.num_long += 1
        helpers = self._helpers(me)[: lending.num_parts - 1]
        if not helpers:
            return 0.0
        self._lent.num_helped += 1
        shared = long if lending.is_free else [one for one in long if not one.num_sampled]
        seconds = self._stage_s(chunks) - self._stage_s([c for c in chunks if c not in shared])
        part_s = seconds / (1 + len(helpers))
        model = self.profile.model
        hop_bytes = sum(one.num_tokens for one in shared) * model.hidden_size * model.dtype_bytes
        hop_s = hop_bytes / self.profile.network_bytes_per_s if shared else 0.0
        for one in helpers:
            self._lent.seconds += part_s
            if not lending.is_free:
                begins_s = max(self.now_s, self._ends_s.get(one, 0.0))
                self._lends_until_s[one] = begins_s + part_s
        return part_s * len(helpers) - (0.0 if lending.is_free else hop_s)

    def _is_long(self, chunk: Chunk) -> bool:
        num_prompt = self._prompt_tokens[chunk.request_id]
        return chunk.start < num_prompt and num_prompt > self._lending.least_tokens

    def _helpers(self, me: InstanceId) -> list[InstanceId]:
        """Who has room: those that rest, then those whose steps have fewest decodes and no prompt.

        Nobody who lends already.
        """
        found = []
        for one, member in self.members.items():
            if one == me or self._lends_until_s.get(one, 0.0) > self.now_s:
                continue
            chunks = self._chunks.get(one, ()) if member.is_busy else ()
            if all(c.start >= self._prompt_tokens[c.request_id] for c in chunks):
                found.append((len(chunks), one))
        return [one for _, one in sorted(found)]

    def _stage_s(self, chunks: tuple[Chunk, ...] | list[Chunk]) -> float:
        times = self.profile.times
        return times.stage_s(chunks, self.profile.model.num_layers, True) if chunks else 0.0


def run(variant: str, scenario: Scenario) -> Iterator[Named]:
    """One variant of one draw."""
    lending = LENDINGS.get(variant)
    budget = BUDGETS.get(variant) if lending is None else lending.step_tokens
    if budget is not None:
        scheduler = replace(scenario.scheduler, max_num_batched_tokens=budget)
        scenario = replace(scenario, scheduler=scheduler)
    if lending is None:
        system = find_system("recompute" if variant in BUDGETS else variant)
        yield from figures_of_run(simulate(system, scenario), scenario)
        return
    lent = Lent()

    def make_world(*args: Any) -> LendingWorld:
        return LendingWorld(*args, lending=lending, lent=lent)

    result = simulate(find_system("recompute"), scenario, make_world=make_world)
    yield from figures_of_run(result, scenario)
    yield "long steps", lent.num_long, ""
    yield "with help", 100.0 * lent.num_helped / max(1, lent.num_long), "%"
    yield "lent", lent.seconds, "s"


def main() -> None:
    """Every variant at every load."""
    run_study(BENCHMARK, __doc__, POINTS, VARIANTS, SEEDS, run)


if __name__ == "__main__":
    main()
