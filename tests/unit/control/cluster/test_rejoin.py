"""What a new front makes of the instances of an earlier one."""

import pytest

from kunserve.control.cluster.commands import Send
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.recovery import choose_standing
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import Form, Formed, Ready, Rejoin, Submit
from kunserve.core.plan import Plan
from kunserve.core.request import FinishReason
from kunserve.core.transfer import PeerAddress
from tests.specs import instance_spec
from tests.unit.control.cluster.brain import Brain

NUM_LAYERS = 8
WHOLE = LayerRange(0, NUM_LAYERS)
LOW, HIGH = LayerRange(0, 4), LayerRange(4, 8)


def layout(group_id: int, *stages: tuple[int, LayerRange]) -> GroupLayout:
    return GroupLayout(GroupId(group_id), tuple(Stage(InstanceId(i), held) for i, held in stages))


def alone(group_id: int, instance_id: int) -> GroupLayout:
    return layout(group_id, (instance_id, WHOLE))


def back(instance_id: int, held: LayerRange, stands_in: GroupLayout | None) -> Rejoin:
    spec = instance_spec(
        instance_id, NUM_LAYERS, 800, unit_bytes=1024, layer_bytes=4096, granule_bytes=1024
    )
    ready = Ready(spec, PeerAddress("links", "bulk"), 100, "")
    return Rejoin(ready, held, 800, stands_in)


PIPELINE = layout(5, (0, LOW), (1, HIGH))


def standing(*events: Rejoin) -> list[int]:
    return [int(group.group_id) for group in choose_standing(events)]


def test_groups_stand_again() -> None:
    third = back(2, WHOLE, alone(3, 2))
    assert standing(back(0, LOW, PIPELINE), back(1, HIGH, PIPELINE), third) == [5, 3]


def test_a_pipeline_without_one_of_its_stages_does_not_stand() -> None:
    assert standing(back(0, LOW, PIPELINE)) == []
    assert standing(back(0, LOW, PIPELINE), back(1, HIGH, None)) == []


def test_a_drop_half_committed_is_completed() -> None:
    """One member has dropped its layers; the other still has all of them."""
    assert standing(back(0, LOW, PIPELINE), back(1, WHOLE, alone(1, 1))) == [5]


def test_a_restore_half_committed_leaves_everybody_alone() -> None:
    """All had loaded their layers; one stands alone already."""
    events = back(0, WHOLE, alone(6, 0)), back(1, WHOLE, PIPELINE)
    assert standing(*events) == [6]


def test_layers_that_are_not_held_make_no_stage() -> None:
    assert standing(back(0, LOW, PIPELINE), back(1, LOW, PIPELINE)) == []


def test_the_controller_forms_them_with_ids_never_used_before() -> None:
    controller = Controller(Plan(KunServeConfig()), first_id=1000)
    events = [back(0, LOW, PIPELINE), back(1, HIGH, PIPELINE), back(2, LOW, None)]
    controller.rejoin(events, 0.0)
    formed = {
        command.instance_id: command.message.layout
        for command in controller.drain()
        if isinstance(command, Send) and isinstance(command.message, Form)
    }
    assert formed[InstanceId(0)] == formed[InstanceId(1)]
    assert formed[InstanceId(0)].stages == PIPELINE.stages
    assert formed[InstanceId(2)].stages == (Stage(InstanceId(2), WHOLE),)
    assert all(group.group_id >= 1000 for group in formed.values())
    controller.check()
    for instance_id, layout in formed.items():
        controller.on(instance_id, Formed(instance_id, layout.group_id, 0), 0.0)
    snapshots = {i.spec.instance_id: i for i in controller.state(0.0).instances}
    assert snapshots[InstanceId(1)].held == HIGH and snapshots[InstanceId(2)].held == WHOLE


def test_who_says_it_twice_stands_once() -> None:
    controller = Controller(Plan(KunServeConfig()))
    events = [back(0, LOW, PIPELINE), back(1, HIGH, PIPELINE)]
    controller.rejoin(events, 0.0)
    controller.rejoin(events, 0.1)
    controller.check()
    (group,) = controller.placement.groups.values()
    assert group.layout.stages == PIPELINE.stages
    controller.on(InstanceId(0), events[0], 0.2)
    controller.check()
    layouts = [group.layout for group in controller.placement.groups.values()]
    assert sorted(layout.members for layout in layouts) == [(0,), (1,)]


@pytest.mark.parametrize("is_new_process", [True, False])
def test_a_first_word_that_comes_again_runs_requests_again(is_new_process: bool) -> None:
    """Nobody has told of the death of the process before; or a front's name came, went and came."""
    brain = Brain(1)
    brain.request()
    assert len(brain.take(Submit)) == 1
    if is_new_process:
        brain.start(0)
    else:
        brain.controller.rejoin([back(0, WHOLE, None)], brain.now_s)
        brain.pass_time(0.0)
    assert brain.groups == [(0,)]
    ((instance_id, submit),) = brain.take(Submit)
    assert (instance_id, submit.request.request_id) == (0, "r0")
    assert brain.controller.state(brain.now_s).num_deaths == 0
    brain.output(0, RequestId("r0"), FinishReason.LENGTH)
    assert not brain.controller.num_unfinished
