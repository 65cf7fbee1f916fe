"""Sockets with keys, over loopback: who gets in, who is heard, what a broken connection is."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Abort, Alive, Message, Shutdown
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.peers.links import LOOKS_PER_PATIENCE, LinkFault, PeerLinks
from kunserve.transport.wire.channel import FrontChannel, FrontNetwork, InstanceChannel
from kunserve.transport.wire.network import LINK_TIMEOUT_S, Keys, Network, any_port_of, new_keys
from kunserve.transport.wire.pulse import GIVEN_UP, Answer, question_at
from kunserve.transport.wire.sockets import AT_ONCE, Guard, Socket, connect_dealer
from tests.unit.transport.bulk_world import Memory, entries, piece
from tests.unit.transport.wire.test_channel import until

ZERO, ONE = InstanceId(0), InstanceId(1)
HOST = "127.0.0.1"
FRONT = new_keys()


def network(keys: Keys | None = None) -> Network:
    keys = keys or new_keys()
    return Network(HOST, keys.public, keys.secret, FRONT.public)


def abort(number: int) -> Abort:
    return Abort(RequestId(f"r{number}"))


class Pair:
    """Two instances' links."""

    def __init__(self) -> None:
        self.networks = [network(), network()]
        self.links = [PeerLinks(InstanceId(i), network=n) for i, n in enumerate(self.networks)]

    def introduce(self, one: int, slow_s: float = 0.0) -> None:
        """Tell one of the other."""
        other = InstanceId(1 - one)
        at = {other: self.links[other].address}
        self.links[one].connect(at, {other: self.networks[other].public_key}, {other: slow_s})


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for links in made.links:
        links.close()


def words_to(channel: InstanceChannel) -> list[Message]:
    """What comes first, beside probes of the connection, which wake it too."""
    for _ in range(100):
        if words := channel.poll(0.1):
            return words
    return []


def test_addresses_are_reachable_ones() -> None:
    everywhere = Network("10.0.0.7", "", "", "", bind_host="0.0.0.0")
    assert everywhere.any_port == "tcp://0.0.0.0:*"
    assert everywhere.advertised("tcp://0.0.0.0:4321") == "tcp://10.0.0.7:4321"
    sixth = Network("fd00::7", "", "", "")
    assert sixth.any_port == "tcp://[fd00::7]:*"
    assert sixth.advertised("tcp://[fd00::7]:4321") == "tcp://[fd00::7]:4321"
    assert everywhere.machine != sixth.machine


def test_who_calls_before_it_is_known_gets_in_when_it_is(
    pair: Pair, eventually: Callable[..., object]
) -> None:
    zero, one = pair.links
    pair.introduce(0)
    assert zero.send(ONE, abort(1))
    assert one.poll(0.05) == []
    assert zero.unreached([ZERO, ONE]) == [ONE]
    pair.introduce(1)
    assert [mail.message for mail in one.poll(10.0)] == [abort(1)]
    eventually(lambda: zero.unreached([ZERO, ONE]) == [])


def speak(socket: Socket) -> None:
    """Say a word. A socket that was turned away already takes none, and would wait for ever."""
    with suppress(zmq.Again):
        socket.send(b"hello", AT_ONCE)


def test_strangers_do_not_get_in(pair: Pair) -> None:
    zero, one = pair.links
    pair.introduce(0)
    pair.introduce(1)
    stranger = network()
    for server_key in (pair.networks[1].public_key, FRONT.public):
        guard = Guard(stranger.keys, 0.2, server_key)
        socket = connect_dealer(one.address, b"p\0\0\0\0" + bytes(8), guard=guard)
        speak(socket)
        plain: Socket = zmq.Context.instance().socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(one.address)
        speak(plain)
        assert one.poll(0.1) == []
        socket.close()
        plain.close()
    assert zero.send(ONE, abort(1))
    assert [mail.message for mail in one.poll(10.0)] == [abort(1)]


def test_who_is_given_up_is_heard_no_more_though_it_is_connected(pair: Pair) -> None:
    zero, one = pair.links
    pair.introduce(0)
    pair.introduce(1)
    zero.send(ONE, abort(1))
    assert one.poll(10.0)
    one.connect({})
    zero.send(ONE, abort(2))
    assert one.poll(0.2) == [] and one.rejections.num == 1


