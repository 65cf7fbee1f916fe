"""Random lives of a scheduler, with stages that check every plan as real ones would."""

from collections import deque
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kunserve.control.group import prefix_cache
from kunserve.control.group.scheduler import Scheduler
from kunserve.control.group.sequence import Progress
from kunserve.core.config import (
    SchedulerConfig,
    SpeculativeConfig,
)
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import GroupId, PrefixId, RequestId, StepId
from kunserve.core.plan import Measured, SwapPlan
from kunserve.core.request import FinishReason, Request, SamplingParams, StructuredOutput
from kunserve.core.step import LATE, SampledToken, StepPlan, StepResult
from kunserve.core.tokens import TokenIds
from kunserve.policy.batch.relief import NO_HOST, HostLink
from tests.examples import examples

FORM = StructuredOutput("regex", ".*")
"""Of requests whose tokens may be late. What the form allows is nothing to a scheduler."""
BLOCK = 4
EOS = 0
GONE = -1


LINKS = (HostLink(0.01, None), HostLink(0.4, None), HostLink(100.0, None), HostLink(100.0, 5))
"""So slow that nobody is swapped, one block per step, everything at once, and little room."""


def token_of(tokens: list[int]) -> int:
    """The fake model: the next token depends on every token before it.

    With some prompts it often repeats what it said, so that guesses are right now and then.
    """
    token = (sum((i + 1) * t for i, t in enumerate(tokens)) + len(tokens)) % 17
    if tokens[0] % 2 and token % 4 and len(tokens) > 3:
        return tokens[-3]
    return token


def undisturbed(request: Request, max_model_len: int) -> list[int]:
    """The output that the request must have, whatever happens around it."""
    tokens = list(request.prompt_token_ids)
    while True:
        tokens.append(token_of(tokens))
        num_output = len(tokens) - len(request.prompt_token_ids)
        sampling = request.sampling
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        if (
            (tokens[-1] in stops and num_output >= sampling.min_tokens)
            or num_output == sampling.max_tokens
            or len(tokens) == max_model_len
        ):
            return tokens[len(request.prompt_token_ids) :]


