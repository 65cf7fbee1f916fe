"""ZeroMQ sockets with the options that every wire here wants."""

import logging
import time
from typing import TypeAlias

import zmq

logger = logging.getLogger(__name__)

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
PollTarget: TypeAlias = zmq.Socket[bytes] | int
"""What ``zmq.Poller.register`` takes: a socket or a file descriptor."""

ANY_PORT = "tcp://127.0.0.1:*"
"""For measuring over TCP; clusters use a ``SocketFolder``."""
MAX_QUEUED = 100_000
"""Messages that wait for one peer; one more is refused."""
MAX_FRAME_BYTES = 1 << 30
"""A longer one ends the connection it comes on, before it is read."""
WARN_EVERY_S = 10.0
EXPEDITED = 46 << 2
"""IP TOS byte of the DSCP class *expedited forwarding*: switches and ``tc`` may send it first."""


def _open(kind: zmq.SocketType, context: Context | None) -> Socket:
    socket: Socket = (context or zmq.Context.instance()).socket(kind)
    socket.linger = 0
    # What may be queued is bounded above: admission limits, stages in flight, chunks in flight.
    # These bounds are for what should not happen: a peer that hangs, or sends what is no message.
    socket.set_hwm(MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


def bind_router(
    address: str,
    *,
    context: Context | None = None,
    tos: int | None = None,
    mandatory: bool = False,
) -> Socket:
    """A socket that hears from many; ``mandatory`` makes sending to nobody an error.

    Without a ``context`` it lives in the process's own, whose one thread serves all of them.
    """
    socket = _open(zmq.SocketType.ROUTER, context)
    # A peer that connects again is the same peer; without this its new connection is ignored.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if mandatory:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if tos is not None:
        socket.setsockopt(zmq.TOS, tos)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def connect_dealer(
    address: str, identity: bytes, *, context: Context | None = None, tos: int | None = None
) -> Socket:
    """A socket that speaks to one; connecting goes on in the background until it succeeds."""
    socket = _open(zmq.SocketType.DEALER, context)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if tos is not None:
        socket.setsockopt(zmq.TOS, tos)
    socket.connect(address)
    return socket


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
