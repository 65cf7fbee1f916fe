"""The ledger's promise: what the scheduler plans, every stage's block table can place."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.block_table import NOTHING, BlockTable
from kunserve.core.config import SchedulerConfig, SpeculativeConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.plan import Measured
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import BlockRun, SampledToken, StepPlan, StepResult
from kunserve.core.tokens import TokenIds
from kunserve.policy.batch.relief import NO_HOST, HostLink
from tests.examples import examples

BLOCK = 4
COST = CostCoefficients(attention_s=0.0, token_s=1.0, chunk_s=0.0, shared_s=0.0)
CHEAP = CostCoefficients(attention_s=0.0, token_s=0.01, chunk_s=1.0, shared_s=1.0)
"""Guesses are worth it."""
SPLITS = [(30,), (15, 15), (10, 11, 9), (7, 8, 8, 7), (1, 29)]

Arrival = tuple[int, int, int, int]
"""(prompt tokens, output tokens, steps after the one before, which prompt it is of)."""


class Group:
    """A scheduler and its stages, each with its own units; plans run as late as allowed."""

    def __init__(
        self,
        split: tuple[int, ...],
        slack: list[int],
        blocks: int,
        budget: int,
        link: HostLink,
        caches: bool,
        guesses: bool,
    ) -> None:
        self.tables = []
        first = 0
        for layers, extra in zip(split, slack, strict=False):
            table = BlockTable(30, 0, 2, 2)
            table.set_layers(LayerRange(first, first + layers), layers * blocks + extra)
            first += layers
            self.tables.append(table)
        self.scheduler = Scheduler(
            SchedulerConfig(
                6,
                budget,
                enable_prefix_caching=caches,
                speculative_config=SpeculativeConfig() if guesses else None,
            ),
            GroupId(0),
            len(split),
            BLOCK,
            min(t.num_units // t.layers.num_layers for t in self.tables),
            frozenset(),
            1000,
            host_link=link,
            measured=Measured(CHEAP if guesses else COST),
        )
        self.swapped_out: tuple[BlockRun, ...] = ()
        self.plans: deque[StepPlan] = deque()
        self.log: list[object] = []
        self.first_tokens: list[RequestId] = []
        self.tokens: dict[RequestId, list[int]] = {}
        self.num_preemptions = 0
        self.num_shared = 0
        self.num_guesses = 0

    def step(self, now_s: float) -> None:
        plan = self.scheduler.schedule(now_s)
        self.num_preemptions += len(self.scheduler.drain_preemptions())
        if plan is not None:
            self.plans.append(plan)
            self.num_shared += len(plan.shared)
            self.log.append(plan)
        if self.plans and (plan is None or len(self.plans) == len(self.tables)):
            self.run(self.plans.popleft(), now_s)

    def run(self, plan: StepPlan, now_s: float) -> None:
        for table in self.tables:
            for request_id, first, end in self.swapped_out:
                table.release_layers(request_id, first, end, NOTHING)
            for kept in plan.kept:
                table.keep(*kept)
            for request_id in plan.released:
                assert table.num_blocks(request_id)
                table.release(request_id)
            for evicted in plan.evicted:
                table.evict(*evicted)
            for shared in plan.shared:
                table.share(*shared)
            for request_id, first, end in plan.swapped_in:
                assert table.relayout(request_id, first, end) == ()
            for request_id, start, count, _ in plan.chunks:  # guesses and all
                needed = -(-(start + count) // BLOCK)
                assert table.grow(request_id, needed) == ()
                assert table.num_blocks(request_id) == needed
        self.swapped_out = plan.swapped_out
        self.num_guesses += plan.num_sampled - sum(chunk.samples for chunk in plan.chunks)
        sampled = tuple(
            SampledToken(row.request_id, int(row.num_before % 7 > 0), None)
            for row in plan.sampled_rows
        )
        result = StepResult(plan.group_id, plan.step_id, sampled)
        for output in self.scheduler.complete(result, now_s):
            self.log.append(output)
            if output.position == 0:
                self.first_tokens.append(output.request_id)
            assert output.position == len(self.tokens.setdefault(output.request_id, []))
            self.tokens[output.request_id].append(output.position)

    def check(self) -> None:
        self.scheduler.check()
        for table in self.tables:
            table.check()


def serve(
    arrivals: list[Arrival],
    split: tuple[int, ...],
    slack: list[int],
    blocks: int,
    budget: int,
    link: HostLink,
    caches: bool,
    guesses: bool,
) -> Group:
    group = Group(split, slack, blocks, budget, link, caches, guesses)
    now = 0
    for i, (num_prompt, num_output, delay, prompt) in enumerate(arrivals):
        for _ in range(delay):
            group.step(now)
        sampling = SamplingParams(max_tokens=num_output)
        tokens = TokenIds([prompt] * num_prompt)
        group.scheduler.add(Request(RequestId(str(i)), tokens, sampling, float(i)))
        group.check()
    while group.scheduler.has_work:
        now += 1
        assert now < 5000, "no progress"
        group.step(now)
    return group


@settings(max_examples=examples(60))
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 13), st.integers(0, 6), st.integers(0, 2)),
        max_size=14,
    ),
    split=st.sampled_from(SPLITS),
    slack=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    blocks=st.integers(8, 20),
    budget=st.integers(1, 24),
    link=st.sampled_from([NO_HOST, HostLink(0.5, None), HostLink(50.0, None)]),
    caches=st.sampled_from([True, True, False]),
    guesses=st.booleans(),
)
def test_every_plan_can_be_placed_on_every_stage(
    arrivals: list[Arrival],
    split: tuple[int, ...],
    slack: list[int],
    blocks: int,
    budget: int,
    link: HostLink,
    caches: bool,
    guesses: bool,
) -> None:
    group = serve(arrivals, split, slack, blocks, budget, link, caches, guesses)
    for i, (_, num_output, _, _) in enumerate(arrivals):
        assert len(group.tokens[RequestId(str(i))]) == num_output
    group.check()
    for table in group.tables:
        assert table.used_units == table.layers.num_layers * group.scheduler.cached_blocks
        assert caches or not (table.request_ids() or group.num_shared)
    if not group.num_preemptions:
        assert group.first_tokens == [str(i) for i in range(len(arrivals))], "first come"
    again = serve(arrivals, split, slack, blocks, budget, link, caches, guesses)
    assert again.log == group.log, "the same events give the same plans"
