"""Which links stand and which are down, as ZeroMQ's monitors tell. For links between hosts.

A host that is cut off says nothing, so nothing would ever come of it on the link: the numbers tell
only what a later message shows. ZeroMQ's own pulses find it, and its monitor says so here.
"""

import struct
from collections.abc import Callable, Iterable

import zmq

from kunserve.core.ids import InstanceId
from kunserve.transport.wire.sockets import Context, Socket

_EVENT = struct.Struct("=hi")


class LinkWatch:
    """The state of each link that is watched. Belongs to one thread."""

    def __init__(self) -> None:
        self._monitors: dict[InstanceId, Socket] = {}
        self._sockets: dict[InstanceId, Socket] = {}
        self._down_since_s: dict[InstanceId, float] = {}
        self._told: set[InstanceId] = set()
        self._num_watched = 0

    def watch(self, peer: InstanceId, socket: Socket, now_s: float) -> None:
        """Watch a socket that has not been connected yet: it is down."""
        # ZeroMQ's monitors are named sockets inside the process.
        self._num_watched += 1
        name = f"inproc://link-{id(self)}-{self._num_watched}"
        socket.monitor(name, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        context: Context = socket.context
        monitor = context.socket(zmq.SocketType.PAIR)
        monitor.linger = 0
        monitor.connect(name)
        self._monitors[peer], self._sockets[peer] = monitor, socket
        self._down_since_s[peer] = now_s

    def forget(self, peer: InstanceId) -> None:
        """The socket is about to be closed. Unknown peers are no mistake."""
        monitor = self._monitors.pop(peer, None)
        if monitor is not None:
            self._sockets.pop(peer).monitor(None, 0)
            monitor.close()
        self._down_since_s.pop(peer, None)
        self._told.discard(peer)

    def look(self, now_s: float) -> list[tuple[InstanceId, bool]]:
        """Read what has happened: whose links have come to stand, and if ``down`` had told them."""
        risen = []
        for peer, monitor in self._monitors.items():
            while True:
                try:
                    event, _ = _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
                except zmq.Again:
                    break
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    risen.append((peer, peer in self._told))
                    self._down_since_s.pop(peer, None)
                    self._told.discard(peer)
                else:
                    self._down_since_s.setdefault(peer, now_s)
        return risen

    def is_up(self, peer: InstanceId) -> bool:
        """Whether the link stands, as of the last look."""
        return peer in self._monitors and peer not in self._down_since_s

    def down(self, patience_s: Callable[[InstanceId], float], now_s: float) -> Iterable[InstanceId]:
        """Peers whose links are down for longer; each is told once, until its link stands again."""
        since = self._down_since_s.items()
        late = {peer for peer, since_s in since if now_s - since_s > patience_s(peer)}
        fresh = sorted(late - self._told)
        self._told |= late
        return fresh
