"""Links between instances: small messages and activations, in order, ahead of bulk.

One connection per direction and peer. A message with hidden states is two frames, and the
hidden states are sent from, and received into, memory that is not copied again. Messages are
numbered: what is missing, doubled or out of order is a fault of the link. Where processes share a
host, most messages go through shared memory instead (``peer_rings``), with the same numbers.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import zmq

from kunserve.core.ids import InstanceId
from kunserve.core.messages import Message
from kunserve.transport.peers.rings import open_rings
from kunserve.transport.wire import codec, identity
from kunserve.transport.wire.doorkeeper import Doorkeeper, KeyRing, key_of
from kunserve.transport.wire.identity import Identity
from kunserve.transport.wire.link_watch import LinkWatch
from kunserve.transport.wire.network import LINK_TIMEOUT_S, Network
from kunserve.transport.wire.numbering import STAMP_BYTES, Incoming, Outgoing, read_stamp
from kunserve.transport.wire.sockets import (
    AT_ONCE,
    AT_ONCE_AND_MORE,
    EXPEDITED,
    Context,
    PollTarget,
    Rejections,
    Socket,
    address_of,
    bind_router,
    call,
    dealer,
    guard_of,
    has_arrived,
)

logger = logging.getLogger(__name__)

COPY_BELOW_BYTES = 16 * 1024
"""Hidden states smaller than this are cheaper to copy than to hand over."""

LOOKS_PER_PATIENCE = 10
COUNTS_TOLD = 10
"""How often the count of a link is told after each message, a report's time apart."""

_PEER = b"p"


class PeerMail(NamedTuple):
    """A message from another instance, with its hidden states if it brought any."""

    message: Message
    payload: memoryview | None


class LinkFault(NamedTuple):
    """What a link brings is not what was sent on it, or it does not stand."""

    peer: InstanceId
    """The sender, or who cannot be reached."""
    reason: str
    is_down: bool = False
    """There is no connection, and nobody knows whether words are lost."""


class _Link(NamedTuple):
    address: str
    key: str
    """Of the peer; empty without a network."""
    socket: Socket


