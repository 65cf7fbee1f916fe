"""The control channel: one front, many instances.

The front reads its socket from the event loop's ``add_reader`` instead of ``zmq.asyncio``:
measured under uvloop, a round trip takes 85-130 us instead of 145-175 and a message costs
2-4 us of processor time instead of 16-25, since no future is made per message.

Messages are numbered per connection and direction. ZeroMQ connects again by itself when a
connection breaks, and what was on its way is gone: the gap in the numbers tells, and is a failure
of the instance. One message lost in silence would be a request that never ends.
"""

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from kunserve.core.faults import MachineFailed
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Alive, Message, Report
from kunserve.core.snapshots import StageTime
from kunserve.transport.wire import codec, identity, sockets
from kunserve.transport.wire.doorkeeper import Doorkeeper, KeyRing, key_of
from kunserve.transport.wire.heartbeat import FrontCall, Heartbeat
from kunserve.transport.wire.identity import Identity
from kunserve.transport.wire.network import FrontPlace, Keys, Network
from kunserve.transport.wire.pulse import GIVEN_UP, Answer, Pulse
from kunserve.transport.wire.sockets import (
    AT_ONCE,
    AT_ONCE_AND_MORE,
    Context,
    Guard,
    PollTarget,
    Rejections,
    address_of,
    bind_router,
    has_arrived,
)

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 256
"""Read in one turn of the event loop at most, so that HTTP gets its turns too."""
MOST_TURN_S = 0.01
"""After so much work the others are left to the next turn. It is processor time: a front that has
to wait for a core shall not read less in each turn, or it never keeps up.
"""

MOST_UNREAD = 1000
"""Of each instance, so that a front that gets too little of a core does not fill its memory with
what it has not read. More waits with the instance.
"""
_NUMBER = struct.Struct("<Q")
_MAIN = b"m"
_HEARTBEAT = b"h"
_PROBE = b""
SILENT_FRONT_TIMEOUTS = 15.0
"""Of a link's timeout: an instance keeps its connection to a front that is stopped for a while."""


class FrontNetwork(NamedTuple):
    """What a front needs to be called from other hosts."""

    keys: Keys
    link_timeout_s: float
    name: str
    """Tells it from other fronts of the same cluster."""


