"""ZeroMQ sockets with the options that every wire here wants."""

import logging
import time
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from kunserve.transport.wire.network import Keys, Network

logger = logging.getLogger(__name__)

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
PollTarget: TypeAlias = zmq.Socket[bytes] | int
"""What ``zmq.Poller.register`` takes: a socket or a file descriptor."""

ANY_PORT = "tcp://127.0.0.1:*"
"""For measuring over TCP; clusters use a ``SocketFolder``, or a host's own address and keys."""
_POLLIN = int(zmq.POLLIN)
AT_ONCE = int(zmq.NOBLOCK)
"""For ``Socket.send``, and the same with more parts to come. Plain numbers, because to join two of
pyzmq's flags is a dozen calls of Python."""
AT_ONCE_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
MAX_QUEUED = 100_000
"""Messages that wait for one peer; one more is refused."""
MAX_FRAME_BYTES = 1 << 30
"""A longer one ends the connection it comes on, before it is read."""
WARN_EVERY_S = 10.0
EXPEDITED = 46 << 2
"""IP TOS byte of the DSCP class *expedited forwarding*: switches and ``tc`` may send it first."""
ZAP_DOMAIN = b"kunserve"
PULSES_PER_TIMEOUT = 4
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_PERIOD_S = 5
_KEEPALIVE_PROBES = 3


@dataclass(frozen=True, slots=True)
class Guard:
    """What a socket wants between hosts: proof of who is at the other end, and signs of life."""

    keys: Keys
    """Of this process."""
    timeout_s: float
    """The connection is broken when nothing came for so long; ZeroMQ's own threads look."""
    server_key: str | None = None
    """Of the process that is called. None: this socket listens, and a ``Doorkeeper`` decides."""

    @property
    def handshake_s(self) -> float:
        """How long a connection may take until both sides have proved who they are."""
        return 2.0 * self.timeout_s


def guard_of(network: Network | None, server_key: str | None = None) -> Guard | None:
    """What a process's sockets want there; None on one machine, where a folder guards them."""
    if network is None:
        return None
    return Guard(network.keys, network.link_timeout_s, server_key)


def has_arrived(socket: Socket) -> bool:
    """Whether a message waits: half of what it costs to be refused one by an exception."""
    events: int = socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment]
    return bool(events & _POLLIN)


def _open(kind: zmq.SocketType, context: Context | None, guard: Guard | None) -> Socket:
    socket: Socket = (context or zmq.Context.instance()).socket(kind)
    socket.linger = 0
    # What may be queued is bounded above: admission limits, stages in flight, chunks in flight.
    # These bounds are for what should not happen: a peer that hangs, or sends what is no message.
    socket.set_hwm(MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    if guard is not None:
        _guard(socket, guard)
    return socket


def _guard(socket: Socket, guard: Guard) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, guard.keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, guard.keys.secret.encode())
    if guard.server_key is None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, guard.server_key.encode())
    timeout_ms = round(guard.timeout_s * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, timeout_ms // PULSES_PER_TIMEOUT))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(guard.handshake_s * 1000))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, timeout_ms)
    # For the time between two pulses nothing else is needed; this is for hosts whose ZeroMQ hangs.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_PERIOD_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)


def bind_router(
    address: str,
    *,
    context: Context | None = None,
    tos: int | None = None,
    mandatory: bool = False,
    guard: Guard | None = None,
    most_unread: int = MAX_QUEUED,
) -> Socket:
    """A socket that hears from many; ``mandatory`` makes sending to nobody an error.

    Of each peer it takes so many messages that nobody has read yet; more wait with the peer.
    Without a ``context`` it lives in the process's own, whose one thread serves all of them.
    """
    socket = _open(zmq.SocketType.ROUTER, context, guard)
    # A peer that connects again is the same peer; without this its new connection is ignored.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if mandatory:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.RCVHWM, most_unread)
    if tos is not None:
        socket.setsockopt(zmq.TOS, tos)
    try:
        _allow_ipv6(socket, address)
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def connect_dealer(
    address: str,
    identity: bytes,
    *,
    context: Context | None = None,
    tos: int | None = None,
    guard: Guard | None = None,
    most_unsent: int | None = None,
) -> Socket:
    """A socket that speaks to one; connecting goes on in the background until it succeeds.

    It takes so many messages (``MAX_QUEUED``) that the other end has not.
    """
    socket = dealer(identity, context=context, tos=tos, guard=guard)
    if most_unsent is not None:
        socket.setsockopt(zmq.SNDHWM, most_unsent)
    call(socket, address)
    return socket


def dealer(
    identity: bytes,
    *,
    context: Context | None = None,
    tos: int | None = None,
    guard: Guard | None = None,
) -> Socket:
    """A socket that will speak to one, and can be watched from the start; ``call`` connects it."""
    socket = _open(zmq.SocketType.DEALER, context, guard)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if tos is not None:
        socket.setsockopt(zmq.TOS, tos)
    return socket


def call(socket: Socket, address: str) -> None:
    """Connect, and go on trying."""
    _allow_ipv6(socket, address)
    socket.connect(address)


def _allow_ipv6(socket: Socket, address: str) -> None:
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)


def address_of(socket: Socket) -> str:
    """Where a bound socket is reached, its port filled in."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class Rejections:
    """Counts messages of sockets that are no instance's, and warns now and then."""

    def __init__(self, wire: str) -> None:
        self.num = 0
        self._wire = wire
        self._warned_s: float | None = None

    def note(self) -> None:
        """One more was dropped."""
        self.num += 1
        now_s = time.monotonic()
        if self._warned_s is None or now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning("rejected messages of strangers wire=%s so_far=%d", self._wire, self.num)
