"""Who is told of whom, and how little that is among many."""

import pytest

from kunserve.control.cluster.commands import Outbox, Send
from kunserve.control.cluster.peer_discovery import PeerDiscovery
from kunserve.control.cluster.transitions import PATIENCE_STEPS
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Connect, LayerSource
from kunserve.core.transfer import PeerAddress
from kunserve.transport.wire.codec import encode
from tests.fake_cluster import FakeCluster
from tests.unit.control.cluster.brain import Brain, drained


class World:
    def __init__(self, num: int, most: int = 64) -> None:
        self.outbox = Outbox()
        self.partners: dict[InstanceId, set[InstanceId]] = {}
        self.book = PeerDiscovery(self.outbox, lambda i: self.partners.get(i, set()), most)
        for i in range(num):
            self.arrive(i)

    def arrive(self, number: int, process: int = 0, machine: str = "", maps: bool = False) -> None:
        links, bulk = f"tcp://10.0.0.1:{number}", f"tcp://10.0.0.2:{number}"
        at = PeerAddress(links, bulk, f"key {process}", machine, maps)
        self.book.arrived(InstanceId(number), at)
        self.book.check()

    def introduce(self, *numbers: int) -> None:
        self.book.introduce(map(InstanceId, numbers))
        self.book.check()

    def pull(self, taker: int, *sources: int | None) -> None:
        """One layer from each."""
        ids = [None if source is None else InstanceId(source) for source in sources]
        runs = [LayerSource(LayerRange(i, i + 1), source) for i, source in enumerate(ids)]
        self.book.introduce_to(InstanceId(taker), runs)
        self.book.check()

    def told(self) -> dict[int, list[Connect]]:
        found: dict[int, list[Connect]] = {}
        for command in drained(self.outbox):
            assert isinstance(command, Send) and isinstance(command.message, Connect)
            found.setdefault(command.instance_id, []).append(command.message)
        return found


def names(told: dict[int, list[Connect]]) -> dict[int, list[int]]:
    return {i: [peer for one in found for peer, _ in one.peers] for i, found in told.items()}


def test_only_what_is_new_is_told() -> None:
    world = World(4)
    assert world.told() == {}, "nobody needs anybody yet"
    world.introduce(0, 1)
    assert names(world.told()) == {0: [1], 1: [0]}
    world.introduce(0, 1, 2)
    assert names(world.told()) == {0: [2], 1: [2], 2: [0, 1]}
    world.introduce(2, 1, 0)
    assert world.told() == {}


def test_those_that_map_each_others_memory_are_told_at_once() -> None:
    world = World(1)
    for number, machine in enumerate(("one", "one", "other", "one"), 1):
        world.arrive(number, machine=machine, maps=True)
    assert names(world.told()) == {1: [2, 4], 2: [1, 4], 4: [1, 2]}
    world.introduce(1, 2, 4)
    assert world.told() == {}
    world.arrive(2, process=1, machine="one", maps=True)
    assert names(world.told()) == {1: [2], 2: [1, 4], 4: [2]}


def test_who_computes_long_steps_is_given_time() -> None:
    """It reads whom it is to let in between two of them."""
    brain = Brain(policy="recompute")
    for number in range(20):
        brain.report(0, after_s=0.5)
        if number % 10 == 0:
            brain.report(1, after_s=0.0)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(0.0)
    slow_s = {number: message.slow_s for number, message in brain.take(Connect)}
    assert slow_s == {InstanceId(0): PATIENCE_STEPS * 5.0, InstanceId(1): PATIENCE_STEPS * 0.5}


def test_a_source_and_its_taker_know_each_other() -> None:
    world = World(4)
    world.pull(0, 2, None, 9, 0)
    assert names(world.told()) == {0: [2], 2: [0]}
    world.book.check()


def test_a_death_is_told_to_those_that_knew_it() -> None:
    world = World(4)
    world.introduce(0, 1)
    world.introduce(1, 2)
    world.told()
    world.book.left(InstanceId(1))
    told = world.told()
    assert {i: [one.gone for one in found] for i, found in told.items()} == {0: [(1,)], 2: [(1,)]}
    world.book.left(InstanceId(1))
    assert world.told() == {}
    world.arrive(1, process=1)
    world.introduce(0, 1)
    assert world.told()[0][0].peers[0][1].public_key == "key 1"


def test_who_knows_too_many_parts_from_those_it_needed_longest_ago() -> None:
    world = World(10, most=3)
    for peer in range(1, 4):
        world.introduce(0, peer)
    world.partners = {InstanceId(0): {InstanceId(1)}, InstanceId(1): {InstanceId(0)}}
    world.told()
    world.introduce(0, 4)
    told = world.told()
    assert [one.gone for one in told[0] if one.gone] == [(2,)]
    assert [one.gone for one in told[2]] == [(0,)]


@pytest.mark.parametrize("num", [8, 32])
def test_starting_many_tells_nobody_anything(num: int) -> None:
    """As many sockets and words as transitions need, whatever the size of the cluster."""
    cluster = FakeCluster(pools=(12,) * num)
    assert not any(member.known for member in cluster.members.values())
    before = {i: set(member.known) for i, member in cluster.members.items()}
    cluster.drop((0, 0, 2), (1, 2, 4))
    told_bytes = 0
    for command in cluster.controller.drain():
        if isinstance(command, Send) and isinstance(command.message, Connect):
            told_bytes += len(encode(command.message))
    cluster.run_until_idle()
    after = {i: member.known - before[i] for i, member in cluster.members.items()}
    assert sum(map(len, after.values())) == 2, "links, one each way"
    assert told_bytes < 500


def test_no_link_is_parted_while_layers_come_over_it() -> None:
    world = World(8, most=2)
    for taker in (1, 2, 3, 4):
        world.pull(taker, 0)
    told = world.told()
    assert not any(one.gone for found in told.values() for one in found)
    assert world.book.given == {0: 4}
    world.book.has_pulled(InstanceId(1))
    world.book.has_pulled(InstanceId(2))
    world.pull(5, 0)
    assert [one.gone for one in world.told()[0] if one.gone] == [(1,), (2,)]
    world.book.left(InstanceId(0))
    world.book.check()
    assert not world.book.given