class PeerLinks:
    """One instance's links to all others. Belongs to the instance's loop thread."""

    def __init__(
        self,
        instance_id: InstanceId,
        bind: str | None = None,
        *,
        tos: int | None = EXPEDITED,
        network: Network | None = None,
        shares_memory: bool = True,
    ) -> None:
        """Listen at ``bind``, or on a free port of the ``network``'s host.

        On a network only peers are let in whose keys ``connect`` has told, and everything goes by
        sockets; elsewhere if not ``shares_memory``.
        """
        self.rejections = Rejections("peers")
        self._me = Identity(_PEER, instance_id, identity.new_incarnation())
        self._tos = tos
        self._network = network
        self._ring = KeyRing()
        self._watch = LinkWatch()
        # With a network's own context: its doorkeeper answers for no other socket.
        self._context: Context | None = None if network is None else zmq.Context()
        self._doorkeeper = None
        guard = guard_of(network)
        if self._context is not None and guard is not None:
            self._doorkeeper = Doorkeeper(self._context, self._ring, "peers", guard.handshake_s)
        self._speakers: dict[bytes, InstanceId] = {}
        """Who has been heard, by routing id."""
        at = bind if network is None else network.any_port
        assert at is not None, "neither an address nor a network"
        self._inbox = bind_router(at, context=self._context, tos=tos, guard=guard)
        has_rings = shares_memory and network is None
        self._rings = open_rings(self.address) if has_rings else None
        self._mail: list[PeerMail] = []
        self._links: dict[InstanceId, _Link] = {}
        self._under_way: deque[zmq.MessageTracker] = deque()
        self._outgoing = Outgoing()
        self._incoming = Incoming()
        self._faults: list[LinkFault] = []
        self._contact_s: dict[InstanceId, float] = {}
        """How long first contact may take, of peers that have never been reached."""
        self._late: list[InstanceId] = []
        """Reached for the first time after all, and not told yet."""
        self._next_look_s = 0.0
        """At the monitors of links: a look asks a socket for each peer, and turns are many."""
        self._counts_due: dict[InstanceId, int] = {}
        """How often the count is still to be told, by peer."""

    @property
    def address(self) -> str:
        """What to give the peers for ``connect``."""
        bound = address_of(self._inbox)
        return bound if self._network is None else self._network.advertised(bound)

    def where(self, peer: InstanceId) -> str:
        """The peer's address; empty if there is no such peer."""
        link = self._links.get(peer)
        return "" if link is None else link.address

    @property
    def poll_sockets(self) -> tuple[PollTarget, ...]:
        """Readable when ``receive`` may have something."""
        return (self._inbox,) if self._rings is None else (self._inbox, self._rings.bell.fileno())

    @property
    def bell(self) -> int | None:
        """Of ``poll_sockets`` the one that tells of mail for ``receive`` in brief; None without."""
        return None if self._rings is None else self._rings.bell.fileno()

    def connect(
        self,
        addresses: Mapping[InstanceId, str],
        keys: Mapping[InstanceId, str] | None = None,
        slow_s: Mapping[InstanceId, float] | None = None,
    ) -> None:
        """Know these peers and no others; a changed address or key is a new process.

        ``slow_s``: what first contact with a peer may take beside the handshake.
        """
        keys = keys or {}
        if self._rings is not None:
            self._rings.drain_all(self._take_beside)  # the link may go on, and its ring not
        self._ring.keep({key: peer for peer, key in keys.items()})
        self._speakers.clear()
        for peer, link in tuple(self._links.items()):
            if (addresses.get(peer), keys.get(peer, "")) != (link.address, link.key):
                self._close(peer)
                self._contact_s.pop(peer, None)
                self._outgoing.begin_anew(peer)
                if self._rings is not None:
                    self._rings.lose(peer)
                self._counts_due.pop(peer, None)
        for peer, address in addresses.items():
            if peer != self._me.instance_id and peer not in self._links:
                if self._network is not None:
                    usual_s = self._network.link_timeout_s
                    self._contact_s[peer] = usual_s + (slow_s or {}).get(peer, 0.0)
                self._open(peer, address, keys.get(peer, ""))

    def _open(self, peer: InstanceId, address: str, key: str) -> None:
        route, guard = identity.pack(self._me), guard_of(self._network, key)
        socket = dealer(route, context=self._context, tos=self._tos, guard=guard)
        if guard is not None:
            self._watch.watch(peer, socket, time.monotonic())
        call(socket, address)
        self._links[peer] = _Link(address, key, socket)

    def _close(self, peer: InstanceId) -> None:
        self._watch.forget(peer)
        self._links.pop(peer).socket.close()

    def begin_anew(self) -> None:
        """The instance forms a group from nothing: links that had a fault are as good as new."""
        self._outgoing.begin_anew()
        self._counts_due.clear()
        if self._network is not None:
            # What waits for a host that is cut off would come much later, with a gap in it.
            for peer, (address, key, _) in tuple(self._links.items()):
                self._close(peer)
                self._open(peer, address, key)

    def unreached(self, peers: Iterable[InstanceId]) -> list[InstanceId]:
        """Those of the peers to whom no connection stands now. None without a network."""
        if self._network is None:
            return []
        self._look(time.monotonic())
        return [p for p in peers if p != self._me.instance_id and not self._watch.is_up(p)]

    def _look(self, now_s: float) -> None:
        for peer, was_told in self._watch.look(now_s):
            if self._contact_s.pop(peer, None) is not None and was_told:
                self._late.append(peer)

    def patience_s(self, peers: Iterable[InstanceId]) -> float:
        """How long to wait for connections to these that do not stand."""
        usual_s = LINK_TIMEOUT_S if self._network is None else self._network.link_timeout_s
        return max((self._contact_s.get(peer, usual_s) for peer in peers), default=usual_s)

    def late_contacts(self) -> list[InstanceId]:
        """Since the last call: who is reached for the first time, after it was told as down."""
        late, self._late = self._late, []
        return late

    def tell_counts(self) -> None:
        """Let peers see whether the last message has come. Called about ten times a second."""
        for peer, left in tuple(self._counts_due.items()):
            count = self._outgoing.count(peer)
            if count is not None and peer in self._links:
                with contextlib.suppress(zmq.Again):
                    self._links[peer].socket.send(count.to_bytes(), zmq.NOBLOCK)
            if left == 1:
                del self._counts_due[peer]
            else:
                self._counts_due[peer] = left - 1

    def faults(self) -> list[LinkFault]:
        """Faults since the last call. Of such a link nothing is read until its sender begins anew.

        A fault shows when the next message comes, or the sender's count. On a network a link that
        does not stand for a while is one too: it is told once, until it stands again. One that
        never stood may take longer.
        """
        faults, self._faults = self._faults, []
        if self._network is not None:
            now_s, patience_s = time.monotonic(), self._network.link_timeout_s / 2
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + patience_s / LOOKS_PER_PATIENCE
                self._look(now_s)

                def limit_s(peer: InstanceId) -> float:
                    return self._contact_s.get(peer, patience_s)

                for peer in self._watch.down(limit_s, now_s):
                    reason = f"no connection for {limit_s(peer):g} s"
                    faults.append(LinkFault(peer, reason, is_down=True))
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
        socket = link.socket
        data = codec.encode(message)
        self._counts_due[dst] = COUNTS_TOLD
        stamp = self._outgoing.next(dst)
        data += stamp.to_bytes()  # of one that is not sent too: it is missing
        rings = self._rings if stamp.number > 0 else None
        if rings is not None and rings.write(dst, link.address, data, payload):
            return True
        flags = AT_ONCE if payload is None else AT_ONCE_AND_MORE
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

    def awake(self) -> None:
        """The process has slept. Called before what has woken it is received."""
        if self._rings is not None:
            self._rings.bell.clear()

    def receive(self, *, is_brief: bool = False) -> list[PeerMail]:
        """Everything that has arrived, in order per peer. Raises MalformedMessage.

        With ``is_brief`` only what lies in shared memory, where there is any: to look there costs
        much less than to ask a socket.
        """
        rings = self._rings
        if rings is not None and rings.has_readings:
            rings.drain_all(self._take_beside)
            if is_brief:
                mail, self._mail = self._mail, []
                return mail
        while has_arrived(self._inbox):
            route_frame, *frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            route = route_frame.bytes
            peer = self._speakers.get(route)
            if peer is None:
                peer = self._identify(route_frame)
            if peer is None:
                self.rejections.note()
                continue
            if len(frames) not in (1, 2):
                raise codec.MalformedMessage(f"{len(frames)} frames instead of 1 or 2")
            data = frames[0].buffer
            if len(frames) == 2 and not len(data):
                if self._rings is not None:
                    self._rings.accept(peer, frames[1].buffer)
                continue
            if len(data) < STAMP_BYTES:
                raise codec.MalformedMessage(f"a message of {len(data)} bytes")
            self._hear(route, peer, data, frames[1].buffer if len(frames) == 2 else None)
        mail, self._mail = self._mail, []
        return mail

    def _identify(self, route: zmq.Frame) -> InstanceId | None:
        """Who speaks; None if nobody is known who may speak so."""
        speaker = identity.unpack(route.bytes)
        if speaker is None:
            return None
        if self._network is not None and self._ring.owner(key_of(route)) != speaker.instance_id:
            return None  # one that is given up, or in another's name
        self._speakers[route.bytes] = speaker.instance_id
        return speaker.instance_id

    def _hear(
        self, route: bytes, peer: InstanceId, data: memoryview, payload: memoryview | None
    ) -> None:
        """A message has come by the socket; what was said before it may be in shared memory."""
        rings = self._rings
        if rings is not None:
            rings.drain(route, self._take_beside)
        stamp, is_count = read_stamp(data[-STAMP_BYTES:]), len(data) == STAMP_BYTES
        judge = self._incoming.count if is_count else self._incoming.take
        fault = judge(route, stamp)
        if fault is None and not is_count:
            self._mail.append(PeerMail(codec.decode(data[:-STAMP_BYTES]), payload))
        elif fault:
            self._faults.append(LinkFault(peer, fault))
        if rings is None:
            return
        rings.drain(route, self._take_beside)
        if payload is not None and peer in self._links:
            offer = rings.offer(peer, route)
            if offer is not None:
                with contextlib.suppress(zmq.Again):  # then all goes on by sockets
                    self._links[peer].socket.send_multipart((b"", offer), zmq.NOBLOCK)

    def _take_beside(
        self, route: bytes, peer: InstanceId, data: memoryview, payload: memoryview | None
    ) -> bool:
        """A message lies in shared memory. False: others must come first, by the socket."""
        if len(data) <= STAMP_BYTES:
            raise codec.MalformedMessage(f"a message of {len(data)} bytes")
        stamp = read_stamp(data[-STAMP_BYTES:])
        match self._incoming.when_beside(route, stamp):
            case "later":
                return False
            case "now":
                fault = self._incoming.take(route, stamp)
                if fault is None:
                    copy = None if payload is None else memoryview(bytearray(payload))
                    self._mail.append(PeerMail(codec.decode(data[:-STAMP_BYTES]), copy))
                elif fault:
                    self._faults.append(LinkFault(peer, fault))
        return True

    def poll(self, timeout_s: float) -> list[PeerMail]:
        """Wait until something arrives or the time is up, then ``receive``."""
        poller = zmq.Poller()
        for socket in self.poll_sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(max(0, round(timeout_s * 1000)))
        self.awake()
        return self.receive()

    def close(self) -> None:
        """Close every link and drop what was not sent."""
        for peer in tuple(self._links):
            self._close(peer)
        self._inbox.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        if self._context is not None:
            self._context.term()
        if self._rings is not None:
            self._rings.close()
