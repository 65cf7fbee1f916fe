"""Real sockets; the front in an event loop, instances in the test's own thread."""

import asyncio
import math
import time
from collections.abc import Callable

import pytest
import zmq

from kunserve.core.faults import MachineFailed
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.load import LoadReport
from kunserve.core.messages import Abort, Alive, Message, Report, Shutdown
from kunserve.core.snapshots import StageTime
from kunserve.transport.wire import channel as channel_module
from kunserve.transport.wire import identity, sockets
from kunserve.transport.wire.channel import FrontChannel, InstanceChannel
from kunserve.transport.wire.codec import LostMessages, MalformedMessage, encode
from kunserve.transport.wire.network import FrontPlace
from kunserve.transport.wire.sockets import address_of, bind_router, connect_dealer
from tests.unit.transport.addresses import fresh_address

ZERO, ONE = InstanceId(0), InstanceId(1)


def abort(number: int) -> Abort:
    return Abort(RequestId(f"r{number}"))


async def until(probe: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not probe():
            await asyncio.sleep(0.001)


class Heard(list[tuple[InstanceId, Message]]):
    def __call__(self, instance_id: InstanceId, message: Message) -> None:
        self.append((instance_id, message))


async def join(front: FrontChannel, heard: Heard, instance_id: InstanceId) -> InstanceChannel:
    instance = InstanceChannel(front.address, instance_id)
    before = len(heard)
    instance.send(Alive(instance_id))
    await until(lambda: len(heard) > before)
    return instance


def test_both_ways_in_order() -> None:
    async def scenario() -> None:
        heard = Heard()
        front = FrontChannel(heard)
        await front.start(fresh_address())
        instances = [await join(front, heard, i) for i in (ZERO, ONE)]
        for number in range(1000):
            assert front.send(ZERO, abort(number))
            instances[1].send(abort(number))
        got: list[Message] = []
        while len(got) < 1000:
            got += instances[0].poll(5.0)
        assert got == [abort(n) for n in range(1000)]
        await until(lambda: len(heard) == 1002)
        assert heard[2:] == [(ONE, abort(n)) for n in range(1000)]
        assert instances[1].receive() == []
        for instance in instances:
            instance.close()
        await front.close()
        await front.close()

    asyncio.run(scenario())


def test_a_long_queue_is_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MESSAGES_PER_TURN", 2)

    async def scenario() -> None:
        heard = Heard()
        front = FrontChannel(heard)
        await front.start(fresh_address())
        instance = await join(front, heard, ZERO)
        for number in range(50):
            instance.send(abort(number))
        await until(lambda: len(heard) == 51)
        instance.close()
        await front.close()

    asyncio.run(scenario())


def test_a_front_that_does_not_read_takes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MOST_UNREAD", 10)
    monkeypatch.setattr(sockets, "MAX_QUEUED", 400)  # of the instance that sends
    large = Abort(RequestId("r" * (1 << 20)))  # more than the kernel takes between them

    def send_all(instance: InstanceChannel) -> int:
        """How many until no more is taken, for a while."""
        num_sent: int = 0
        refused_at_s: float | None = None
        while num_sent < 300 and time.monotonic() < (refused_at_s or math.inf) + 0.3:
            instance.receive()
            if instance.is_behind:
                refused_at_s = refused_at_s or time.monotonic()
                time.sleep(0.01)
            else:
                instance.send(large)
                num_sent, refused_at_s = num_sent + 1, None
        return num_sent

    async def scenario() -> None:
        heard = Heard()
        front = FrontChannel(heard)
        await front.start(fresh_address())
        instance = await join(front, heard, ZERO)
        num_sent = send_all(instance)  # the loop turns no more meanwhile
        assert 150 <= num_sent < 300, num_sent
        await until(lambda: instance.receive() or len(heard) == 1 + num_sent)
        instance.close()
        await front.close()

    asyncio.run(scenario())


def test_reports_that_find_no_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front that is stopped for hours finds its instances alive when it goes on."""
    monkeypatch.setattr(sockets, "MAX_QUEUED", 10)
    said: list[Alive] = []

    def say() -> Alive:
        said.append(Alive(ZERO, len(said)))
        return said[-1]

    async def scenario() -> None:
        heard, address = Heard(), fresh_address()
        instance = InstanceChannel(address, ZERO)  # nobody reads there yet
        for number in range(1000):
            instance.send(Report(ZERO, LoadReport(GroupId(0), number)))
            instance.send(StageTime(ZERO, GroupId(0), 1, 0.0, None))
        assert not instance.is_behind, "reports alone hold nobody up"
        instance.start_heartbeat(0.001, say)
        await until(lambda: len(said) > 30)
        front = FrontChannel(heard)
        await front.start(address)
        await until(lambda: sum(not isinstance(x, Alive) for _, x in heard) == 5)
        last = len(said)
        instance.send(abort(1))  # its number is due
        await until(lambda: (ZERO, abort(1)) in heard)
        await until(lambda: any(isinstance(x, Alive) and x.num_turns > last for _, x in heard))
        instance.close()
        await front.close()

    asyncio.run(scenario())


def test_who_is_behind_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one message too many ended the instance, and its requests were blamed."""
    monkeypatch.setattr(sockets, "MAX_QUEUED", 10)

    async def scenario() -> None:
        heard, address = Heard(), fresh_address()
        instance = InstanceChannel(address, ZERO)  # nobody reads there yet
        told = 0
        while not instance.is_behind:
            instance.send(abort(told))
            told += 1
        assert told == 6, "one more than half of what may wait"
        instance.send(Report(ZERO, LoadReport(GroupId(0))))
        for number in range(told, 10):
            instance.send(abort(number))
        with pytest.raises(MachineFailed, match="has read nothing for very long"):
            instance.send(abort(10))
        front = FrontChannel(heard)
        await front.start(address)

        def is_through() -> bool:
            instance.receive()
            return not instance.is_behind

        await until(is_through)
        instance.send(abort(10))
        await until(lambda: len(heard) == 11)
        assert heard == [(ZERO, abort(number)) for number in range(11)]
        instance.close()
        await front.close()

    asyncio.run(scenario())


def test_what_waits_for_a_front_that_is_elsewhere_now_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "MAX_QUEUED", 10)

    async def scenario() -> None:
        heard, places = Heard(), [fresh_address(), fresh_address()]
        instance = InstanceChannel(lambda: FrontPlace(places[0]), ZERO)
        for number in range(8):
            instance.send(abort(number))
        assert instance.is_behind
        del places[0]
        instance.receive()
        assert not instance.is_behind
        front = FrontChannel(heard)
        await front.start(places[0])
        instance.send(abort(9))
        await until(lambda: heard)
        assert heard == [(ZERO, abort(9))]
        instance.close()
        await front.close()

    asyncio.run(scenario())


