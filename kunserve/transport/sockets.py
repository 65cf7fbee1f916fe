"""ZeroMQ sockets with the options that every wire here wants."""

from typing import TypeAlias

import zmq

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
PollTarget: TypeAlias = zmq.Socket[bytes] | int
"""What ``zmq.Poller.register`` takes: a socket or a file descriptor."""

ANY_PORT = "tcp://127.0.0.1:*"
EXPEDITED = 46 << 2
"""IP TOS byte of the DSCP class *expedited forwarding*: switches and ``tc`` may send it first."""


def _open(kind: zmq.SocketType, context: Context | None) -> Socket:
    socket: Socket = (context or zmq.Context.instance()).socket(kind)
    socket.linger = 0
    # No high-water mark: a full queue would block the step loop, or lose messages on a ROUTER.
    # What may be queued is bounded above: admission limits, stages in flight, chunks in flight.
    socket.set_hwm(0)
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
