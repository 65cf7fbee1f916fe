"""When a stage of a device's loop tells the next one of its step, and what a void step leaves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kunserve.cluster.instance import device_loop
from kunserve.cluster.instance import loop as instance_loop
from kunserve.cluster.instance.device_loop import DeviceLoop
from kunserve.control.instance.body import StepWork
from kunserve.core.faults import MachineFailed, StepVoid
from kunserve.core.ids import GroupId, RequestId, StepId
from kunserve.core.messages import (
    Activation,
    Form,
    LinkBroken,
    Outputs,
    Sampled,
    Shutdown,
    Submit,
)
from kunserve.core.request import Request, SamplingParams
from kunserve.core.snapshots import StageTime
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.fake_body import FakeBody
from tests.unit.cluster.instance.test_instance_loop import ONE, ZERO, Body, Instance, Wires


def write_ahead(body: Body, asked: Any, to: str) -> memoryview:
    """As a body does whose peers can wait."""
    return body.hidden_to_bytes(asked.hidden)


def test_the_next_stage_hears_of_a_step_while_a_device_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, and not of a plan without work."""
    monkeypatch.setattr(Body, "write_ahead", write_ahead)
    wires = Instance(DeviceLoop, num_stages=2).serve(num_tokens=3)
    assert wires.whether_computing(Activation) == [True, True, True, False]
    assert len(wires.whether_computing(Outputs)) == 3
    assert not any(Instance(num_stages=2).serve(num_tokens=3).whether_computing(Activation))


def test_waiting_for_the_stage_before_is_no_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimpleNamespace(now_s=1.0, monotonic=lambda: time.now_s)
    for module in (instance_loop, device_loop):
        monkeypatch.setattr(module, "time", time)

    def await_input(*_: Any) -> bool:
        time.now_s += 1000.0
        return True

    monkeypatch.setattr(Body, "await_input", await_input)
    instance = Instance(DeviceLoop, num_stages=2, leads=False)
    events = instance.serve(num_tokens=3).events
    stages = [said for said, _ in events if isinstance(said, StageTime)]
    assert stages and time.now_s > 3000.0
    assert all(stage.busy_s == 0.0 for stage in stages)


def test_a_void_step_ends_a_process_that_no_other_group_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def collect(*_: Any) -> Any:
        raise StepVoid("its rows have not come")

    monkeypatch.setattr(Body, "collect", collect)
    monkeypatch.setattr(instance_loop, "FORM_PATIENCE_S", 0.0)
    with pytest.raises(MachineFailed, match="no other group"):
        Instance(DeviceLoop, num_stages=2, leads=False).serve()


def test_nobody_hears_of_a_void_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stage before has died: the process goes on, with the group that is formed then."""
    instance = Instance(DeviceLoop, num_stages=2, leads=False)
    wires, (form,) = instance.wires, instance.wires.mail
    assert isinstance(form, Form)
    next_form = Form(replace(form.layout, group_id=GroupId(2)), form.specs)
    request = Request(RequestId("s"), TokenIds((5, 6, 7)), SamplingParams(2), 0.0)
    num_void: list[int] = []

    def collect(body: Body, asked: Any, look_up: Any = None) -> Any:
        outcome = FakeBody.collect(body, asked, look_up)
        body.is_computing = False
        if num_void:
            return outcome
        num_void.append(1)
        assert outcome.tokens, "that would be told"
        wires.mail.append(next_form)
        instance.tell_peer(next_form, None)
        instance.tell_peer(Submit(request), None)
        raise StepVoid("its rows have not come")

    monkeypatch.setattr(Body, "collect", collect)
    instance.serve(num_tokens=3)
    told = [said.result for said, _ in wires.events if isinstance(said, Sampled)]
    assert {result.group_id for result in told} == {2}, "and not of the group before"
    broken = [said for said, _ in wires.events if isinstance(said, LinkBroken)]
    assert broken == [LinkBroken(ZERO, ONE, "its rows have not come")], "or the group stood still"


class Feeding(Body):
    """Its device reads what the second stage has sampled, if anybody says so."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.feeding: list[bool] = []
        """Of each step, whether it began before its tokens were known here."""
        self.are_ahead: list[bool] = []
        """Of each step, whether it began before the one before had ended."""
        self.num_stops = 0
        self.ahead = self

    def tokens_come(self, data: memoryview, group_id: GroupId, step_id: StepId) -> None:
        raise AssertionError("the peer's body writes none")

    def feeds_from(self, group_id: GroupId) -> bool:
        return True

    def stop_waiting(self) -> None:
        self.num_stops += 1

    write_ahead = write_ahead

    def launch(self, work: StepWork, *given: Any) -> Any:
        self.feeding.append(work.awaits_tokens)
        self.are_ahead.append(work.is_ahead)
        return super().launch(work, *given)


