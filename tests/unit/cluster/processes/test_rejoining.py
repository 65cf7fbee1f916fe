"""Instances of an earlier front that a new one waits for; some of them die meanwhile."""

from dataclasses import replace
from typing import cast

from kunserve.cluster.processes.processes import Processes
from kunserve.cluster.processes.rejoining import REJOIN_S, REJOIN_STEPS, Rejoining
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Rejoin
from tests.unit.control.cluster.test_rejoin import WHOLE, alone, back

ZERO, ONE = InstanceId(0), InstanceId(1)


class World:
    """Two instances that an earlier front has left."""

    def __init__(self) -> None:
        self.running = {ZERO, ONE}
        self.step_s = {ZERO: 0.0, ONE: 0.0}
        self.rejoining = Rejoining(cast(Processes, self), "second")
        self.rejoining.begin((ZERO, ONE), 0.0)

    def was_found(self, instance_id: InstanceId) -> bool:
        """As ``Processes``: until its process is over."""
        return instance_id in self.running

    def longest_step_s(self, instance_id: InstanceId) -> float:
        """As ``Processes``: what heartbeats tell."""
        return self.step_s[instance_id]


def word(number: int, front: str = "second") -> Rejoin:
    return replace(back(number, WHOLE, alone(number, number)), front=front)


def test_they_come_together() -> None:
    world = World()
    assert world.rejoining.take(word(0)) and not world.rejoining.are_back(1.0)
    assert world.rejoining.take(word(1)) and world.rejoining.are_back(1.0)
    assert world.rejoining.end() == [word(0), word(1)]
    assert not world.rejoining.take(word(0)), "who comes later comes alone"


def test_who_is_late_is_not_waited_for() -> None:
    world = World()
    world.rejoining.take(word(0))
    assert not world.rejoining.are_back(REJOIN_S) and world.rejoining.are_back(REJOIN_S + 0.1)
    assert world.rejoining.end() == [word(0)]


def test_who_is_in_a_long_step_is_waited_for_and_its_group_stands_on() -> None:
    world = World()
    world.step_s = {ZERO: 60.0, ONE: 20.0}
    world.rejoining.take(word(0))
    assert not world.rejoining.are_back(REJOIN_S + REJOIN_STEPS * 20.0)
    world.rejoining.take(word(1))
    assert world.rejoining.are_back(REJOIN_S + REJOIN_STEPS * 20.0)
    world = World()
    world.step_s[ONE] = 20.0
    world.rejoining.take(word(0))
    assert world.rejoining.are_back(REJOIN_S + REJOIN_STEPS * 20.0 + 0.1), "not for ever"


def test_who_dies_after_its_word_is_not_back() -> None:
    world = World()
    world.rejoining.take(word(0))
    world.running.remove(ZERO)
    assert not world.rejoining.are_back(1.0)
    world.rejoining.take(word(1))
    assert world.rejoining.are_back(1.0)
    assert world.rejoining.end() == [word(1)], "the dead one's replacement forms a group itself"


def test_words_for_others_and_last_words_are_not_acted_on() -> None:
    rejoining = World().rejoining
    assert rejoining.is_meant(word(0))
    assert not rejoining.is_meant(word(0).ready), "an earlier front's"
    assert not rejoining.is_meant(word(0, "first")), "one that died before it could read it"
    assert rejoining.is_meant(word(7).ready), "of a process that this front has started"
    assert not rejoining.is_meant(word(7)), "of one that is over"
