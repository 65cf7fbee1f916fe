"""Who is told of whom, and how little that is among many."""

import pytest

from kunserve.control.cluster.commands import Outbox, Send
from kunserve.control.cluster.peer_discovery import PeerDiscovery
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Connect
from kunserve.core.transfer import PeerAddress
from kunserve.transport.wire.codec import encode
from tests.fake_cluster import FakeCluster


class World:
    def __init__(self, num: int, most: int = 64) -> None:
        self.outbox = Outbox()
        self.partners: dict[InstanceId, set[InstanceId]] = {}
        self.book = PeerDiscovery(self.outbox, lambda i: self.partners.get(i, set()), most)
        for i in range(num):
            self.arrive(i)

    def arrive(self, number: int, process: int = 0) -> None:
        at = PeerAddress(f"tcp://10.0.0.1:{number}", f"tcp://10.0.0.2:{number}", f"key {process}")
        self.book.arrived(InstanceId(number), at)

    def introduce(self, *numbers: int) -> None:
        self.book.introduce(map(InstanceId, numbers))
        self.book.check()

    def told(self) -> dict[int, list[Connect]]:
        found: dict[int, list[Connect]] = {}
        for command in self.outbox.drain():
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


def test_a_source_and_its_taker_know_each_other() -> None:
    world = World(4)
    world.book.introduce_to(InstanceId(0), (InstanceId(2), None, InstanceId(9), InstanceId(0)))
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
