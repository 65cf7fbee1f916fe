"""When a stage of a device's loop tells the next one of its step, and what a void step leaves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kunserve.cluster.instance import loop as instance_loop
from kunserve.cluster.instance.loop import DeviceLoop
from kunserve.core.faults import MachineFailed, StepVoid
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.messages import Activation, Form, LinkBroken, Outputs, Sampled, Submit
from kunserve.core.request import Request, SamplingParams
from kunserve.core.snapshots import StageTime
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.fake_body import FakeBody
from tests.unit.cluster.instance.test_instance_loop import ONE, ZERO, Body, Instance


def pass_on(body: Body, asked: Any, to: str) -> memoryview:
    """As a body does whose peers can wait."""
    return body.hidden_to_bytes(asked.hidden)


def test_the_next_stage_hears_of_a_step_while_a_device_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, and not of a plan without work."""
    monkeypatch.setattr(Body, "pass_on", pass_on)
    wires = Instance(DeviceLoop, num_stages=2).serve(num_tokens=3)
    assert wires.whether_computing(Activation) == [True, True, True, False]
    assert len(wires.whether_computing(Outputs)) == 3
    assert not any(Instance(num_stages=2).serve(num_tokens=3).whether_computing(Activation))


def test_waiting_for_the_stage_before_is_no_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimpleNamespace(now_s=1.0, monotonic=lambda: time.now_s)
    monkeypatch.setattr(instance_loop, "time", time)

    def await_input(*_: Any) -> None:
        time.now_s += 1000.0

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