class Clock:
    """What links take for the time."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("kunserve.transport.peers.links.time", made)
    return made


@pytest.mark.parametrize("slow_s", [0.0, 30.0])
def test_first_contact_may_take_the_gates_patience_and_the_peers_steps(
    pair: Pair, clock: Clock, slow_s: float, eventually: Callable[..., object]
) -> None:
    """Told as down too early it would cost what the two do; told late, and in the end it stands."""
    zero, _ = pair.links
    pair.introduce(0, slow_s)
    limit_s = LINK_TIMEOUT_S + slow_s
    assert zero.patience_s([ZERO, ONE]) == limit_s
    clock.now_s += limit_s - 0.1
    assert zero.faults() == []
    clock.now_s += 0.2 + LINK_TIMEOUT_S / 2 / LOOKS_PER_PATIENCE
    assert zero.faults() == [LinkFault(ONE, f"no connection for {limit_s:g} s", is_down=True)]
    assert zero.faults() == [] and zero.late_contacts() == [], "told once"
    pair.introduce(1)
    eventually(lambda: zero.unreached([ONE]) == [])
    assert zero.late_contacts() == [ONE] and zero.late_contacts() == []
    assert zero.patience_s([ONE]) == LINK_TIMEOUT_S, "they have met"


def test_who_has_met_is_missed_soon_and_its_return_is_no_first_contact(
    pair: Pair, clock: Clock, eventually: Callable[..., object]
) -> None:
    zero, one = pair.links
    pair.introduce(0, slow_s=30.0)
    pair.introduce(1)
    eventually(lambda: zero.unreached([ONE]) == [])
    one.connect({})  # zero's key is no longer let in
    zero.begin_anew()
    clock.now_s += LINK_TIMEOUT_S / 2 + 0.1
    assert [fault.is_down for fault in zero.faults()] == [True]
    pair.introduce(1)
    eventually(lambda: zero.unreached([ONE]) == [])
    assert zero.late_contacts() == []
    zero.connect({ONE: "tcp://127.0.0.1:9"}, {ONE: pair.networks[1].public_key})
    clock.now_s += LINK_TIMEOUT_S / 2 + 0.1
    assert zero.faults() == [], "another process"


def test_bulk_between_hosts_is_sent() -> None:
    networks = [network(), network()]
    memories = [Memory(40, seed=i) for i in (0, 1)]
    movers = [
        BulkMover(InstanceId(i), "", memory, network=at)
        for i, (memory, at) in enumerate(zip(memories, networks, strict=True))
    ]
    for i, mover in enumerate(movers):
        other = InstanceId(1 - i)
        keys = {other: networks[other].public_key}
        mover.connect({other: movers[other].address}, keys, near=())
    movers[0].export_kv(RequestId("r"), entries(0, 8))
    movers[1].pull_kv(piece("r", 0, (0, 6), (0, 2)), entries(8, 20))
    poller = zmq.Poller()
    poller.register(movers[1].poll_sockets[0], zmq.POLLIN)
    assert poller.poll(10_000)
    [pulled] = movers[1].completed()
    assert pulled.ok
    for mover in movers:
        mover.close()
    for src, dst in ((0, 8), (8, 20)):
        assert (memories[0].unit_view(src, 6) == memories[1].unit_view(dst, 6)).all()


class Heard(list[Message]):
    def __call__(self, instance_id: InstanceId, message: Message) -> None:
        self.append(message)


class Pulsing:
    """Notes the front's answers."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    def question(self) -> bytes:
        return question_at(1.0)

    def answered(self, data: bytes) -> None:
        self.answers.append(Answer.read(data)[1])


def test_a_front_answers_its_own_and_tells_others_that_they_are_given_up() -> None:
    async def scenario() -> None:
        heard = Heard()
        front = FrontChannel(heard, network=FrontNetwork(FRONT, 1.0, "me"))
        await front.start(any_port_of(HOST))
        old_keys, new = network(), network()
        front.admit(ZERO, old_keys.public_key)
        old = InstanceChannel(front.address, ZERO, old_keys)
        pulse = Pulsing()
        old.start_heartbeat(0.02, pulse=pulse)
        old.send(abort(1))
        await until(lambda: abort(1) in heard and pulse.answers)
        assert set(pulse.answers) == {"me"} and Alive(ZERO) in heard
        assert front.reaches(ZERO) and front.send(ZERO, Shutdown())
        assert words_to(old) == [Shutdown()]

        front.forget(ZERO)
        front.admit(ZERO, new.public_key)
        await until(lambda: pulse.answers[-1] == GIVEN_UP)
        heard.clear()
        old.send(abort(2))
        successor = InstanceChannel(front.address, ZERO, new)
        successor.send(abort(3))
        await until(lambda: abort(3) in heard)
        assert abort(2) not in heard and Alive(ZERO) not in heard
        assert front.send(ZERO, Shutdown()) and words_to(successor) == [Shutdown()]

        again = InstanceChannel(front.address, ZERO, old_keys)  # it connects anew
        again.send(abort(4))
        stranger = InstanceChannel(front.address, ONE, network())
        stranger.send(abort(5))
        successor.send(abort(6))
        await until(lambda: abort(6) in heard)
        assert {abort(4), abort(5)}.isdisjoint(heard)
        successor.close()
        await until(lambda: not front.reaches(ZERO))
        for one in (old, again, stranger):
            one.close()
        await front.close()
        await front.close()

    asyncio.run(scenario())