class FrontChannel:
    """The front's end. All methods belong to one event loop."""

    def __init__(
        self,
        on_event: Callable[[InstanceId, Message], None],
        on_fault: Callable[[InstanceId, codec.MalformedMessage], None] | None = None,
        network: FrontNetwork | None = None,
    ) -> None:
        """``on_event`` gets every message; ``on_fault`` hears of an instance that talks nonsense.

        Without ``on_fault`` the error goes to the event loop's exception handler. On a ``network``
        only processes are let in that ``admit`` has named.
        """
        self._network = network
        self._ring = KeyRing()
        self._keys: dict[InstanceId, str] = {}
        """Of the processes that are heard."""
        self._context: Context | None = None if network is None else zmq.Context()
        self._doorkeeper = None
        self._guard = None if network is None else Guard(network.keys, network.link_timeout_s)
        if self._context is not None and self._guard is not None:
            patience_s = self._guard.handshake_s
            self._doorkeeper = Doorkeeper(self._context, self._ring, "control", patience_s)
        self.rejections = Rejections("control")
        self._on_event = on_event
        self._on_fault = on_fault
        self._speakers: dict[bytes, Identity] = {}
        self._routes: dict[InstanceId, bytes] = {}
        self._forgotten: set[bytes] = set()
        self._num_told: dict[bytes, int] = {}
        """Messages sent, by route."""
        self._num_heard: dict[bytes, int] = {}
        self._is_drain_due = False

    async def start(self, address: str) -> None:
        """Bind and listen."""
        self._socket = bind_router(
            address,
            context=self._context,
            mandatory=True,
            guard=self._guard,
            most_unread=MOST_UNREAD,
        )
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)

    @property
    def address(self) -> str:
        """Where instances connect. Known once started."""
        return address_of(self._socket)

    def admit(self, instance_id: InstanceId, public_key: str) -> None:
        """Hear the process with this key, and no other one of the instance.

        Those before it may still connect, but are only told that they are given up.
        """
        self._ring.admit(public_key, instance_id)
        self._keys[instance_id] = public_key

    def reaches(self, instance_id: InstanceId) -> bool:
        """Whether there is a connection to the instance, as far as the pulses on it tell."""
        route = self._routes.get(instance_id)
        return route is not None and self._post((route, _PROBE))

    def _post(self, frames: tuple[bytes, ...]) -> bool:
        """Send what is no message; False where nobody is connected."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return error.errno == zmq.EAGAIN
        finally:
            self._drain_soon()
        return True

    def send(self, instance_id: InstanceId, message: Message) -> bool:
        """Queue a message; False when the instance is not connected (it died, or never came).

        Nor is it queued when the instance has read nothing for very long.
        """
        route = self._routes.get(instance_id)
        if route is None:
            return False
        data = codec.encode(message)
        try:
            number = self._num_told.get(route, 0)
            self._socket.send_multipart((route, _NUMBER.pack(number), data), zmq.NOBLOCK)
            self._num_told[route] = number + 1
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                logger.error("queue full, message dropped instance=%d %.80r", instance_id, message)
            elif error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            # The descriptor is edge-triggered: sending may have taken the edge of an arrival.
            self._drain_soon()
        return True

    def forget(self, instance_id: InstanceId) -> None:
        """The instance's process died: what it still says is ignored; its successor is not."""
        self._keys.pop(instance_id, None)
        route = self._routes.pop(instance_id, None)
        if route is not None:
            self._forgotten.add(self._speakers[route].incarnation)
            self._num_told.pop(route, None)
            self._num_heard.pop(route, None)
        self._speakers = {
            data: who
            for data, who in self._speakers.items()
            if who.incarnation not in self._forgotten
        }

    async def close(self) -> None:
        """Stop listening and drop what was not sent. Callable before ``start``, and twice."""
        if hasattr(self, "_socket") and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        if self._doorkeeper is not None and self._context is not None:
            self._doorkeeper.close()
            self._context.term()

    def _drain_soon(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        if self._socket.closed:
            return
        until_s = time.thread_time() + MOST_TURN_S
        try:
            for _ in range(MESSAGES_PER_TURN):
                try:
                    frames, key = self._receive()
                except zmq.Again:
                    return
                self._take(frames, key)
                if time.thread_time() > until_s:
                    break
        except BaseException:
            self._drain_soon()
            raise
        self._drain_soon()

    def _receive(self) -> tuple[list[bytes], str]:
        """A message, and its sender's key if that is not known yet."""
        if self._network is None:
            return self._socket.recv_multipart(zmq.NOBLOCK), ""
        parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        frames = [part.bytes for part in parts]
        return frames, "" if frames[0] in self._speakers else key_of(parts[0])

    def _take(self, frames: list[bytes], key: str) -> None:
        speaker = self._identify(frames[0], key)
        if self._network is not None:
            self._answer(frames, self._network.name if speaker else GIVEN_UP)
        if speaker is None:
            return
        try:
            if len(frames) != 3:
                raise codec.MalformedMessage(f"{len(frames)} frames instead of 3")
            if speaker.lane == _MAIN:
                # A front that comes later hears an instance from the middle on.
                number = _number_of(frames[1])
                _check_number(number, self._num_heard.get(frames[0], number))
                self._num_heard[frames[0]] = number + 1
            message = codec.decode(frames[2])
        except codec.MalformedMessage as error:
            if self._on_fault is None:
                raise
            self._on_fault(speaker.instance_id, error)
        else:
            self._on_event(speaker.instance_id, message)

    def _answer(self, frames: list[bytes], name: str) -> None:
        """A heartbeat that asks whether its front is there gets its answer at once."""
        if len(frames) == 3 and frames[0][:1] == _HEARTBEAT and frames[1]:
            self._post((frames[0], Answer(frames[1], name).to_bytes()))

    def _identify(self, route: bytes, key: str) -> Identity | None:
        known = self._speakers.get(route)
        if known is not None:
            return known
        speaker = identity.unpack(route)
        if speaker is None:
            self.rejections.note()
            return None
        if self._network is not None and self._keys.get(speaker.instance_id) != key:
            return None  # it is given up, or speaks in another's name
        if speaker.incarnation in self._forgotten:
            return None
        self._speakers[route] = speaker
        if speaker.lane == _MAIN:
            self._routes[speaker.instance_id] = route
        return speaker


class InstanceChannel:
    """An instance's end. Belongs to the instance's loop thread; never blocks but in ``poll``."""

    def __init__(
        self,
        address: str | Callable[[], FrontPlace],
        instance_id: InstanceId,
        network: Network | None = None,
    ) -> None:
        """Call the front at ``address``, on a ``network`` the one with its front's key.

        An address that may change is asked for again and again, by two threads.
        """
        self._me = Identity(_MAIN, instance_id, identity.new_incarnation())
        self._guard = None
        if network is not None:
            timeout_s = SILENT_FRONT_TIMEOUTS * network.link_timeout_s
            self._guard = Guard(network.keys, timeout_s, network.front_public_key)
        self._most_unsent = sockets.MAX_QUEUED // 2
        route = identity.pack(self._me)
        self._call = FrontCall(address, route, self._guard, self._most_unsent)
        self._socket = self._call.socket
        self._heartbeat: Heartbeat | None = None
        self._unsent: deque[bytes | bytearray] = deque()
        """What the socket has no room for."""
        self._num_sent = 0
        self._num_received = 0

    @property
    def poll_sockets(self) -> tuple[PollTarget, ...]:
        """Readable when ``receive`` may have something."""
        return (self._socket,)

    def send(self, message: Message) -> None:
        """Queue a message to the front.

        A front that is stopped for hours reads nothing. Then a report is dropped, because the next
        one says what it said. Raises MachineFailed for any other message when that much waits that
        whoever heeds ``is_behind`` never has.
        """
        self._send_unsent()
        data = codec.encode(message)
        if (not self._unsent and self._has_sent(data)) or isinstance(message, Report | StageTime):
            return
        if len(self._unsent) >= self._most_unsent:
            raise MachineFailed("the front has read nothing for very long")
        self._unsent.append(data)

    @property
    def is_behind(self) -> bool:
        """Whether half of what may wait for the front does: nothing more should be computed."""
        return bool(self._unsent)

    def _send_unsent(self) -> None:
        if self._call.follow():
            self._unsent.clear()  # as what the socket had
        while self._unsent and self._has_sent(self._unsent[0]):
            self._unsent.popleft()

    def _has_sent(self, data: bytes | bytearray) -> bool:
        try:
            self._socket.send(_NUMBER.pack(self._num_sent), AT_ONCE_AND_MORE)
        except zmq.Again:
            return False
        self._socket.send(data, AT_ONCE)
        self._num_sent += 1
        return True

    def receive(self) -> list[Message]:
        """Everything that has arrived, in order.

        Raises MalformedMessage on nonsense, LostMessages when something is missing.
        """
        messages: list[Message] = []
        self._send_unsent()
        while has_arrived(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if frames == [_PROBE]:
                continue
            if len(frames) != 2:
                raise codec.MalformedMessage(f"{len(frames)} frames instead of 2")
            number = _number_of(frames[0])
            if number:  # a new front begins with 0
                _check_number(number, self._num_received)
            self._num_received = number + 1
            messages.append(codec.decode(frames[1]))
        return messages

    def poll(self, timeout_s: float) -> list[Message]:
        """Wait until something arrives or the time is up, then ``receive``."""
        self._socket.poll(max(0, round(timeout_s * 1000)))
        return self.receive()

    def start_heartbeat(
        self,
        period_s: float,
        say: Callable[[], Alive] | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """Say ``Alive`` from a thread of its own, so also while a long step runs.

        ``say`` makes each message, in that thread. With a ``pulse`` the front answers each.
        """
        assert self._heartbeat is None, "the heart beats already"
        who = self._me._replace(lane=_HEARTBEAT)
        route = identity.pack(who)
        say = say or (lambda: Alive(who.instance_id))
        self._heartbeat = Heartbeat(self._call.where, route, say, period_s, self._guard, pulse)

    def close(self) -> None:
        """Stop the heartbeat and drop what was not sent."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._socket.close()


def _number_of(frame: bytes) -> int:
    if len(frame) != _NUMBER.size:
        raise codec.MalformedMessage(f"a number of {len(frame)} bytes")
    number: int = _NUMBER.unpack(frame)[0]
    return number


def _check_number(number: int, expected: int) -> None:
    if number != expected:
        raise codec.LostMessages(f"message {number} has come, but {expected} was due")
