"""Links between instances: small messages and activations, in order, ahead of bulk.

One connection per direction and peer. A message with hidden states is two frames, and the
hidden states are sent from, and received into, memory that is not copied again. Messages are
numbered: what is missing, doubled or out of order is a fault of the link.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import zmq

from kunserve.core.ids import InstanceId
from kunserve.core.messages import Message
from kunserve.transport import codec, identity
from kunserve.transport.identity import Identity
from kunserve.transport.numbering import STAMP_BYTES, Incoming, Outgoing, read_stamp
from kunserve.transport.sockets import (
    EXPEDITED,
    PollTarget,
    Rejections,
    Socket,
    address_of,
    bind_router,
    connect_dealer,
)

logger = logging.getLogger(__name__)

COPY_BELOW_BYTES = 16 * 1024
"""Hidden states smaller than this are cheaper to copy than to hand over."""

COUNTS_TOLD = 10
"""How often the count of a link is told after each message, a report's time apart."""

_PEER = b"p"


class PeerMail(NamedTuple):
    """A message from another instance, with its hidden states if it brought any."""

    message: Message
    payload: memoryview | None


class LinkFault(NamedTuple):
    """What a link brings is not what was sent on it."""

    peer: InstanceId
    """The sender."""
    reason: str


class PeerLinks:
    """One instance's links to all others. Belongs to the instance's loop thread."""

    def __init__(
        self,
        instance_id: InstanceId,
        bind: str,
        *,
        tos: int | None = EXPEDITED,
    ) -> None:
        """Listen at ``bind``."""
        self.rejections = Rejections("peers")
        self._me = Identity(_PEER, instance_id, identity.new_incarnation())
        self._tos = tos
        self._inbox = bind_router(bind, tos=tos)
        self._links: dict[InstanceId, tuple[str, Socket]] = {}
        self._under_way: deque[zmq.MessageTracker] = deque()
        self._outgoing = Outgoing()
        self._incoming = Incoming()
        self._faults: list[LinkFault] = []
        self._counts_due: dict[InstanceId, int] = {}
        """How often the count is still to be told, by peer."""

    @property
    def address(self) -> str:
        """What to give the peers for ``connect``."""
        return address_of(self._inbox)

    @property
    def poll_sockets(self) -> tuple[PollTarget, ...]:
        """Readable when ``receive`` may have something."""
        return (self._inbox,)

    def connect(self, addresses: Mapping[InstanceId, str]) -> None:
        """Know these peers and no others; a changed address is a new process."""
        for peer in [p for p, (a, _) in self._links.items() if addresses.get(p) != a]:
            self._links.pop(peer)[1].close()
            self._outgoing.begin_anew(peer)
            self._counts_due.pop(peer, None)
        for peer, address in addresses.items():
            if peer != self._me.instance_id and peer not in self._links:
                route = identity.pack(self._me)
                self._links[peer] = (address, connect_dealer(address, route, tos=self._tos))

    def begin_anew(self) -> None:
        """The instance forms a group from nothing: links that had a fault are as good as new."""
        self._outgoing.begin_anew()
        self._counts_due.clear()

    def tell_counts(self) -> None:
        """Let peers see whether the last message has come. Called about ten times a second."""
        for peer, left in tuple(self._counts_due.items()):
            count = self._outgoing.count(peer)
            if count is not None and peer in self._links:
                with contextlib.suppress(zmq.Again):
                    self._links[peer][1].send(count.to_bytes(), zmq.NOBLOCK)
            if left == 1:
                del self._counts_due[peer]
            else:
                self._counts_due[peer] = left - 1

    def faults(self) -> list[LinkFault]:
        """Faults since the last call. Of such a link nothing is read until its sender begins anew.

        A fault shows when the next message comes, or the sender's count.
        """
        faults, self._faults = self._faults, []
        return faults

    def send(self, dst: InstanceId, message: Message, payload: memoryview | None = None) -> bool:
        """Queue a message; False when there is no such peer (it died: the controller knows).

        Nor is it queued when the peer has read nothing for very long.
        The payload is not copied: its memory must not be written again (a step's hidden
        states are a fresh array).
        """
        link = self._links.get(dst)
        if link is None:
            logger.warning("no link to instance=%d, message dropped: %.80r", dst, message)
            return False
        socket = link[1]
        flags = zmq.NOBLOCK if payload is None else zmq.NOBLOCK | zmq.SNDMORE
        data = codec.encode(message)
        self._counts_due[dst] = COUNTS_TOLD
        data += self._outgoing.next(dst).to_bytes()  # of one that is not sent too: it is missing
        try:
            socket.send(data, flags)
        except zmq.Again:
            logger.error("queue full, message dropped instance=%d %.80r", dst, message)
            return False
        if payload is None:
            return True
        if payload.nbytes < COPY_BELOW_BYTES:
            socket.send(payload, zmq.NOBLOCK)
            return True
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft()
        tracker = socket.send(payload, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        self._under_way.append(tracker)
        return True

    def activations_pending(self) -> bool:
        """Whether hidden states are still on their way out. Called from any thread."""
        return any(not tracker.done for tracker in tuple(self._under_way))

    def receive(self) -> list[PeerMail]:
        """Everything that has arrived, in order per peer. Raises MalformedMessage."""
        mail: list[PeerMail] = []
        while True:
            try:
                route, *frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return mail
            sender = identity.unpack(route.bytes)
            if sender is None:
                self.rejections.note()
                continue
            if len(frames) not in (1, 2):
                raise codec.MalformedMessage(f"{len(frames)} frames instead of 1 or 2")
            data = frames[0].buffer
            if len(data) < STAMP_BYTES:
                raise codec.MalformedMessage(f"a message of {len(data)} bytes")
            stamp, is_count = read_stamp(data[-STAMP_BYTES:]), len(data) == STAMP_BYTES
            judge = self._incoming.compare if is_count else self._incoming.take
            fault = judge(route.bytes, stamp)
            if fault is None and not is_count:
                payload = frames[1].buffer if len(frames) == 2 else None
                mail.append(PeerMail(codec.decode(data[:-STAMP_BYTES]), payload))
            elif fault:
                self._faults.append(LinkFault(sender.instance_id, fault))

    def poll(self, timeout_s: float) -> list[PeerMail]:
        """Wait until something arrives or the time is up, then ``receive``."""
        self._inbox.poll(max(0, round(timeout_s * 1000)))
        return self.receive()

    def close(self) -> None:
        """Close every link and drop what was not sent."""
        for _, socket in self._links.values():
            socket.close()
        self._links.clear()
        self._inbox.close()
