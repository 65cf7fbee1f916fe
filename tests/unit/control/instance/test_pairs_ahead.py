"""What a pair's first stage may not do before it has heard of the tokens that a step awaits."""

from typing import Any

from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.body import StepWork
from kunserve.control.instance.state import AgentConfig
from kunserve.control.instance.work import Work
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import Form, Sampled
from kunserve.core.plan import NOTHING_MEASURED
from kunserve.core.step import SampledToken, StepResult
from kunserve_lab.world.fake_body import FakeBody, FakeModel, fake_spec
from kunserve_lab.world.mover import WorldMover
from tests.unit.control.instance.test_steps_ahead import ahead, begin, chunks_of, end, submit

ONE_STREAM, GROUP = RequestId("decode"), GroupId(1)
TOKEN = 7


class Leader:
    """It has asked for a second step of its only request; the first one's token is on its way."""

    def __init__(self, *, finds_room: bool = True) -> None:
        specs = [fake_spec(InstanceId(number), 2, 64, 2) for number in range(2)]
        self.body = FakeBody(specs[0], FakeModel(2))
        scheduler = SchedulerConfig(max_num_seqs=4, async_scheduling=True)
        config = AgentConfig(InstanceId(0), scheduler, NOTHING_MEASURED, frozenset(), 64)
        self.agent = agent = InstanceAgent(config, self.body, WorldMover())
        layers = (LayerRange(0, 1), LayerRange(1, 2))
        stages = tuple(Stage(InstanceId(n), one) for n, one in enumerate(layers))
        agent.on(Form(GroupLayout(GROUP, stages), tuple(specs)), 0.0)
        submit(agent, ONE_STREAM, 2)
        work = begin(agent)
        grow = agent.state.table.grow

        def packed(*given: Any, may_compact: bool = True) -> Any:
            return grow(*given) if may_compact or finds_room else None

        agent.state.table.grow = packed  # type: ignore[method-assign]
        self.following = ahead(agent)
        end(agent, self.body, work)
        self.body.board[GROUP, StepId(0)] = (SampledToken(ONE_STREAM, TOKEN, None),)

    def run(self, work: Work) -> None:
        end(self.agent, self.body, work)

    def hear(self) -> None:
        """Of the token."""
        tokens = self.body.board[GROUP, StepId(0)]
        self.agent.on(Sampled(StepResult(GROUP, StepId(0), tokens)), 0.0)
        self.agent.check()


def test_nobody_is_planned_behind_a_step_whose_tokens_are_not_here() -> None:
    """That step advances once they are: others would be planned as if it were not there."""
    leader = Leader()
    assert leader.following is not None and chunks_of(leader.following) == {ONE_STREAM: (2, 1)}
    leader.run(leader.following)
    submit(leader.agent, "late", 2)
    assert not leader.agent.has_ready_work() and leader.agent.next_work(0.0) is None
    leader.hear()
    assert leader.agent.has_ready_work()
    assert chunks_of(begin(leader.agent)) == {"late": (0, 2)}


def test_a_step_that_lacked_room_to_run_ahead_waits_for_its_tokens() -> None:
    """Then it is like any other: it computes them as known ones."""
    leader = Leader(finds_room=False)
    assert leader.following is None
    assert not leader.agent.has_ready_work() and leader.agent.next_work(0.0) is None
    leader.hear()
    work = begin(leader.agent)
    assert isinstance(work.step, StepWork) and work.step.token_ids is not None
    assert chunks_of(work) == {ONE_STREAM: (2, 1)}
    assert work.step.token_ids.tolist() == [TOKEN] and not work.step.awaits_tokens
    leader.run(work)
