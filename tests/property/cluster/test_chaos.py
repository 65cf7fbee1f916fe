"""Chaos in virtual time: a cluster under load while everything that can go wrong does.

Deaths (in steps, exchanges and loads too), instances that hang, poison requests that kill whoever
runs them, aborts, forced drops and restores, in any interleaving. Afterwards every accepted
request has ended exactly once, with its own tokens, and no block of any is left. A schedule is a
list of plain values, so that Hypothesis prints and shrinks what fails. ``make chaos-sim`` runs
10,000 of them. Two schedules are two minutes long, with a fault about every two seconds and fronts
that die: what ``make chaos`` does in real time, compressed.
"""

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.control.cluster.requests.quarantine import Blame, Cause
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.request import FinishReason
from kunserve_lab.world.actions import Action, CompletePull, FinishStep
from kunserve_lab.world.by_choice import ChosenMember
from kunserve_lab.world.fake_body import expected_tokens
from tests.fake_cluster import FakeCluster, place_of

NUM_SCHEDULES = int(os.environ.get("CHAOS_SCHEDULES", "40"))
MAX_DEATHS = 6
"""Of one schedule, those by poison left out."""
MAX_POISON = 2
LONG_S = 120.0
"""Virtual time of a long schedule."""
BETWEEN_HARMS_S = 2.0
"""On average, in a long one."""
MAX_OPEN = 10
"""Requests under way there."""
MAX_ROUNDS = 3_000
"""Of everything that may happen, until all must have ended."""


class Load(NamedTuple):
    """Requests arrive."""

    count: int
    num_prompt: int
    max_tokens: int
    is_poison: bool


class Run(NamedTuple):
    """Things happen, in an order drawn from the seed; pulls fail now and then."""

    num_actions: int
    seed: int


class Wait(NamedTuple):
    """Time passes."""

    seconds: float


class Harm(NamedTuple):
    """One of what can go wrong, or be asked for by hand. ``which`` chooses among whom it may."""

    kind: str
    which: int


_rarely = st.sampled_from([False] * 11 + [True])
MAX_INSTANCES = 5
"""To which operators let the cluster grow."""
_harms = [
    *("drop", "drop", "restore", "restore", "kill", "hang", "start", "cancel", "lose", "double"),
    *("resize", "resize"),
]
_loads = st.builds(Load, st.integers(1, 6), st.integers(1, 14), st.integers(1, 10), _rarely)
_runs = st.builds(Run, st.integers(1, 150), st.integers(0, 2**16))
_waits = st.builds(Wait, st.sampled_from([0.1, 0.6, 3.0]))
_harm = st.builds(Harm, st.sampled_from(_harms), st.integers(0, 7))
schedules = st.lists(
    st.one_of(_loads, _loads, _runs, _runs, _runs, _waits, _harm, _harm), min_size=12, max_size=40
)