def test_sending_to_nobody_is_told() -> None:
    async def scenario() -> None:
        heard = Heard()
        front = FrontChannel(heard)
        await front.start(fresh_address())
        assert not front.send(ZERO, Shutdown())
        instance = await join(front, heard, ZERO)
        assert front.send(ZERO, Shutdown())
        instance.close()
        await until(lambda: not front.send(ZERO, Shutdown()))
        await front.close()

    asyncio.run(scenario())


def test_a_successor_takes_over_and_the_dead_are_not_heard() -> None:
    async def scenario() -> None:
        heard = Heard()
        front = FrontChannel(heard)
        await front.start(fresh_address())
        old = await join(front, heard, ZERO)
        front.forget(ZERO)
        front.forget(ONE)
        assert not front.send(ZERO, abort(0))
        new = await join(front, heard, ZERO)
        old.send(abort(1))
        assert front.send(ZERO, abort(2))
        assert new.poll(5.0) == [abort(2)]
        new.send(abort(3))
        await until(lambda: (ZERO, abort(3)) in heard)
        assert (ZERO, abort(1)) not in heard
        assert old.receive() == []
        old.close()
        new.close()
        await front.close()

    asyncio.run(scenario())


def test_strangers_are_not_heard() -> None:
    async def scenario() -> None:
        heard = Heard()
        front = FrontChannel(heard)
        await front.start(fresh_address())
        forged = identity.pack(identity.Identity(b"m", ZERO, identity.new_incarnation())) + b"x"
        guess = connect_dealer(front.address, forged)
        guess.send(encode(abort(0)))
        anonymous = zmq.Context.instance().socket(zmq.DEALER)
        anonymous.linger = 0
        anonymous.connect(front.address)
        anonymous.send(b"hello")
        await until(lambda: front.rejections.num == 2)
        assert heard == []
        assert not front.send(ZERO, abort(1))
        guess.close()
        anonymous.close()
        await front.close()

    asyncio.run(scenario())