class Stages:
    """What the stages of a group know: KV contents, in KV and in host memory."""

    def __init__(self, host_blocks: int | None) -> None:
        self.host_blocks = host_blocks
        self.kv: dict[RequestId, list[int]] = {}
        self.host: dict[RequestId, dict[int, list[int]]] = {}
        """Blocks in host memory; in ``kv`` their tokens are unreadable."""
        self.started: set[RequestId] = set()
        self.prefixes: dict[RequestId, tuple[int, list[int], str]] = {}
        """First block, tokens and salt of each."""
        self.salts: dict[RequestId, str] = {}
        self.shared: dict[RequestId, list[tuple[RequestId, int]]] = {}
        """Of each request: prefixes, each up to a block."""
        self.next_shared: dict[RequestId, list[tuple[RequestId, int]]] = {}
        """Of those that are copied out: what the next plan finds."""
        self.guessed: dict[RequestId, int] = {}
        """Tokens at the end of ``kv`` that may be wrong."""
        self.late: set[RequestId] = set()
        """Whose last token is to be computed again."""

    def forget_wrong(self, request_id: RequestId, num_computed: int) -> None:
        """So many tokens are known to be right; guesses take no block of their own."""
        kv = self.kv[request_id]
        num_guesses = self.guessed.pop(request_id, 0)
        assert len(kv) - num_guesses <= num_computed <= len(kv), "a chunk out of order"
        assert -(-len(kv) // BLOCK) == -(-num_computed // BLOCK) or not num_guesses
        del kv[num_computed:]

    def obey_cache(self, plan: StepPlan) -> None:
        for request_id, prefix_id, first, end in plan.kept:
            tokens = self.kv[request_id][first * BLOCK : end * BLOCK]
            assert len(tokens) == (end - first) * BLOCK > 0 and GONE not in tokens
            assert prefix_id not in self.prefixes
            self.prefixes[prefix_id] = first, tokens, self.salts[request_id]
            self.shared.setdefault(request_id, []).append((prefix_id, end))
        for request_id in plan.released:
            del self.kv[request_id]
            self.guessed.pop(request_id, None)
            self.late.discard(request_id)
            self.host.pop(request_id, None)
            self.started.discard(request_id)
            self.shared.pop(request_id, None)
        for prefix_id, end in plan.evicted:
            shares = [share for shares in self.shared.values() for share in shares]
            assert all(end >= used for other, used in shares if other == prefix_id), "still shared"
            first, tokens, _ = self.prefixes[prefix_id]
            assert end < first + len(tokens) // BLOCK, "nothing is evicted"
            del tokens[(end - first) * BLOCK :]
            if not tokens:
                del self.prefixes[prefix_id]
        for request_id, prefix_id, end in plan.shared:
            first, tokens, salt = self.prefixes[prefix_id]
            assert salt == self.salts[request_id], "another salt's KV"
            kv = self.kv.setdefault(request_id, [])
            start = len(kv) // BLOCK
            assert first <= start < end <= first + len(tokens) // BLOCK
            kv += tokens[(start - first) * BLOCK : (end - first) * BLOCK]
            self.shared.setdefault(request_id, []).append((prefix_id, end))

    def swap(self, plan: StepPlan) -> None:
        idle = {run.request_id for run in (*plan.swapped_out, *plan.swapped_in)}
        assert idle.isdisjoint(chunk.request_id for chunk in plan.chunks), "copied while it runs"
        assert len(idle) == len(plan.swapped_out) + len(plan.swapped_in)
        for request_id, first, end in plan.swapped_out:
            kept = [share for share in self.shared.get(request_id, ()) if share[1] <= first]
            cut = [(p, first) for p, used in self.shared.get(request_id, ())[len(kept) :][:1]]
            self.next_shared[request_id] = kept + cut
            kv, host = self.kv[request_id], self.host.setdefault(request_id, {})
            for block in range(first, end):
                part = slice(block * BLOCK, (block + 1) * BLOCK)
                assert block not in host and kv[part] and GONE not in kv[part]
                host[block] = kv[part]
                kv[part] = [GONE] * len(kv[part])
        for request_id, first, end in plan.swapped_in:
            kv, host = self.kv[request_id], self.host[request_id]
            for block in range(first, end):
                kv[block * BLOCK : (block + 1) * BLOCK] = host.pop(block)
            if not host:
                del self.host[request_id]
        used = sum(len(blocks) for blocks in self.host.values())
        assert self.host_blocks is None or used <= self.host_blocks, "host memory is full"

    def run(self, plan: StepPlan, tokens: list[int], held_back: set[RequestId]) -> StepResult:
        """Whose tokens are ``held_back`` have none if one is sampled."""
        self.shared |= self.next_shared
        self.next_shared = {}
        self.obey_cache(plan)
        self.swap(plan)
        for start in plan.started:
            assert start.request_id not in self.started
            self.started.add(start.request_id)
            self.kv.setdefault(start.request_id, [])
        sampled, position = [], 0
        for request_id, start_at, count, num_sampled in plan.chunks:
            assert request_id in self.started and count > 0
            kv = self.kv[request_id]
            if request_id in self.late:
                assert count == 1, "nothing but its last token is computed again"
                self.late.remove(request_id)
                kv.pop()
            self.forget_wrong(request_id, start_at)
            assert GONE not in kv, "KV that is in host memory"
            for token in tokens[position : position + count]:
                kv.append(token)
                if request_id in held_back and len(kv) == start_at + count and num_sampled:
                    sampled.append(SampledToken(request_id, LATE, None))
                    self.late.add(request_id)
                elif start_at + count - len(kv) < num_sampled:
                    sampled.append(SampledToken(request_id, token_of(kv), None))
            if num_sampled > 1:
                self.guessed[request_id] = num_sampled - 1
            position += count
        assert position == len(tokens)
        return StepResult(plan.group_id, plan.step_id, tuple(sampled))


class SchedulerMachine(RuleBasedStateMachine):
    """Every request ends exactly once, with exactly the tokens of an undisturbed run."""

    @initialize(
        stages=st.integers(1, 4),
        capacity=st.integers(6, 20),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        min_tokens=st.sampled_from([None, 1, 3]),
        link=st.sampled_from([NO_HOST, *LINKS]),
        tpot_slo_s=st.sampled_from([None, 4.0, 40.0]),
        max_park_s=st.sampled_from([None, 3.0, 12.0]),
        caches=st.sampled_from([True, True, True, False]),
        num_guesses=st.sampled_from([None, None, 1, 3]),
        worth_waiting=st.sampled_from([4, 8, 128]),
        reserves=st.booleans(),
    )
    def start(
        self,
        stages: int,
        capacity: int,
        seqs: int,
        budget: int,
        min_tokens: int | None,
        link: HostLink,
        tpot_slo_s: float | None,
        max_park_s: float | None,
        caches: bool,
        num_guesses: int | None,
        worth_waiting: int,
        reserves: bool,
    ) -> None:
        """``min_tokens`` None is formation without lookahead; ``link`` NO_HOST is recomputation."""
        prefix_cache.WORTH_WAITING_TOKENS = worth_waiting
        cost, speculative = CostCoefficients(0.2, 1.0, 0.5, 0.3, 0.1, 0.1), None
        if num_guesses is not None:
            speculative = SpeculativeConfig("ngram", num_guesses, 1, 3)
            cost = CostCoefficients(0.0, 0.01, 1.0, 1.0)  # guesses cost little
        self.link = link
        self.config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            lookahead=min_tokens is not None,
            min_microbatch_tokens=min_tokens or 1,
            tpot_slo_s=tpot_slo_s,
            speculative_config=speculative,
            enable_prefix_caching=caches,
            scheduler_reserve_full_isl=reserves,
        )
        self.measured = Measured(cost, SwapPlan(1.0, max_park_s=max_park_s))
        self.base_capacity = capacity
        self.max_model_len = 6 * BLOCK - 1
        self.now_s = 0.0
        self.requests: dict[RequestId, Request] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended: set[RequestId] = set()
        self.stalled: set[RequestId] = set()
        self.arriving: list[PrefixId] | None = None
        """Prefixes on their way, in an exchange."""
        self.exchanged_blocks = 0
        """Of all prefixes that the exchange under way brings."""
        self.salts: dict[RequestId, str] = {}
        self.num_held_back = 0
        """Steps from now on in which tokens are late."""
        self.form(stages, capacity, 0)

    def form(self, num_stages: int, capacity: int, group: int) -> None:
        self.num_stages = num_stages
        self.group = GroupId(group)
        self.scheduler = Scheduler(
            self.config,
            self.group,
            num_stages,
            BLOCK,
            capacity,
            frozenset({EOS}),
            23,
            host_link=self.link,
            measured=self.measured,
        )
        self.stages = Stages(self.link.capacity_blocks)
        self.stages.salts = self.salts
        self.plans: deque[tuple[StepPlan, list[int], StepId | None]] = deque()
        """With their input tokens; of one that runs ahead -1 - n for the n-th of another step."""
        self.sampled: dict[StepId, list[int]] = {}
        """By the steps that ran."""
        self.results: deque[StepResult] = deque()

    @rule(
        beginning=st.sampled_from([(), (1, 2, 4) * 3, (1, 2, 4) * 4, (1, 2, 4, 1) * 4]),
        salt=st.sampled_from(["", "", "a"]),
        prompt=st.lists(st.integers(0, 16), min_size=1, max_size=14),
        max_tokens=st.integers(1, 9),
        early=st.booleans(),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        penalty=st.sampled_from([0.0, 0.5]),
        has_form=st.sampled_from([False, False, True]),
        priority=st.sampled_from([0, 0, -1, 3]),
    )
    def arrive(
        self,
        beginning: tuple[int, ...],
        salt: str,
        prompt: list[int],
        max_tokens: int,
        early: bool,
        ignore_eos: bool,
        min_tokens: int,
        penalty: float,
        has_form: bool,
        priority: int,
    ) -> None:
        request = Request(
            RequestId(f"r{len(self.requests)}"),
            TokenIds((*beginning, *prompt)[:14]),
            SamplingParams(
                max_tokens,
                ignore_eos=ignore_eos and not has_form,
                min_tokens=0 if has_form else min(min_tokens, max_tokens),
                stop_token_ids=(3,),
                presence_penalty=penalty,
                structured=FORM if has_form else None,
            ),
            self.now_s - (5.0 if early else 0.0),
            cache_salt=salt,
            priority=priority,
        )
        self.salts[request.request_id] = salt
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.scheduler.add(request)

    @rule()
    def plan(self) -> None:
        self.now_s += 1.0
        could = self.scheduler.can_schedule
        running = {s.request_id for s in self.scheduler._holders}
        plan = self.scheduler.schedule(self.now_s)
        for request_id, lost_tokens in self.scheduler.drain_preemptions():
            assert request_id in running and (lost_tokens > 0 or self.link is not NO_HOST)
            assert self.scheduler.may_preempt
            self.check_victim(request_id, running)
        if plan is None:
            return
        assert self.link is not NO_HOST or not (plan.swapped_out or plan.swapped_in)
        assert could, "a driver that trusts can_schedule would have slept"
        assert plan.group_id == self.group
        assert 0 <= plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.chunks) <= self.config.max_num_seqs
        ids = [chunk.request_id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids) and self.stalled.isdisjoint(ids)
        for start in plan.started:
            known = (
                *self.requests[start.request_id].prompt_token_ids,
                *self.outputs[start.request_id],
            )
            assert start.token_ids == (known if start.sampling.needs_history else ())
        self.plans.append((plan, self.scheduler.token_ids_of(plan).tolist(), None))

    @rule(keeps_apart=st.booleans())
    def plan_ahead(self, keeps_apart: bool = False) -> None:
        """A body that does not feed requests with penalties back, or that does."""
        is_due = self.scheduler.num_in_flight > 0 and self.scheduler.feeds_on is None
        plan = self.scheduler.schedule_ahead(
            self.now_s,
            lambda sampling: (
                sampling.structured is None and not (keeps_apart and sampling.presence_penalty)
            ),
        )
        if plan is None:
            return
        assert is_due and self.config.speculative_config is None
        feeds_on = self.scheduler.feeds_on
        assert feeds_on is not None
        assert not (plan.released or plan.swapped_in or plan.swapped_out)
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.chunks) <= self.config.max_num_seqs
        known = self.scheduler.token_ids_of(plan).tolist()
        feeds = self.scheduler.feeds().tolist()
        fed = [
            -1 - place if place >= 0 else token for place, token in zip(feeds, known, strict=True)
        ]
        self.plans.append((plan, fed, feeds_on))

    def check_victim(self, request_id: RequestId, ran: set[RequestId]) -> None:
        """Nobody who goes on is less urgent (where a pause's bound does not ask for more)."""
        if self.link is not NO_HOST:
            return
        kept = [s for s in self.scheduler._holders if s.state is Progress.RUNNING]
        least = max((s.request.priority for s in kept if s.request_id in ran), default=-9)
        assert least <= self.requests[request_id].priority

    @precondition(lambda self: self.plans)
    @rule()
    def execute(self) -> None:
        plan, tokens, feeds_on = self.plans.popleft()
        if feeds_on is not None:
            sampled = self.sampled[feeds_on]
            tokens = [sampled[-1 - token] if token < 0 else token for token in tokens]
        held_back: set[RequestId] = set()
        if self.num_held_back:
            self.num_held_back -= 1
            held_back = {i for i, one in self.requests.items() if one.sampling.structured}
        result = self.stages.run(plan, tokens, held_back)
        self.sampled[plan.step_id] = [token.token_id for token in result.tokens]
        self.results.append(result)

    @precondition(lambda self: self.results)
    @rule()
    def complete(self) -> None:
        self.now_s += 1.0
        for output in self.scheduler.complete(self.results.popleft(), self.now_s):
            assert output.request_id not in self.ended
            tokens = self.outputs[output.request_id]
            assert output.position == len(tokens) and output.token_id is not None
            tokens.append(output.token_id)
            if output.finish_reason is not None:
                self.ended.add(output.request_id)
                request = self.requests[output.request_id]
                assert tokens == undisturbed(request, self.max_model_len)
                stopped = output.finish_reason is FinishReason.STOP
                assert (
                    stopped
                    or len(tokens) == request.sampling.max_tokens
                    or (len(tokens) + len(request.prompt_token_ids) == self.max_model_len)
                )

    @rule(count=st.integers(1, 6))
    def hold_back(self, count: int) -> None:
        """In so many steps nobody knows what a form allows."""
        self.num_held_back = count

    @rule(count=st.integers(1, 12), runs_ahead=st.booleans())
    def go_on(self, count: int, runs_ahead: bool) -> None:
        for _ in range(count):
            self.plan()
            self.scheduler.check()
            if runs_ahead:
                self.plan_ahead()
                self.scheduler.check()
            if self.plans:
                self.execute()
            if self.results:
                self.complete()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert not self.scheduler.abort(RequestId("nobody"))
        if not self.requests:
            return
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.scheduler.abort(request_id) == (request_id not in self.ended)
        self.ended.add(request_id)
        self.stalled.discard(request_id)

    @rule(blocks=st.integers(0, 30))
    def change_capacity(self, blocks: int) -> None:
        self.scheduler.set_capacity(blocks)

    @rule(allowed=st.booleans())
    def allow_preemption(self, allowed: bool) -> None:
        self.scheduler.may_preempt = allowed

    def drain(self) -> None:
        while self.plans:
            self.execute()
        while self.results:
            self.complete()

    @rule(num_stages=st.integers(1, 4), stall_every=st.integers(1, 4))
    def hand_over(self, num_stages: int, stall_every: int) -> None:
        self.drain()
        old = self.scheduler.cache
        prefixes = () if old is None else old.export()
        states = self.scheduler.export()
        assert not self.scheduler.has_work and self.scheduler.used_blocks == 0
        self.scheduler.check()
        assert {s.request.request_id for s in states} == self.requests.keys() - self.ended
        old_stages = self.stages
        kv, before = old_stages.kv, old_stages.prefixes
        self.form(num_stages, self.base_capacity, self.group + 1)
        for state in states:
            request_id = state.request.request_id
            assert list(state.output_token_ids) == self.outputs[request_id]
            if state.num_blocks:
                old_stages.forget_wrong(request_id, state.num_computed)
                assert state.num_blocks == -(-state.num_computed // BLOCK)
                self.stages.kv[request_id] = kv[request_id]
                self.stages.late |= old_stages.late & {request_id}
                if state.shared:
                    self.stages.shared[request_id] = list(state.shared)
        self.stalled = set(sorted(self.stages.kv)[::stall_every])
        if (cache := self.scheduler.cache) is not None:
            cache.adopt(prefixes)
            for one in prefixes:
                first, tokens, salt = before[one.prefix_id]
                tokens = tokens[: len(one.names) * BLOCK]
                self.stages.prefixes[one.prefix_id] = first, tokens, salt
            self.arriving = [prefix.prefix_id for prefix in prefixes]
            self.exchanged_blocks = sum(len(prefix.names) for prefix in prefixes)
        self.scheduler.adopt(states, self.stalled)

    @precondition(lambda self: self.arriving is not None)
    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        """A prefix arrives, or the exchange is over."""
        cache, arriving = self.scheduler.cache, self.arriving
        if arriving and data.draw(st.booleans()):
            cache.arrived(arriving.pop())
        else:
            for prefix_id in arriving:
                cache.arrived(prefix_id)
            cache.end_exchange()
            self.arriving, self.exchanged_blocks = None, 0

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.scheduler.resume(RequestId("nobody"))
        if self.stalled:
            request_id = data.draw(st.sampled_from(sorted(self.stalled)))
            self.stalled.remove(request_id)
            self.scheduler.resume(request_id)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        num_planned = self.scheduler.num_in_flight + self.scheduler._in_flight.is_ahead
        assert num_planned == len(self.plans) + len(self.results)
        load = self.scheduler.load(1, len(self.requests), self.now_s)
        live = len(self.requests) - len(self.ended)
        assert load.num_running + load.num_waiting + load.num_stalled == live
        assert load.num_stalled == len(self.stalled)
        assert load.growth_blocks >= 0 and load.stuck_s >= 0
        if not live and not self.plans and not self.results:
            # What an exchange brings stays until it is over: members still write it.
            assert load.demand_blocks == self.exchanged_blocks

    def teardown(self) -> None:
        """Once nothing disturbs it any more, everything ends: no deadlock, no leak."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.may_preempt = True
        prefix_cache.WORTH_WAITING_TOKENS = 128
        if self.arriving is not None:
            self.scheduler.cache.end_exchange()
        self.scheduler.set_capacity(self.base_capacity)
        for request_id in sorted(self.stalled):
            self.scheduler.resume(request_id)
        self.stalled = set()
        for _ in range(1500):
            if not self.scheduler.has_work:
                break
            in_flight = self.scheduler.num_in_flight
            self.plan()
            if self.scheduler.num_in_flight in (in_flight, self.num_stages):
                assert self.plans or self.results, "stuck"
                if self.plans:
                    self.execute()
                self.complete()
            self.scheduler.check()
        assert self.ended == self.requests.keys(), "not everybody ended"
        assert self.scheduler.used_blocks == 0
        assert not self.stages.host, "KV that nobody owns in host memory"
        assert not self.stages.kv, "the stages keep KV that nobody owns"
        cached = sum(len(tokens) // BLOCK for _, tokens, _ in self.stages.prefixes.values())
        assert cached == self.scheduler.cached_blocks


class AheadMachine(SchedulerMachine):
    """Of groups of one stage or two, where steps run ahead whenever they may."""

    def form(self, num_stages: int, capacity: int, group: int) -> None:
        self.config = replace(self.config, speculative_config=None, max_num_batched_tokens=12)
        super().form(min(num_stages, 2), capacity, group)

    @rule(count=st.integers(5, 15))
    def run_ahead(self, count: int) -> None:
        self.go_on(count, runs_ahead=True)


TestAhead = AheadMachine.TestCase
TestAhead.settings = settings(max_examples=examples(100), stateful_step_count=50)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(100), stateful_step_count=50)
