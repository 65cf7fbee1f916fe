"""An instance whose process is asked to end gives its requests away, and is started anew."""

import pytest

from kunserve.control.cluster.commands import Respawn, ScaleDown
from kunserve.control.cluster.standing import Standing
from kunserve.core.config import ServerConfig
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Alive, Migrate, MigrationOver, ReturnWaiting, Shutdown, Submit
from kunserve.core.request import FinishReason
from tests.unit.control.cluster.brain import Brain


def asks(brain: Brain, number: int) -> None:
    """The instance says that it would leave; the controller looks."""
    brain.tell(number, Alive(InstanceId(number), wants_to_leave=True))
    brain.pass_time()


def submitted(brain: Brain) -> list[int]:
    return [int(instance_id) for instance_id, _ in brain.take(Submit)]


def test_it_gives_away_what_it_has_and_ends_once_it_is_empty() -> None:
    brain = Brain()
    ran = brain.request()
    (there,) = submitted(brain)
    brain.report(there, num_running=1, used_blocks=4, num_waiting=1, waiting_blocks=2)
    brain.report(1 - there)
    asks(brain, there)
    ((source, migration),) = brain.take(Migrate)
    assert source == there
    assert [leader for leader, _ in brain.take(ReturnWaiting)] == [there]
    for _ in range(3):
        brain.request()
    assert submitted(brain) == [1 - there] * 3
    assert not brain.take(Shutdown)
    brain.output(there, ran, FinishReason.STOP)
    brain.tell(there, MigrationOver(migration.migration_id, source, "no request can move"))
    brain.report(there)
    for _ in range(3):
        asks(brain, there)
    assert [one for one, _ in brain.take(Shutdown)] == [there]
    brain.die(there)
    assert [command.instance_id for command in brain.said(Respawn)] == [there]
    brain.start(there)
    brain.report(there)
    group = brain.controller.placement.led_by(InstanceId(there))
    assert group is not None and not group.standing


def test_it_leaves_at_once_when_it_had_its_time() -> None:
    brain = Brain(server=ServerConfig(shutdown_timeout_s=5.0))
    brain.request()
    (there,) = submitted(brain)
    brain.report(there, num_running=1, used_blocks=4)
    asks(brain, there)
    assert not brain.take(Shutdown)
    brain.pass_time(5.0)
    assert [one for one, _ in brain.take(Shutdown)] == [there]
    brain.die(there)
    brain.pass_time()
    assert submitted(brain) == [1 - there], "its request runs anew elsewhere"


def test_the_last_heartbeat_of_one_that_is_gone_does_not_end_its_replacement() -> None:
    brain = Brain(server=ServerConfig(shutdown_timeout_s=5.0))
    brain.die(0)
    asks(brain, 0)
    brain.pass_time(6.0)
    assert not brain.take(Shutdown), "the next process in its place may still be loading"


def test_who_is_alone_serves_until_then() -> None:
    brain = Brain(num_instances=1, server=ServerConfig(shutdown_timeout_s=5.0))
    brain.request()
    brain.report(0, num_running=1, used_blocks=4)
    asks(brain, 0)
    brain.request()
    assert submitted(brain) == [0, 0]
    brain.start(1)
    brain.report(1)
    brain.pass_time()
    brain.request()
    assert submitted(brain) == [1]


def test_all_are_asked_at_once_and_somebody_serves() -> None:
    brain = Brain(num_instances=3)
    for number in range(3):
        brain.report(number)
        brain.tell(number, Alive(InstanceId(number), wants_to_leave=True))
    brain.pass_time()
    assert len(brain.controller.placement.standing_as(Standing.DEPARTING)) == 2
    brain.request()
    (there,) = submitted(brain)
    brain.pass_time()
    gone = [int(one) for one, _ in brain.take(Shutdown)]
    assert len(gone) == 2 and there not in gone


@pytest.mark.parametrize("size", [1, 3])
def test_it_may_leave_for_good_meanwhile(size: int) -> None:
    """A size that is asked for holds, whoever wants to leave."""
    brain = Brain()
    for number in range(2):
        brain.report(number)
    asks(brain, 0)
    brain.controller.resize(size)
    for _ in range(3):
        brain.pass_time()
    assert [one for one, _ in brain.take(Shutdown)] == [0] * (size == 3)
    assert [command.instance_id for command in brain.said(ScaleDown)] == [0] * (size == 1)
    brain.die(0)
    assert [command.instance_id for command in brain.said(Respawn)] == [0] * (size == 3)
    assert brain.controller.size.wanted == size