def test_nonsense_of_an_instance_is_reported() -> None:
    async def scenario() -> None:
        faults: list[tuple[InstanceId, MalformedMessage]] = []
        heard = Heard()
        front = FrontChannel(heard, on_fault=lambda who, error: faults.append((who, error)))
        await front.start(fresh_address())
        me = identity.Identity(b"m", ONE, identity.new_incarnation())
        socket = connect_dealer(front.address, identity.pack(me))
        socket.send_multipart([bytes(8), b"\xff\xff"])
        socket.send_multipart([b"three", b"frames", b"here"])
        socket.send_multipart([b"no number", bytes(encode(abort(0)))])
        await until(lambda: len(faults) == 3)
        assert [who for who, _ in faults] == [ONE, ONE, ONE]
        assert heard == []
        socket.close()
        await front.close()

    asyncio.run(scenario())


def numbered(number: int, message: Message) -> list[bytes]:
    return [number.to_bytes(8, "little"), bytes(encode(message))]


def test_a_gap_is_told_by_both_ends() -> None:
    async def scenario() -> None:
        faults: list[MalformedMessage] = []
        heard = Heard()
        front = FrontChannel(heard, on_fault=lambda who, error: faults.append(error))
        await front.start(fresh_address())
        me = identity.Identity(b"m", ONE, identity.new_incarnation())
        socket = connect_dealer(front.address, identity.pack(me))
        for number in (7, 8, 10, 11):  # what came before 7 was for an earlier front
            socket.send_multipart(numbered(number, abort(number)))
        await until(lambda: len(heard) == 2 and len(faults) == 2)  # nothing after it is taken
        assert isinstance(faults[0], LostMessages)
        socket.close()
        await front.close()

        router = bind_router(fresh_address())
        instance = InstanceChannel(address_of(router), ZERO)
        instance.send(abort(0))
        route = router.recv_multipart()[0]
        for number in (0, 1, 0, 1):  # a new front begins anew
            router.send_multipart([route, *numbered(number, abort(number))])
        got: list[Message] = []
        while len(got) < 4:
            got += instance.poll(5.0)
        router.send_multipart([route, *numbered(3, abort(3))])
        with pytest.raises(LostMessages):
            while True:
                instance.poll(5.0)
        instance.close()
        router.close()

    asyncio.run(scenario())


def test_an_error_of_the_callback_reaches_the_loop_and_stops_nothing() -> None:
    async def scenario() -> None:
        errors: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: errors.append(context["exception"])
        )
        heard: list[Message] = []

        def on_event(instance_id: InstanceId, message: Message) -> None:
            if message == abort(1):
                raise ValueError("a bug")
            heard.append(message)

        front = FrontChannel(on_event)
        await front.start(fresh_address())
        instance = InstanceChannel(front.address, ZERO)
        for number in range(3):
            instance.send(abort(number))
        await until(lambda: len(heard) == 2)
        assert [str(error) for error in errors] == ["a bug"]
        instance.close()
        await front.close()

    asyncio.run(scenario())


def test_the_heart_beats_while_the_loop_is_busy() -> None:
    async def scenario() -> None:
        heard = Heard()
        front = FrontChannel(heard)
        await front.start(fresh_address())
        instance = await join(front, heard, ONE)
        instance.start_heartbeat(0.002)
        await until(lambda: len(heard) >= 5)
        assert set(heard) == {(ONE, Alive(ONE))}
        assert front.send(ONE, abort(0))
        assert instance.poll(5.0) == [abort(0)], "the heartbeat's socket is not the channel"
        instance.close()
        await front.close()

    asyncio.run(scenario())


def test_an_instance_may_come_before_the_front() -> None:
    async def scenario() -> None:
        address = fresh_address()
        early = InstanceChannel(address, ZERO)
        early.send(abort(7))
        heard = Heard()
        front = FrontChannel(heard)
        await front.start(address)
        await until(lambda: heard == [(ZERO, abort(7))])
        early.close()
        await front.close()

    asyncio.run(scenario())


def test_close_before_start() -> None:
    asyncio.run(FrontChannel(Heard()).close())


def test_poll_gives_up() -> None:
    instance = InstanceChannel(fresh_address(), ZERO)
    assert instance.poll(0.001) == []
    assert len(instance.poll_sockets) == 1
    instance.close()
