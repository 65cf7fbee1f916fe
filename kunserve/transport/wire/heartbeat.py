"""An instance's connections to its front: they go where the front is now, and say that it lives."""

import contextlib
import threading
import time
from collections.abc import Callable

import zmq

from kunserve.core.messages import Alive
from kunserve.transport.wire import codec
from kunserve.transport.wire.network import FrontPlace
from kunserve.transport.wire.pulse import Pulse
from kunserve.transport.wire.sockets import Guard, call, connect_dealer

FOLLOW_S = 0.25
"""How often the heartbeat looks whether its front is called somewhere else."""


class FrontCall:
    """A socket to the front, wherever that is. Belongs to one thread."""

    def __init__(
        self,
        address: str | Callable[[], FrontPlace],
        route: bytes,
        guard: Guard | None,
        most_unsent: int | None = None,
    ) -> None:
        """``most_unsent``: see ``connect_dealer``."""
        self.where: Callable[[], FrontPlace]
        self.where = address if callable(address) else lambda: FrontPlace(address)
        self._place = self.where()
        self.socket = connect_dealer(
            self._place.address, route, guard=guard, most_unsent=most_unsent
        )

    def follow(self) -> bool:
        """If the front is somewhere else now, call there. What was not sent is not sent there."""
        place = self.where()
        if place == self._place:
            return False
        self.socket.disconnect(self._place.address)
        if place.public_key is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, place.public_key.encode())
        call(self.socket, place.address)
        self._place = place
        return True


class Heartbeat:
    """A thread that says ``Alive`` on a socket of its own until closed."""

    def __init__(
        self,
        address: str | Callable[[], FrontPlace],
        route: bytes,
        say: Callable[[], Alive],
        period_s: float,
        guard: Guard | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._address = address
        self._route = route
        self._say = say
        self._period_s = period_s
        self._guard = guard
        self._pulse = pulse
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        front = FrontCall(self._address, self._route, self._guard)
        socket, pulse = front.socket, self._pulse
        try:
            while not self._is_over.wait(0.0 if pulse else self._period_s):
                front.follow()
                question = b"" if pulse is None else pulse.question()
                with contextlib.suppress(zmq.Again):  # the next beat says it
                    socket.send_multipart((question, codec.encode(self._say())), zmq.NOBLOCK)
                if pulse is None:
                    continue
                # An answer is read as soon as it comes: the next question may wait a period.
                until_s = time.monotonic() + self._period_s
                while (left_s := until_s - time.monotonic()) > 0 and not self._is_over.is_set():
                    if socket.poll(max(1, round(min(left_s, FOLLOW_S) * 1000))):
                        pulse.answered(socket.recv())
                    elif front.follow():
                        break  # that front is asked at once
        finally:
            socket.close()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self._is_over.set()
        self._thread.join()
