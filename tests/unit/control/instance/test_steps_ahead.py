"""What may not be done for a step that runs ahead, because the step before it still computes."""

from typing import Any

import pytest

from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.body import StepOutcome, StepWork, UnitCopy
from kunserve.control.instance.state import AgentConfig
from kunserve.control.instance.work import Work
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import Abort, Form, Outputs, Report, Submit
from kunserve.core.plan import NOTHING_MEASURED
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.fake_body import FakeBody, FakeModel, fake_spec
from kunserve_lab.world.mover import WorldMover

NUM_LAYERS = 2
BLOCK_SIZE = 2
WHOLE = LayerRange(0, NUM_LAYERS)
Tokens = dict[RequestId, list[int | None]]


class Device:
    """See ``RunsAhead``."""

    def __init__(self, *, penalises: bool = True) -> None:
        self.penalises = penalises

    def feeds_back(self, sampling: SamplingParams) -> bool:
        return self.penalises or not sampling.presence_penalty

    def reads_ahead(self, hidden: Any) -> bool:
        return True


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


def submit(agent: InstanceAgent, name: str, num_prompt: int, presence_penalty: float = 0.0) -> None:
    sampling = SamplingParams(8, temperature=0.0, presence_penalty=presence_penalty)
    prompt = TokenIds(range(1, 1 + num_prompt))
    agent.on(Submit(Request(RequestId(name), prompt, sampling, 0.0)), 0.0)


def begin(agent: InstanceAgent) -> Work:
    work = agent.next_work(0.0)
    assert work is not None and isinstance(work.step, StepWork)
    return work


def ahead(agent: InstanceAgent) -> Work | None:
    return agent.next_ahead(0.0, Device())


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


def chunks_of(work: Work) -> dict[str, tuple[int, int]]:
    """Start and number of tokens of each."""
    assert isinstance(work.step, StepWork)
    return {c.request_id: (c.start, c.num_tokens) for c in work.step.plan.chunks}


def serve(*, runs_ahead: bool) -> tuple[list[dict[str, tuple[int, int]]], list[bool], Tokens]:
    """One request decodes when a long prompt comes, in chunks, and then a short one."""
    agent, body = agent_with(kv_units=200)
    submit(agent, "decode", 3)
    work: Work | None = begin(agent)
    chunks, ahead_of = [], [False]
    while work is not None:
        chunks.append(chunks_of(work))
        if len(chunks) == 2:
            submit(agent, "long", 50)
        if len(chunks) == 4:
            submit(agent, "late", 5)
        following = ahead(agent) if runs_ahead else None
        agent.state.table.check()
        end(agent, body, work)
        agent.check()
        work = following or agent.next_work(0.0)
        ahead_of.append(following is not None)
    tokens: Tokens = {}
    for _, message, _ in agent.outbox:
        for token in message.tokens if isinstance(message, Outputs) else ():
            tokens.setdefault(token.request_id, []).append(token.token_id)
    return chunks, ahead_of, tokens


def test_chunks_of_a_prompt_and_who_begins_run_ahead_beside_decodes() -> None:
    """The same steps as one after the other give, and the same tokens."""
    one_by_one, _, expected = serve(runs_ahead=False)
    chunks, ahead_of, tokens = serve(runs_ahead=True)
    assert tokens == expected and {len(t) for t in tokens.values()} == {8}
    assert chunks == one_by_one
    mixed = [c for c, is_ahead in zip(chunks, ahead_of, strict=False) if is_ahead and "long" in c]
    assert {"decode": (5, 1), "long": (15, 15)} in mixed, mixed
    assert any("late" in c and c["late"] == (0, 5) for c in mixed), mixed
    assert sum(ahead_of) >= 10, ahead_of


def test_who_ends_meanwhile_leaves_the_chunk_beside_it_what_it_was() -> None:
    agent, body = agent_with(kv_units=200)
    submit(agent, "decode", 3)
    end(agent, body, begin(agent))
    submit(agent, "long", 40)
    work = begin(agent)
    following = ahead(agent)
    assert following is not None
    assert chunks_of(following) == {"decode": (4, 1), "long": (15, 15)}
    agent.on(Abort(RequestId("decode")), 0.0)
    end(agent, body, work)
    agent.check()
    assert ahead(agent) is None, "its memory is to be freed"
    end(agent, body, following)
    assert chunks_of(begin(agent)) == {"long": (30, 10)}


def test_who_begins_ahead_and_is_aborted_before_leaves_nothing() -> None:
    agent, body = agent_with(kv_units=200)
    submit(agent, "decode", 3)
    work = begin(agent)
    submit(agent, "late", 5)
    following = ahead(agent)
    assert following is not None and chunks_of(following)["late"] == (0, 5)
    agent.on(Abort(RequestId("late")), 0.0)
    end(agent, body, work)
    end(agent, body, following)
    assert chunks_of(begin(agent)).keys() == {"decode"}
    assert RequestId("late") not in agent.state.table.rows
    agent.check()


def test_who_needs_its_token_here_is_not_begun_ahead_of_it() -> None:
    agent, body = agent_with(kv_units=200)
    submit(agent, "decode", 3)
    work = begin(agent)
    submit(agent, "long", 40, presence_penalty=0.5)
    assert agent.next_ahead(0.0, Device(penalises=False)) is None
    assert ahead(agent) is not None, "another body may"
    end(agent, body, work)


def test_a_shortage_of_memory_that_begins_is_told_before_a_step_runs_ahead() -> None:
    agent, body = agent_with(kv_units=40)
    submit(agent, "decode", 3)
    work = begin(agent)
    submit(agent, "large", 38)
    agent.outbox.clear()
    assert ahead(agent) is None
    end(agent, body, work)
    work = begin(agent)
    assert chunks_of(work).keys() == {"decode"}
    assert any(isinstance(message, Report) for _, message, _ in agent.outbox)
    assert ahead(agent) is not None, "it is known now"
    end(agent, body, work)


def test_who_was_kept_out_by_a_full_step_begins_ahead() -> None:
    """There is memory for it."""
    agent, body = agent_with(kv_units=80)
    submit(agent, "long", 32)
    submit(agent, "late", 4)
    end(agent, body, begin(agent))
    work = begin(agent)
    assert chunks_of(work) == {"long": (16, 16)}, "it is full"
    following = ahead(agent)
    assert following is not None
    assert chunks_of(following) == {"long": (32, 1), "late": (0, 4)}
    end(agent, body, work)
    end(agent, body, following)
    agent.check()


def test_an_abort_that_crosses_the_end_of_its_request_holds_up_no_step_to_come() -> None:
    """The inbox keeps it, because it may have overtaken its request."""
    agent, body = agent_with(kv_units=200)
    submit(agent, "short", 3)
    while (work := agent.next_work(0.0)) is not None:
        end(agent, body, work)
    agent.on(Abort(RequestId("short")), 0.0)
    submit(agent, "decode", 3)
    work = begin(agent)
    following = ahead(agent)
    assert following is not None
    end(agent, body, work)
    agent.check()


def test_an_abort_that_overtook_its_request_finds_it() -> None:
    agent, _ = agent_with(kv_units=200)
    agent.on(Abort(RequestId("late")), 0.0)
    submit(agent, "other", 3)
    submit(agent, "late", 3)
    assert chunks_of(begin(agent)).keys() == {"other"}
    assert not agent.inbox.waiting
    agent.check()
