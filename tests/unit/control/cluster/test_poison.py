"""A request that kills every instance whose body touches it: others get all their tokens.

Wherever a body can raise, in a group of one or in a pipeline: the request ends with an error after
a few deaths at most, and nobody else notices more than a delay.
"""

from typing import Any

import pytest

from kunserve.control.cluster.requests.quarantine import Blame, Cause
from kunserve.control.instance.body import StepOutcome, StepWork
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.request import FinishReason
from kunserve_lab.world.actions import (
    Action,
    CompletePull,
    Delivery,
    FinishStep,
    StartStep,
)
from kunserve_lab.world.by_choice import ChosenWorld
from kunserve_lab.world.fake_body import FakeBody, expected_tokens
from tests.fake_cluster import FakeCluster

MOMENTS = ("prefill", "decode", "last token", "sampling", "forget", "copy", "drop", "reclaim")
PAIRS = ((0, 1), (2, 3))


class Poison(Exception):
    """The body cannot bear the request."""


class PoisonedBody(FakeBody):
    """Raises at one kind of moment if the victim is part of it."""

    victim: RequestId | None = None
    moment = ""
    max_tokens = 0

    def _raise_if(self, moment: str, request_id: RequestId | None = None) -> None:
        known = self.victim in self.known_requests if request_id is None else True
        if moment == self.moment and known and request_id in (None, self.victim):
            raise Poison(moment)

    def execute(self, work: StepWork, hidden: Any, look_up: Any = None) -> StepOutcome:
        for chunk in work.plan.chunks:
            if chunk.request_id != self.victim:
                continue
            self._raise_if("prefill", chunk.request_id)
            if chunk.start > 0 and chunk.num_tokens == 1:
                self._raise_if("decode", chunk.request_id)
                if chunk.start > 8:
                    self._raise_if("last token", chunk.request_id)
            if chunk.samples and work.is_last:
                self._raise_if("sampling", chunk.request_id)
        return super().execute(work, hidden, look_up)

    def forget(self, request_id: RequestId) -> None:
        self._raise_if("forget", request_id)
        super().forget(request_id)

    def copy_units(self, copies: Any) -> None:
        self._raise_if("copy")
        super().copy_units(copies)

    def drop(self, keep: Any) -> Any:
        self._raise_if("drop")
        return super().drop(keep)

    def reclaim(self, layers: Any) -> Any:
        self._raise_if("reclaim")
        return super().reclaim(layers)


class PoisonedCluster(FakeCluster):
    """Instances die of the victim, and are started again a little later."""

    def __init__(self, moment: str, num_instances: int, is_named: bool) -> None:
        self.moment = moment
        self.is_named = is_named
        self.last_chunks: tuple[RequestId, ...] = ()
        self.victim: RequestId | None = None
        self.num_deaths = 0
        super().__init__(pools=(16,) * num_instances, max_num_seqs=4)

    def start_instance(self, instance_id: InstanceId) -> None:
        super().start_instance(instance_id)
        body = self.members[instance_id].body
        body.__class__ = PoisonedBody
        assert isinstance(body, PoisonedBody)
        body.moment = self.moment
        body.victim = getattr(self, "victim", None)

    def poison(self, num_prompt: int, max_tokens: int) -> RequestId:
        """A request that the bodies cannot bear."""
        self.victim = RequestId(f"r{self._num_requests}")
        for member in self.members.values():
            member.body.victim = self.victim  # type: ignore[attr-defined]
        return self.request(num_prompt, max_tokens)

    def blame(self) -> Blame:
        """What the instance could say of its step."""
        return Blame(Cause.INSIDE, self.last_chunks if self.is_named else ())

    def perform(self, action: Action) -> None:
        self.last_chunks = ()
        if isinstance(action, FinishStep):
            work = self.members[action.instance_id].work
            assert work is not None
            self.last_chunks = tuple(chunk.request_id for chunk in work.step.plan.chunks)
        try:
            super().perform(action)
        except Poison:
            self.num_deaths += 1
            self.kill_instance(_actor(action), self.blame())

    def pass_time(self, seconds: float) -> None:
        for instance_id in tuple(self.dead):
            self.start_instance(instance_id)
        ChosenWorld.pass_time(self, seconds)

    def prove_all_but_the_victim(self) -> None:
        for request_id, account in self.accounts.items():
            true = expected_tokens(account.request, self.model, self.max_model_len)
            got = tuple(account.token_ids)
            if request_id == self.victim and account.end is FinishReason.ERROR:
                assert got == true[: len(got)]
            else:
                assert account.end in (FinishReason.LENGTH, FinishReason.STOP), request_id
                assert got == true, request_id


def _actor(action: Action) -> InstanceId:
    match action:
        case StartStep(instance_id) | FinishStep(instance_id):
            return instance_id
        case CompletePull():
            return action.instance_id
        case Delivery(_, dst):
            assert dst is not None
            return dst


def run(cluster: PoisonedCluster) -> None:
    """To the end of everything, with instances that come back."""
    for _ in range(30):
        cluster.run_except(lambda action: False)
        if not cluster.unfinished and not cluster.controller.transitions.active:
            return
        cluster.pass_time(0.6)
    raise AssertionError(f"hangs: {cluster.unfinished}")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("is_pipeline", [False, True], ids=["alone", "pipeline"])
@pytest.mark.parametrize("is_named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("num_instances", [1, 2, 4])
def test_it_ends_after_a_few_deaths_and_nobody_else_suffers(
    moment: str, is_pipeline: bool, num_instances: int, is_named: bool
) -> None:
    in_step = moment in ("prefill", "decode", "last token", "sampling")
    if (is_pipeline and num_instances == 1) or (is_named and (num_instances > 2 or not in_step)):
        return
    cluster = PoisonedCluster(moment, num_instances, is_named)

    def merge() -> None:
        for first, second in PAIRS[: num_instances // 2]:
            cluster.drop((first, 0, 2), (second, 2, 4))

    if is_pipeline:
        merge()
        cluster.run_until_idle()
    for _ in range(3 * num_instances):
        cluster.request(6, 9)
    victim = cluster.poison(6, 8)
    for _ in range(3 * num_instances):
        cluster.request(5, 7)
    begin = cluster.num_actions
    cluster.run_except(lambda action: False, lambda: cluster.num_actions >= begin + 60)
    if not is_pipeline and len(cluster.groups()) == num_instances > 1:
        merge()
    run(cluster)
    # Two among others, one for each halving of those that may run at once, two more alone.
    assert cluster.num_deaths <= 2 + 4 + (0 if is_named else 2)
    cluster.prove_all_but_the_victim()
    # At the other moments each run makes one more token: the request may get to its end.
    if moment in ("prefill", "sampling"):
        assert cluster.num_deaths >= 3
        assert cluster.accounts[victim].end is FinishReason.ERROR
        state = cluster.controller.state(cluster.now_s)
        assert state.num_guilty == 1 and state.num_quarantined >= 1
    cluster.check()