class ChaosCluster(FakeCluster):
    """An in-process cluster with hung instances and poison requests."""

    def __init__(
        self, num_instances: int, max_deaths: int = MAX_DEATHS, max_poison: int = MAX_POISON
    ) -> None:
        self.max_deaths = max_deaths
        self.max_poison = max_poison
        self.poison: set[RequestId] = set()
        self.hung: set[InstanceId] = set()
        self.num_deaths = 0
        self.num_poison_deaths: Counter[RequestId] = Counter()
        self.is_healing = False
        self.wanted: int | None = None
        """Instances that an operator asked this front for last."""
        super().__init__(pools=(12,) * num_instances)
        spec = self._specs[InstanceId(0)]
        for instance_id in map(InstanceId, range(num_instances, MAX_INSTANCES)):
            self._specs[instance_id] = replace(spec, instance_id=instance_id)

    def actions(self) -> list[Action]:
        """Nothing happens in a hung instance; what it has sent is on its way."""
        return [action for action in super().actions() if place_of(action) not in self.hung]

    def perform(self, action: Action) -> None:
        """Let it happen; a step over poison kills its instance instead of ending."""
        if isinstance(action, FinishStep):
            work = self.members[action.instance_id].work
            assert work is not None
            if any(chunk.request_id in self.poison for chunk in work.step.plan.chunks):
                self._die_of_poison(action.instance_id, work)
                return
        super().perform(action)

    def _die_of_poison(self, instance_id: InstanceId, work: Work) -> None:
        """Every other process can say what was in its step."""
        chunks = tuple(chunk.request_id for chunk in work.step.plan.chunks)
        self.num_poison_deaths.update(self.poison.intersection(chunks))
        is_named = self.num_poison_deaths.total() % 2 == 0
        self.kill_instance(instance_id, Blame(Cause.INSIDE, chunks if is_named else ()))

    def pass_time(self, seconds: float) -> None:
        """Let time pass. A dead one is replaced at the end."""
        if self.is_healing:
            self.heal()
        super().pass_time(seconds)

    def report(self, member: ChosenMember) -> None:
        """Who hangs says nothing."""
        if member.instance_id not in self.hung:
            super().report(member)

    def heal(self) -> None:
        """A driver finds who hangs, and starts whoever is dead."""
        self.is_healing = True
        for instance_id in sorted(self.hung):
            self._lose_hung(instance_id)
        for instance_id in list(self.dead):
            self.start_instance(instance_id)
        while self.num_ordered:
            self._start_ordered()

    def _start_ordered(self) -> None:
        taken = {*self.members, *self.dead}
        free = [i for i in map(InstanceId, range(MAX_INSTANCES + 1)) if i not in taken]
        self.start_ordered(free[0])

    def finish(self) -> None:
        """Run to the end of every request and prove everything; fail soon if there is none."""
        self.run_until_idle(max_actions=MAX_ROUNDS)
        if self.wanted is not None:
            self._prove_size(self.wanted)
        self.check_empty()
        self.prove_tokens()

    def _give_back(self, instance_id: InstanceId) -> None:
        super().give_back(instance_id)
        self.hung.discard(instance_id)

    def _prove_size(self, wanted: int) -> None:
        """The cluster gets to the size that was asked for, once its pipelines are restored."""
        for _ in range(20):
            if len(self.members) == wanted:
                break
            for group in self.groups():
                if len(group.stages) > 1:
                    self.restore(group)
            self.run_until_idle(max_actions=MAX_ROUNDS)
            self.pass_time(0.6)
        assert len(self.members) == wanted, (sorted(self.members), wanted)
        size = self.controller.state(self.now_s).size
        assert (size.wanted, size.ordered, size.leaving) == (wanted, 0, 0), size

    def harm(self, kind: str, which: int) -> None:
        """Nothing, where there is nobody to harm."""
        living = sorted(self.members)
        match kind:
            case "kill" if living and self.num_deaths < self.max_deaths:
                self.num_deaths += 1
                victim = living[which % len(living)]
                self.hung.discard(victim)
                self.kill_instance(victim, Blame([Cause.NOBODY, Cause.OUTSIDE][which % 2]))
            case "hang" if living and self.num_deaths < self.max_deaths:
                self.num_deaths += 1
                self.hung.add(living[which % len(living)])
            case "start" if self.hung:
                self._lose_hung(sorted(self.hung)[which % len(self.hung)])
            case "start" if self.dead:
                self.start_instance(self.dead[which % len(self.dead)])
            case "start" if self.num_ordered:
                self._start_ordered()
            case "resize":
                self.wanted = 1 + which % MAX_INSTANCES
                self.resize(self.wanted)
            case "cancel" if self.unfinished:
                self.cancel(self.unfinished[which % len(self.unfinished)])
            case "lose" | "double" if full := self._links_in_use():
                src, dst = full[which % len(full)]
                (self.lose if kind == "lose" else self.double)(src, dst)
            case "front":
                for instance_id in sorted(self.hung):
                    self._lose_hung(instance_id)
                self.restart_front(loses_mail=bool(which % 2))
                self.wanted = None
            case "drop":
                self.controller.force_drop(None, self.now_s)
                self.carry_out()
            case "restore":
                merged = [group for group in self.groups() if len(group.stages) > 1]
                if merged:
                    self.restore(merged[which % len(merged)])

    def _links_in_use(self) -> list[tuple[InstanceId, InstanceId]]:
        """Between instances, with something on its way."""
        return [
            (src, dst)
            for (src, dst), letters in self.links.items()
            if src is not None and dst is not None and letters
        ]

    def prove_tokens(self) -> None:
        """Poison ends with an error, after a few deaths, and nothing else does.

        A poison request kills twice among others, once for each halving of what may run at once,
        and twice more alone. Each death of another cause may have it released once.
        """
        for request_id, num_deaths in self.num_poison_deaths.items():
            others = self.num_deaths + self.num_poison_deaths.total() - num_deaths
            assert num_deaths <= 2 + 4 + 2 + others, (request_id, self.num_poison_deaths)
        for request_id, account in self.accounts.items():
            true = expected_tokens(account.request, self.model, self.max_model_len)
            got = tuple(account.token_ids)
            assert got == true[: len(got)], (request_id, got, true)
            if account.is_cancelled:
                continue
            assert account.end is not None, request_id
            if request_id in self.poison:
                assert account.end is FinishReason.ERROR, (request_id, account)
            else:
                assert account.end is not FinishReason.ERROR, (request_id, account)
                assert got == true, (request_id, got, true)

    def _lose_hung(self, instance_id: InstanceId) -> None:
        self.hung.remove(instance_id)
        self.kill_instance(instance_id, Blame(Cause.INSIDE))