def feeding_pair() -> tuple[Instance, Feeding]:
    instance = Instance(DeviceLoop, num_stages=2, body=Feeding)
    body = instance.body
    assert isinstance(body, Feeding)
    instance.peer_body.board = body.board
    return instance, body


def tokens_of(wires: Wires) -> list[int | None]:
    told = [said for said, _ in wires.events if isinstance(said, Outputs)]
    return [one.token_id for said in told for one in said.tokens]


def test_steps_of_a_pair_feed_on_the_last_stage() -> None:
    """The peer answers at once, and the answer is read while the next step is computed."""
    instance, body = feeding_pair()
    wires = instance.serve(num_tokens=6)
    assert body.feeding == [False, *[True] * 5]
    assert len(tokens_of(wires)) == 6
    assert tokens_of(wires) == tokens_of(Instance(DeviceLoop, num_stages=2).serve(num_tokens=6))
    assert any(wires.whether_computing(Outputs)), "while it waits for a step it reads and tells"


def test_nothing_feeds_on_a_stage_that_has_not_heard_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for a word that is said behind that wait."""
    monkeypatch.setattr(Feeding, "write_ahead", lambda *_: None)
    instance, body = feeding_pair()
    instance.serve(num_tokens=6)
    assert body.feeding == [False] * 6


def test_who_is_to_form_a_group_waits_for_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their stage has left the group: it will never sample them."""
    monkeypatch.setattr(instance_loop, "LOOK_GAP_S", 0.0)
    instance, _ = feeding_pair()
    wires, (form,) = instance.wires, instance.wires.mail
    assert isinstance(form, Form)
    num_awaited: list[int] = []

    def await_input(body: Feeding, asked: Any, look_up: Any = None) -> bool:
        num_awaited.append(1)
        if len(num_awaited) != 2:
            return True
        wires.mail += [Form(replace(form.layout, group_id=GroupId(2)), form.specs), Shutdown()]
        for _ in range(50):
            look_up()
            if body.num_stops:
                return False
        raise AssertionError("it waits for ever")

    def collect(body: Feeding, asked: Any, look_up: Any = None) -> Any:
        outcome = Body.collect(body, asked, look_up)
        if body.num_stops:
            raise StepVoid("its tokens have not come")
        return outcome

    monkeypatch.setattr(Feeding, "await_input", await_input)
    monkeypatch.setattr(Feeding, "collect", collect)
    instance.serve(num_tokens=6)
    assert instance.agent.layout == replace(form.layout, group_id=GroupId(2))
    (last,) = [said for said, _ in wires.events if isinstance(said, LinkBroken)]
    assert last == LinkBroken(ZERO, ONE, "its tokens have not come")


@pytest.mark.parametrize("num_prompt_logprobs", [None, 1])
def test_a_later_stage_launches_what_has_come_while_its_device_computes(
    num_prompt_logprobs: int | None,
) -> None:
    """Two microbatches are under way. Not behind a prompt whose logits are wanted at its end."""
    instance = Instance(DeviceLoop, num_stages=2, leads=False, body=Feeding)
    body = instance.body
    assert isinstance(body, Feeding)
    sampling = SamplingParams(4, num_prompt_logprobs=num_prompt_logprobs)
    for name in "ab":
        instance.tell_peer(
            Submit(Request(RequestId(name), TokenIds((5, 6, 7)), sampling, 0.0)), None
        )
    instance.run()
    assert len(body.are_ahead) == 8
    assert body.are_ahead[:2] == [False, num_prompt_logprobs is None]
