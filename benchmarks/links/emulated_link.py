"""A slow link on one machine: a proxy that lets one direction through at a given rate.

All connections share one first-in-first-out queue with a small buffer, as they would share a
network card or a switch port: what is behind 128 KiB of somebody's bulk waits for it.
"""

import select
import socket
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection

QUANTUM_BYTES = 16 * 1024
BUFFER_BYTES = 128 * 1024
SOCKET_BUFFER_BYTES = 256 * 1024
CREDIT_S = 0.002
LONGEST_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Route:
    """One listening port, and where it leads."""

    target: tuple[str, int]
    is_limited_inwards: bool
    """Whether bytes from the connecting side are the limited direction (else the answers)."""


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


class EmulatedLink:
    """Forwards connections; runs until its pipe says stop."""

    def __init__(self, gbps: float, routes: list[Route]) -> None:
        self._bytes_per_s = gbps * 1e9 / 8
        self._listeners: dict[socket.socket, Route] = {}
        for route in routes:
            listener = socket.create_server(("127.0.0.1", 0))
            self._listeners[listener] = route
        self._free: dict[socket.socket, socket.socket] = {}
        self._limited: dict[socket.socket, socket.socket] = {}
        self._queue: deque[tuple[socket.socket, bytes]] = deque()
        self._queued_bytes = 0
        self._free_at_s = 0.0
        self._turn = 0

    @property
    def addresses(self) -> list[str]:
        """Where to connect instead of each route's target."""
        return [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in self._listeners]

    def run(self, control: Connection) -> None:
        """Forward until something is said on ``control``."""
        while True:
            limited = self._limited if self._queued_bytes < BUFFER_BYTES else {}
            watched: list[Connection | socket.socket] = [control, *self._listeners]
            watched += [*self._free, *limited]
            readable, _, _ = select.select(watched, [], [], self._wait_s())
            if control in readable:
                return
            sockets = [each for each in readable if isinstance(each, socket.socket)]
            for each in sockets:
                if each in self._listeners:
                    self._accept(each)
                elif each in self._free:
                    self._forward(each)
            self._read_limited([each for each in sockets if each in limited])
            self._deliver()

    def _wait_s(self) -> float:
        if not self._queue:
            return LONGEST_WAIT_S
        return max(0.0, self._free_at_s - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        route = self._listeners[listener]
        inner, _ = listener.accept()
        outer = socket.create_connection(route.target)
        for each in (inner, outer):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        first, second = (inner, outer) if route.is_limited_inwards else (outer, inner)
        self._limited[first] = second
        self._free[second] = first

    def _forward(self, each: socket.socket) -> None:
        data = each.recv(QUANTUM_BYTES)
        if data:
            self._free[each].sendall(data)
        else:
            self._hang_up(self._free[each])

    def _read_limited(self, readable: list[socket.socket]) -> None:
        """One quantum of each connection in turn, while the buffer has room."""
        self._turn += 1
        for offset in range(len(readable)):
            each = readable[(self._turn + offset) % len(readable)]
            if self._queued_bytes >= BUFFER_BYTES or each not in self._limited:
                continue
            data = each.recv(QUANTUM_BYTES)
            if not data:
                self._hang_up(each)
                continue
            if not self._queue:
                now_s = time.monotonic()
                self._free_at_s = max(self._free_at_s, now_s) + len(data) / self._bytes_per_s
            self._queue.append((self._limited[each], data))
            self._queued_bytes += len(data)

    def _deliver(self) -> None:
        """Hand on the queue's head whenever the line has had time to carry it."""
        while self._queue:
            now_s = time.monotonic()
            if now_s < self._free_at_s:
                return
            target, data = self._queue.popleft()
            self._queued_bytes -= len(data)
            try:
                target.sendall(data)
            except OSError:
                continue
            if self._queue:
                began_s = max(self._free_at_s, now_s - CREDIT_S)
                self._free_at_s = began_s + len(self._queue[0][1]) / self._bytes_per_s

    def _hang_up(self, limited: socket.socket) -> None:
        other = self._limited.pop(limited)
        self._free.pop(other, None)
        limited.close()
        other.close()


def run_link(control: Connection, gbps: float, routes: list[Route]) -> None:
    """A process's body: says where to connect, then forwards until told to stop."""
    link = EmulatedLink(gbps, routes)
    control.send(link.addresses)
    link.run(control)