def play(cluster: ChaosCluster, schedule: Iterable[Load | Run | Wait | Harm]) -> None:
    for event in schedule:
        match event:
            case Load(count, num_prompt, max_tokens, is_poison):
                for _ in range(count):
                    request_id = cluster.request(num_prompt, max_tokens)
                    if is_poison and len(cluster.poison) < cluster.max_poison:
                        cluster.poison.add(request_id)
            case Run(num_actions, seed):
                draw = random.Random(seed)
                for _ in range(num_actions):
                    found = cluster.actions()
                    if not found:
                        break
                    action = draw.choice(found)
                    if isinstance(action, CompletePull) and draw.random() < 0.1:
                        action = CompletePull(action.instance_id, action.index, fails=True)
                    cluster.perform(action)
                cluster.check()
            case Wait(seconds):
                cluster.pass_time(seconds)
            case Harm(kind, which):
                cluster.harm(kind, which)


@pytest.mark.timeout(600)  # a failure takes minutes to shrink
@settings(max_examples=NUM_SCHEDULES)
@given(num_instances=st.integers(1, 4), schedule=schedules)
def test_chaos_leaves_every_request_ended_once_with_its_tokens(
    num_instances: int, schedule: list[Load | Run | Wait | Harm]
) -> None:
    cluster = ChaosCluster(num_instances)
    play(cluster, schedule)
    cluster.heal()
    cluster.finish()


def two_minutes(cluster: ChaosCluster, draw: random.Random) -> Iterator[Load | Run | Wait | Harm]:
    """Faults all the time, under load; most dead instances are started again soon."""
    next_harm_s = 0.0
    kinds = [*_harms, "start", "start", "start", "front"]
    while cluster.now_s < LONG_S:
        if len(cluster.unfinished) < MAX_OPEN:
            is_poison = draw.random() < 0.02
            yield Load(draw.randint(1, 3), draw.randint(1, 14), draw.randint(1, 10), is_poison)
        yield Run(draw.randint(1, 60), draw.randrange(2**16))
        if cluster.now_s >= next_harm_s:
            next_harm_s = cluster.now_s + draw.expovariate(1.0 / BETWEEN_HARMS_S)
            yield Harm(draw.choice(kinds), draw.randrange(8))
        yield Wait(draw.choice([0.1, 0.6, 1.0]))


@pytest.mark.parametrize("seed", [1, 2])
def test_two_minutes_of_chaos(seed: int) -> None:
    draw = random.Random(seed)
    cluster = ChaosCluster(4, max_deaths=100, max_poison=20)
    play(cluster, two_minutes(cluster, draw))
    cluster.heal()
    cluster.finish()
    assert cluster.num_fronts and cluster.num_deaths and len(cluster.accounts) > 100
