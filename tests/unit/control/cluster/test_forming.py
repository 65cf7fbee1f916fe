"""How long a group may form: as long as bytes come, and never for ever."""

from kunserve.control.cluster.commands import Condemn, Respawn
from kunserve.control.cluster.forming import PATIENCE_S, TOLD_AFTER_S
from kunserve.core.ids import InstanceId
from kunserve.core.messages import TransferProgress
from tests.unit.control.cluster.brain import Brain

ZERO, ONE = InstanceId(0), InstanceId(1)


def forming() -> Brain:
    """A pipeline has lost a member; the other one loads what it lacks."""
    brain = Brain(3)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time()
    brain.complete()
    dead, survivor = next(group for group in brain.groups if len(group) == 2)
    assert {dead, survivor} == {0, 1}
    brain.slow.add(0)
    brain.die(1)
    brain.pass_time()
    return brain


def test_a_member_to_which_nothing_comes_is_condemned_once() -> None:
    """Before, a read that hung left the group forming for ever, and nobody was told."""
    brain = forming()
    brain.said(Respawn)
    for _ in range(round(PATIENCE_S / 10.0)):
        brain.pass_time(10.0)
    assert not brain.said(Condemn)
    for _ in range(5):
        brain.pass_time(10.0)
    (condemned,) = brain.said(Condemn)
    assert condemned.instance_id == ZERO
    assert condemned.reason == "it forms a group, and nothing has come to it for 130 s"
    brain.die(0)
    assert [command.instance_id for command in brain.said(Respawn)] == [ZERO]
    brain.slow.clear()
    for number in range(2):
        brain.start(number)
    brain.pass_time()
    assert not brain.controller.state(brain.now_s).forming


def test_a_disk_that_is_slow_is_waited_for() -> None:
    brain = forming()
    for number in range(100):
        brain.pass_time(PATIENCE_S / 2)
        brain.tell(0, TransferProgress(ZERO, number))
    assert not brain.said(Condemn)
    brain.formed(0)
    brain.pass_time(2 * PATIENCE_S)
    assert not brain.said(Condemn)


def test_a_group_that_is_formed_once_more_has_its_time_anew() -> None:
    brain = forming()
    brain.pass_time(PATIENCE_S - 1.0)
    brain.controller._recovery._form_anew([ZERO])
    brain.pass_time(PATIENCE_S - 1.0)
    assert not brain.said(Condemn)
    brain.pass_time(2.0)
    brain.pass_time(PATIENCE_S)
    assert len(brain.said(Condemn)) == 1


def test_people_are_told_since_when_a_group_forms() -> None:
    brain = forming()
    began_s = brain.now_s
    brain.pass_time(TOLD_AFTER_S - 1.0)
    state = brain.controller.state(brain.now_s)
    assert [(one.members, one.since_s) for one in state.forming] == [((ZERO,), began_s)]
    assert state.longest_forming_s == TOLD_AFTER_S - 1.0
    assert not any("forms since" in text for text in state.reasons)
    brain.pass_time(2.0)
    group_id = brain.group_id(0)
    expected = f"group {group_id} forms since {TOLD_AFTER_S + 1:.0f} s: instances [0] load weights"
    assert expected in brain.controller.state(brain.now_s).reasons
    brain.formed(0)
    brain.pass_time()
    state = brain.controller.state(brain.now_s)
    assert not state.forming and state.longest_forming_s == 0.0
