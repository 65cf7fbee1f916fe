"""Swapping through the scheduler: who leaves, in what pieces, and who comes back when."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kunserve.control.group.ledger import Ledger
from kunserve.control.group.load import SchedulerTotals
from kunserve.control.group.prefix_cache import NEVER_FULL, PrefixCache
from kunserve.control.group.residency import Residency
from kunserve.control.group.scheduler import Scheduler
from kunserve.control.group.sequence import Sequence, make_sequence
from kunserve.control.group.swap import SwapSpace
from kunserve.core.config import KunServeConfig, OverloadConfig, SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import ConfigError
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Measured, Plan, SwapPlan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import BlockRun, SampledToken, StepPlan, StepResult
from kunserve.policy.batch.relief import HostLink

BLOCK = 4
COST = CostCoefficients(attention_s=0.0, token_s=1.0, chunk_s=0.0, shared_s=0.0)
"""A step takes a second per token."""
FAST = HostLink(blocks_per_s=100.0, capacity_blocks=None)
SLOW = HostLink(blocks_per_s=0.5, capacity_blocks=None)
"""Two decodes hide one block."""


@dataclass
class Story:
    """A scheduler driven to the end of its requests, and everything that it planned."""

    scheduler: Scheduler
    num_stages: int
    plans: list[StepPlan] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    in_flight: deque[StepPlan] = field(default_factory=deque)
    step_s: float = 0.0
    now_s: float = 0.0

    def step(self) -> bool:
        self.now_s += self.step_s
        plan = self.scheduler.schedule(self.now_s)
        self.scheduler.check()
        self.preempted += [request_id for request_id, _ in self.scheduler.drain_preemptions()]
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(plan)
        if self.in_flight and (plan is None or len(self.in_flight) == self.num_stages):
            done = self.in_flight.popleft()
            tokens = [SampledToken(c.request_id, 7, None) for c in done.chunks if c.samples]
            result = StepResult(done.group_id, done.step_id, tuple(tokens))
            self.outputs += self.scheduler.complete(result, self.now_s)
            self.scheduler.check()
            return True
        return plan is not None

    def run_until(self, stop: Callable[[StepPlan], bool]) -> StepPlan:
        for _ in range(300):
            assert self.step(), "it ends before that"
            if stop(self.plans[-1]):
                return self.plans[-1]
        raise AssertionError("it never stops")

    def finish(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work:
                break
            assert self.step(), "stuck"
        assert self.scheduler.used_blocks == 0

    @property
    def computed(self) -> Counter[RequestId]:
        counts: Counter[RequestId] = Counter()
        for plan in self.plans:
            for chunk in plan.chunks:
                counts[chunk.request_id] += chunk.num_tokens
        return counts

    def moved(self, name: str) -> tuple[list[BlockRun], list[BlockRun]]:
        request_id = RequestId(name)
        return (
            [
                run
                for plan in self.plans
                for run in plan.swapped_out
                if run.request_id == request_id
            ],
            [run for plan in self.plans for run in plan.swapped_in if run.request_id == request_id],
        )


def begin(
    link: HostLink,
    *requests: tuple[str, int, int],
    capacity: int = 10,
    num_stages: int = 1,
    max_park_s: float | None = None,
    cost: CostCoefficients = COST,
    is_second_line: bool = False,
) -> Story:
    """Requests of (name, prompt tokens, output tokens), in order of arrival. A step takes 1 s."""
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=32,
        lookahead=False,
        enable_prefix_caching=False,  # prompts are alike here
    )
    swap = SwapPlan(1.0, max_park_s=max_park_s, is_second_line=is_second_line)
    scheduler = Scheduler(
        config,
        GroupId(0),
        num_stages,
        BLOCK,
        capacity,
        frozenset(),
        1000,
        host_link=link,
        measured=Measured(cost, swap),
    )
    for i, (name, num_prompt, num_output) in enumerate(requests):
        sampling = SamplingParams(max_tokens=num_output)
        scheduler.add(Request(RequestId(name), (5,) * num_prompt, sampling, float(i)))
    return Story(scheduler, num_stages, step_s=1.0)


TWO = (("a", 14, 20), ("b", 14, 20))
"""Both fit at first, and only one at their full length of 9 blocks."""


@pytest.mark.parametrize("link", [FAST, SLOW])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_no_token_is_computed_twice(link: HostLink, num_stages: int) -> None:
    story = begin(link, *TWO, ("c", 9, 12), num_stages=num_stages)
    story.finish()
    assert story.preempted and story.scheduler.totals.lost_tokens == 0
    assert story.computed == {"a": 14 + 19, "b": 14 + 19, "c": 9 + 11}
    for name, num_output in (("a", 20), ("b", 20), ("c", 12)):
        positions = [o.position for o in story.outputs if o.request_id == name]
        assert positions == list(range(num_output)), name


def test_a_victim_leaves_as_fast_as_steps_hide_it_and_the_other_runs_on() -> None:
    story = begin(SLOW, *TWO)
    story.run_until(lambda plan: bool(plan.swapped_out))
    assert story.preempted == ["b"]
    # "a" needs a block for its next token, so nobody can run: 50 ms hide less than a block.
    first = story.plans[-1]
    assert first.chunks == () and first.swapped_out == (BlockRun(RequestId("b"), 4, 5),)
    story.finish()
    out, back = story.moved("b")
    assert out[:2] == [("b", 4, 5), ("b", 3, 4)], "the tail first"
    assert all(end - start == 1 for _, start, end in out), "one block at least, and no more"
    assert sum(end - start for _, start, end in out) == sum(e - s for _, s, e in back)
    assert [run.first_block for run in back] == sorted(run.first_block for run in back)
    decodes = [plan for plan in story.plans if plan.swapped_out and plan.chunks]
    assert {chunk.request_id for plan in decodes for chunk in plan.chunks} == {"a"}


def test_who_comes_later_is_not_admitted_before_who_left() -> None:
    story = begin(FAST, *TWO, ("c", 5, 5))
    story.finish()
    order = [chunk.request_id for plan in story.plans for chunk in plan.chunks]
    left = next(i for i, plan in enumerate(story.plans) if plan.swapped_out)
    back = next(i for i, plan in enumerate(story.plans) if plan.swapped_in)
    began = next(i for i, plan in enumerate(story.plans) if "c" in {s[0] for s in plan.started})
    assert left < back <= began, (left, back, began)
    assert order.count(RequestId("c")) == 5


def test_it_runs_no_earlier_than_the_plan_after_its_last_block() -> None:
    story = begin(FAST, *TWO)
    story.finish()
    assert all(story.moved("b")), "it left and came back"
    for plan in story.plans:
        moving = {run.request_id for run in (*plan.swapped_out, *plan.swapped_in)}
        assert moving.isdisjoint(chunk.request_id for chunk in plan.chunks)


@pytest.mark.parametrize(
    "link", [HostLink(100.0, capacity_blocks=4), HostLink(0.01, capacity_blocks=None)]
)
def test_full_host_memory_or_a_link_too_slow_means_recomputing(link: HostLink) -> None:
    story = begin(link, *TWO)
    story.finish()
    assert story.moved("b") == ([], [])
    assert story.scheduler.totals.lost_tokens > 0
    assert story.computed["b"] > 14 + 19


@pytest.mark.parametrize("link", [FAST, SLOW])
def test_an_abort_on_the_way_out_leaves_nothing(link: HostLink) -> None:
    story = begin(link, *TWO)
    story.run_until(lambda plan: bool(plan.swapped_out))
    assert story.scheduler.abort(RequestId("b"))
    story.scheduler.check()
    assert story.scheduler.used_blocks == 5, "only those of a"
    plan = story.run_until(lambda plan: bool(plan.released))
    assert plan.released == ("b",)
    story.finish()
    assert not story.moved("b")[1]


def test_a_handover_gives_swapped_kv_up() -> None:
    story = begin(FAST, *TWO)
    story.run_until(lambda plan: bool(plan.swapped_out))
    states = {state.request.request_id: state for state in story.scheduler.export()}
    assert states[RequestId("a")].num_computed > 0
    away = states[RequestId("b")]
    assert (away.num_computed, away.num_blocks, away.num_preemptions) == (0, 0, 2)
    assert story.scheduler.used_blocks == 0 and not story.scheduler.has_work
    story.scheduler.check()


def sequence(name: str, arrival_s: float, num_tokens: int) -> Sequence:
    """A running one whose tokens but the last are computed."""
    request = Request(RequestId(name), (5,) * num_tokens, SamplingParams(9), arrival_s)
    made = make_sequence(request, (), 0, frozenset(), 1000, 16)
    made.num_computed = num_tokens - 1
    return made


def space(*held: Sequence, capacity: int) -> tuple[SwapSpace, Ledger]:
    """These sequences hold what their tokens need."""
    ledger = Ledger(capacity)
    for seq in held:
        assert ledger.grow(seq.request_id, -(-seq.num_tokens // BLOCK))
    cache = PrefixCache(GroupId(0), NEVER_FULL, ledger, Residency(SchedulerTotals()))
    return SwapSpace(FAST, COST, KvBlocks(BLOCK), ledger, SchedulerTotals(), cache), ledger


def test_who_came_earlier_and_was_recomputed_goes_first() -> None:
    victim = sequence("v", 2.0, 9)
    swap, ledger = space(victim, capacity=10)
    assert swap.swap_out(victim)
    assert swap.swap_in((0, 1.0, 0), 8) == 0, "an earlier one waits without KV"
    assert swap.swap_in((0, 3.0, 0), 0) == 0, "no room among the running"
    assert swap.first_away == victim.key
    assert swap.swap_in((0, 3.0, 0), 8) == 1
    assert swap.returning == [victim] and swap.first_away is None
    assert ledger.used_blocks == 3
    swap.check()


def test_it_may_turn_round_half_way() -> None:
    victim = sequence("v", 0.0, 5 * BLOCK)
    swap, ledger = space(victim, capacity=10)
    assert swap.swap_out(victim)
    assert swap.plan_copies([]) == ((("v", 0, 5),), ())
    assert ledger.used_blocks == 5, "until the next plan"
    assert swap.finish_copies(0.0) == [] and ledger.used_blocks == 0
    assert swap.swap_in(None, 8) == 1 and ledger.used_blocks == 5
    assert swap.swap_out(victim), "before anything came back"
    assert ledger.used_blocks == 0 and not swap.returning and not swap.may_copy
    assert swap.swap_in(None, 8) == 1
    assert swap.plan_copies([]) == ((), (("v", 0, 5),))
    swap.check()
    assert swap.finish_copies(0.0) == [victim] and not swap


def test_what_one_waits_for_is_not_promised_to_another() -> None:
    victim, first, second = (sequence(name, i, 8) for i, name in enumerate("vab"))
    swap, ledger = space(victim, first, second, capacity=6)
    assert swap.swap_out(victim)
    assert swap.makes_room(first, 3) and swap.makes_room(second, 3)
    assert not swap.makes_room(first, 3), "two blocks leave"
    assert swap.finish_copies(0.0) == []
    assert swap.makes_room(first, 4), "a new plan, a new count"
    assert ledger.used_blocks == 6


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="swapping needs the cost of steps"):
        Measured(swap=SwapPlan(1e9))
    measured = Measured(COST, SwapPlan(1e9))
    with pytest.raises(ConfigError, match="is for overload policies 'swap' and 'park', not 'drop'"):
        Plan(KunServeConfig(), measured)
    Plan(KunServeConfig(overload=OverloadConfig(policy="swap")), measured)
