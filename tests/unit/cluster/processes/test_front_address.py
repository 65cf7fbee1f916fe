"""A front that is called somewhere else: its instances are told, and call there."""

import asyncio
import io
import os

import pytest

from kunserve.cluster.processes.front_address import FrontAddress, lines_of
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Abort, Message, Shutdown
from kunserve.transport.wire.channel import FrontChannel, FrontNetwork, InstanceChannel
from kunserve.transport.wire.network import FrontPlace, Keys, Network, any_port_of, new_keys
from kunserve.transport.wire.pulse import Answer, question_at
from tests.conftest import wait_until
from tests.unit.transport.wire.test_channel import until

ZERO = InstanceId(0)
HOST = "127.0.0.1"


def test_the_last_address_that_was_told_counts() -> None:
    where = FrontAddress("tcp://a:1")
    assert where() == FrontPlace("tcp://a:1")
    last = b'{"address":"tcp://c:3","public_key":"key"}\n'
    where.follow(io.BytesIO(b'{"address":"tcp://b:2"}\nnonsense\n' + last))
    wait_until(lambda: where() == FrontPlace("tcp://c:3", "key"))


def test_lines_come_whole_however_they_are_written() -> None:
    source, sink = os.pipe()
    lines = lines_of(source)
    os.write(sink, b"an order\nand ")
    assert next(lines) == b"an order"
    os.write(sink, b"more\n\nends")
    os.close(sink)
    assert list(lines) == [b"and more", b"", b"ends"]
    os.close(source)


class Pulsing:
    def __init__(self) -> None:
        self.fronts: list[str] = []

    def question(self) -> bytes:
        return question_at(0.0)

    def answered(self, data: bytes) -> None:
        self.fronts.append(Answer.read(data)[1])


@pytest.mark.parametrize("has_own_keys", [False, True])
def test_an_instance_calls_where_its_front_is_now(has_own_keys: bool) -> None:
    """The later front has the keys of the earlier one, or tells its own."""
    keys, mine = new_keys(), new_keys()
    later = new_keys() if has_own_keys else keys

    async def front(name: str, keys: Keys) -> tuple[FrontChannel, list[Message]]:
        heard: list[Message] = []
        made = FrontChannel(
            lambda _, message: heard.append(message), network=FrontNetwork(keys, 1.0, name)
        )
        await made.start(any_port_of(HOST))
        made.admit(ZERO, mine.public)
        return made, heard

    async def story() -> None:
        (first, _), (second, heard) = await front("first", keys), await front("second", later)
        at = [FrontPlace(first.address)]
        me = Network(HOST, mine.public, mine.secret, keys.public)
        channel, pulse = InstanceChannel(lambda: at[0], ZERO, me), Pulsing()
        # A period of an hour: who is called somewhere else does not wait for it.
        channel.start_heartbeat(3600.0, pulse=pulse)
        channel.send(Abort(RequestId("a")))
        await until(lambda: pulse.fronts and first.reaches(ZERO))
        first.send(ZERO, Shutdown())
        await until(lambda: Shutdown() in channel.receive())
        at[0] = FrontPlace(second.address, later.public if has_own_keys else None)
        channel.send(Abort(RequestId("b")))
        await until(lambda: Abort(RequestId("b")) in heard and "second" in pulse.fronts)
        assert Abort(RequestId("a")) not in heard
        await until(lambda: not first.reaches(ZERO))  # it notices a moment later
        assert second.send(ZERO, Shutdown()), "numbers begin anew"
        await until(lambda: Shutdown() in channel.receive())
        channel.close()
        await first.close()
        await second.close()

    asyncio.run(story())
