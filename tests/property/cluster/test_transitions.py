"""Random lives of a cluster: whatever happens, every request gets exactly its own tokens,
and the log-probabilities of its prompt where it asked for them.

Arrivals, aborts, steps, messages, pulls, drops, restores, rollbacks, live migrations, preemptions,
deaths of instances and of the front in any interleaving, over bodies whose tokens depend on every
byte of KV.
"""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kunserve.control.cluster.requests.quarantine import Blame, Cause
from kunserve.control.instance.body import StepWork
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.plan import SwapPlan
from kunserve.core.request import SamplingParams, StructuredOutput
from kunserve_lab.world.actions import CompletePull
from tests.examples import examples
from tests.fake_cluster import FakeCluster

MAX_REQUESTS = 40
MAX_BLAMED = 3

pytestmark = pytest.mark.timeout(900)  # a busy machine

FORM = StructuredOutput("regex", ".*")
"""Fake bodies give every third token of such a request late."""
SWAPS = (
    None,
    SwapPlan(1e4),
    SwapPlan(1e7),
    SwapPlan(1e7, 500),
    SwapPlan(1e7, max_park_s=0.5),
    SwapPlan(1e7, 500, max_park_s=5.0, is_second_line=True),
)


class TransitionsMachine(RuleBasedStateMachine):
    """The real controller and agents over fake bodies."""

    cluster: FakeCluster
    num_blamed = 0
    """Deaths that speak against requests."""

    @initialize(
        num_layers=st.integers(4, 9),
        pools=st.lists(st.sampled_from([8, 10, 10, 10, 16]), min_size=1, max_size=4),
        block_size=st.sampled_from([1, 2, 4]),
        layer_units=st.sampled_from([12, 24, 60]),
        max_num_seqs=st.sampled_from([3, 8]),
        max_num_batched_tokens=st.sampled_from([4, 16]),
        extra_units=st.integers(0, 3),
        swap=st.sampled_from(SWAPS),
        head_cost_layers=st.sampled_from([None, 0.5, 3.0]),
        runs_ahead=st.booleans(),
        num_late_steps=st.sampled_from([0, 1, 3]),
    )
    def start(self, runs_ahead: bool, **given: Any) -> None:
        self.cluster = FakeCluster(**given)
        self.cluster.runs_ahead = runs_ahead

    # Requests

    @rule(
        num_prompt=st.integers(1, 40),
        max_tokens=st.integers(1, 16),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        penalty=st.sampled_from([0.0, 0.0, 1.0]),
        scores=st.sampled_from([None, 1]),
        form=st.sampled_from([None, None, FORM]),
        count=st.integers(1, 6),
        num_common=st.sampled_from([0, 12, 13, 40]),
        salt=st.sampled_from(["", "", "a"]),
    )
    def arrive(
        self,
        num_prompt: int,
        max_tokens: int,
        temperature: float,
        seed: int,
        penalty: float,
        scores: int | None,
        form: StructuredOutput | None,
        count: int,
        num_common: int,
        salt: str,
    ) -> None:
        cluster = self.cluster
        longest = cluster.max_model_len
        num_prompt = min(num_prompt, longest - 1)
        sampling = SamplingParams(
            max_tokens=min(max_tokens, longest - num_prompt),
            temperature=temperature,
            seed=seed,
            frequency_penalty=penalty,
            num_prompt_logprobs=scores,
            structured=form,
        )
        for _ in range(count):
            if len(cluster.accounts) < MAX_REQUESTS:
                cluster.request(num_prompt, sampling=sampling, num_common=num_common, salt=salt)

    @precondition(lambda self: self.cluster.unfinished)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cluster.cancel(data.draw(st.sampled_from(self.cluster.unfinished)))

    # What machines and networks do

    @rule(choice=st.integers(0, 63))
    def act(self, choice: int) -> None:
        actions = self.cluster.actions()
        if actions:
            self.cluster.perform(actions[choice % len(actions)])

    @rule(count=st.integers(1, 60), seed=st.integers(0, 2**16), fails=st.booleans())
    def act_much(self, count: int, seed: int, fails: bool) -> None:
        draw = random.Random(seed)
        for _ in range(count):
            actions = self.cluster.actions()
            if not actions:
                return
            action = draw.choice(actions)
            if isinstance(action, CompletePull) and fails and draw.random() < 0.1:
                action = CompletePull(action.instance_id, action.index, fails=True)
            self.cluster.perform(action)
            self.cluster.check()

    @rule(seconds=st.sampled_from([0.1, 0.6]))
    def wait(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    # Transitions

    @precondition(lambda self: len(self.cluster.groups()) > 1)
    @rule(data=st.data(), size=st.integers(2, 3), seed=st.integers(0, 2**16))
    def drop(self, data: st.DataObject, size: int, seed: int) -> None:
        groups = self.cluster.groups()
        old = tuple(data.draw(st.permutations(groups))[:size])
        new = self.merged(old, random.Random(seed))
        if new is not None:
            self.cluster.drop_to(old, new)

    def merged(self, old: tuple[GroupLayout, ...], draw: random.Random) -> GroupLayout | None:
        """Any split, even or not, that moves no parameters."""
        held = {stage.instance_id: stage.layers for layout in old for stage in layout.stages}
        num_layers = self.cluster.model.num_layers
        if len(held) > num_layers:
            return None
        for _ in range(50):
            order = draw.sample(sorted(held), len(held))
            inner = sorted(draw.sample(range(1, num_layers), len(held) - 1))
            cuts = [0, *inner, num_layers]
            stages = tuple(
                Stage(InstanceId(m), LayerRange(cuts[i], cuts[i + 1])) for i, m in enumerate(order)
            )
            if all(held[stage.instance_id].covers(stage.layers) for stage in stages):
                return GroupLayout(self.cluster.controller.placement.new_ids(1), stages)
        return None

    @precondition(lambda self: any(len(g.stages) > 1 for g in self.cluster.groups()))
    @rule(data=st.data(), capacity=st.one_of(st.none(), st.integers(1, 40)))
    def restore(self, data: st.DataObject, capacity: int | None) -> None:
        merged = [group for group in self.cluster.groups() if len(group.stages) > 1]
        self.cluster.restore(data.draw(st.sampled_from(merged)), capacity)

    @precondition(lambda self: self.cluster.controller.transitions.active)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        active = sorted(self.cluster.controller.transitions.active)
        self.cluster.roll_back(data.draw(st.sampled_from(active)))

    @precondition(lambda self: self.cluster.groups())
    @rule(data=st.data())
    def allow_parking(self, data: st.DataObject) -> None:
        self.cluster.allow_parking(data.draw(st.sampled_from(self.cluster.groups())))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.cluster.reset_prefix_cache()

    # Migrations

    @precondition(lambda self: len(self.single_groups()) > 1)
    @rule(data=st.data(), max_blocks=st.sampled_from([2, 5, 1000]))
    def migrate(self, data: st.DataObject, max_blocks: int) -> None:
        groups = st.permutations(self.single_groups())
        source, target = data.draw(groups)[:2]
        self.cluster.migrate(source, target, max_blocks)

    def single_groups(self) -> list[GroupId]:
        busy = self.cluster.controller.placement.migrating
        groups = [group for group in self.cluster.groups() if len(group.stages) == 1]
        return [group.group_id for group in groups if group.group_id not in busy]

    # Deaths

    @precondition(lambda self: len(self.cluster.members) > 1)
    @rule(
        data=st.data(),
        certainty=st.integers(0, 3),
        cause=st.sampled_from(list(Cause)),
        is_named=st.booleans(),
    )
    def kill(self, data: st.DataObject, certainty: int, cause: Cause, is_named: bool) -> None:
        if certainty != 0:
            return
        victim = data.draw(st.sampled_from(sorted(self.cluster.members)))
        work = self.cluster.members[victim].work
        named: tuple[RequestId, ...] = ()
        if is_named and isinstance(work and work.step, StepWork):
            assert work is not None
            named = tuple(chunk.request_id for chunk in work.step.plan.chunks)
        # So often that no innocent is convicted: twice where the step is named.
        self.num_blamed += (cause is Cause.INSIDE) * (2 if named else 1)
        if self.num_blamed > MAX_BLAMED:
            cause, named = Cause.NOBODY, ()
        self.cluster.kill_instance(victim, Blame(cause, named))

    @rule(data=st.data(), refusal=st.sampled_from([None, None, "no memory"]))
    def refuse_memory(self, data: st.DataObject, refusal: str | None) -> None:
        """From now on a member's memory can be mapped, or not."""
        members = sorted(self.cluster.members)
        if members:
            self.cluster.members[data.draw(st.sampled_from(members))].body.refusal = refusal

    @precondition(lambda self: self.cluster.dead)
    @rule()
    def start_again(self) -> None:
        self.cluster.start_instance(self.cluster.dead[0])

    @rule(certainty=st.integers(0, 3), loses_mail=st.booleans())
    def front_dies(self, certainty: int, loses_mail: bool) -> None:
        if certainty == 0:
            self.cluster.restart_front(loses_mail=loses_mail)

    # Proof

    @invariant()
    def everybody_checks(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            for instance_id in list(self.cluster.dead):
                self.cluster.start_instance(instance_id)
            self.cluster.finish()


TestTransitions = TransitionsMachine.TestCase
TestTransitions.settings = settings(max_examples=examples(80), stateful_step_count=40)
