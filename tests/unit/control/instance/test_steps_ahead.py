"""What may not be done for a step that runs ahead, because the step before it still computes."""

import pytest

from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.body import StepOutcome, StepWork, UnitCopy
from kunserve.control.instance.state import AgentConfig
from kunserve.control.instance.work import Work
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import Abort, Form, Submit
from kunserve.core.plan import NOTHING_MEASURED
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.fake_body import FakeBody, FakeModel, fake_spec
from kunserve_lab.world.mover import WorldMover

NUM_LAYERS = 2
BLOCK_SIZE = 2
WHOLE = LayerRange(0, NUM_LAYERS)


class NotedBody(FakeBody):
    """Notes what is moved."""

    copied: tuple[UnitCopy, ...] = ()

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        super().copy_units(copies)
        self.copied += copies


def agent_with(kv_units: int) -> tuple[InstanceAgent, NotedBody]:
    """It leads a group of its own."""
    spec = fake_spec(InstanceId(0), NUM_LAYERS, kv_units, BLOCK_SIZE)
    body = NotedBody(spec, FakeModel(NUM_LAYERS))
    scheduler = SchedulerConfig(
        max_num_batched_tokens=16,
        max_num_seqs=4,
        enable_prefix_caching=False,
        async_scheduling=True,
    )
    config = AgentConfig(InstanceId(0), scheduler, NOTHING_MEASURED, frozenset(), 64)
    agent = InstanceAgent(config, body, WorldMover())
    agent.on(Form(GroupLayout(GroupId(1), (Stage(InstanceId(0), WHOLE),)), (spec,)), 0.0)
    return agent, body


def submit(agent: InstanceAgent, name: str, num_prompt: int) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    prompt = TokenIds(range(1, 1 + num_prompt))
    agent.on(Submit(Request(RequestId(name), prompt, sampling, 0.0)), 0.0)


def begin(agent: InstanceAgent) -> Work:
    work = agent.next_work(0.0)
    assert work is not None and isinstance(work.step, StepWork)
    return work


def ahead(agent: InstanceAgent) -> Work | None:
    return agent.next_ahead(lambda sampling: True)


def end(agent: InstanceAgent, body: FakeBody, work: Work) -> StepOutcome:
    outcome = work.run(body)
    agent.finished(work, outcome, 0.0)
    return outcome


def test_no_block_is_moved_under_a_running_step() -> None:
    """What runs was told where its blocks are. Two units are free for the next, but apart."""
    agent, body = agent_with(kv_units=9)
    table = agent.state.table
    table.set_layers(LayerRange(0, 1), 9)  # blocks of one unit, as stages of a layer leave them
    others = [RequestId(f"other {number}") for number in range(5)]
    for other in others:
        table.grow(other, 1)
    table.set_layers(WHOLE, 9)
    submit(agent, "r", 3)
    work = begin(agent)  # two blocks behind them
    assert table.free_units == 0
    table.release(others[1])
    table.release(others[3])
    (following,) = [ahead(agent)]
    assert following is not None, "the second block has room for one more token"
    end(agent, body, work)
    before = table.tables.copy()
    assert ahead(agent) is None, "a third block is to be made room for"
    assert body.copied == () and (table.tables == before).all()
    end(agent, body, following)
    work = begin(agent)
    assert body.copied, "once nothing runs"
    assert work.step.plan.chunks[0].start == 4  # type: ignore[union-attr]
    end(agent, body, work)


@pytest.mark.parametrize("is_left", [True, False])
def test_nothing_runs_ahead_while_something_waits_to_be_freed(is_left: bool) -> None:
    """Steps that run ahead free nothing, so one behind the other would keep it for good."""
    agent, body = agent_with(kv_units=24)
    submit(agent, "r0", 3)
    submit(agent, "r1", 3)
    end(agent, body, begin(agent))
    work = begin(agent)
    if is_left:
        agent.on(Abort(RequestId("r1")), 0.0)
    assert (ahead(agent) is None) is is_left
    if not is_left:
        return
    end(agent, body, work)
    step = begin(agent).step
    assert isinstance(step, StepWork) and step.plan.released == (RequestId("r1"),)
    assert RequestId("r1") not in agent.state.table.rows


def test_nothing_runs_ahead_of_who_was_kept_out_by_a_full_step_alone() -> None:
    """There is memory for it, so the next step takes it in."""
    agent, body = agent_with(kv_units=80)
    submit(agent, "long", 32)
    submit(agent, "late", 4)
    end(agent, body, begin(agent))
    work = begin(agent)
    assert isinstance(work.step, StepWork)
    assert sum(chunk.num_tokens for chunk in work.step.plan.chunks) == 16, "it is full"
    assert ahead(agent) is None
    end(agent, body, work)
    step = begin(agent).step
    assert isinstance(step, StepWork)
    assert RequestId("late") in {chunk.request_id for chunk in step.plan.chunks}
