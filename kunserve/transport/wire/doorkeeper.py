"""Who may connect to a socket that listens on a network: processes whose keys are known.

ZeroMQ asks before it lets anybody in (its authentication protocol, RFC 27). A peer may call before
the front has told of it here, so the answer to an unknown key waits for a while. Of whoever got in
ZeroMQ tells the key with every message, so nobody can speak in another's name.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kunserve.core.ids import InstanceId
from kunserve.transport.wire.sockets import Context, Rejections
from kunserve.transport.wire.wakeup import Wakeup

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_OK, _DENIED = b"200", b"400"
_ROUTING_FRAMES = 2
_QUESTION_FRAMES = 7
_KEY_BYTES = 32
_MOST_WAITING = 256
"""Unknown keys; whoever calls when there are so many is sent away at once."""


class KeyRing:
    """The public keys that are known here, and whose they are. For any thread."""

    def __init__(self) -> None:
        self._owners: dict[str, InstanceId] = {}
        self._tell: Callable[[], None] = _nobody

    def listen(self, tell: Callable[[], None]) -> None:
        """Call this at every change."""
        self._tell = tell

    def admit(self, key: str, owner: InstanceId) -> None:
        """Let the process with this key in from now on."""
        self._owners[key] = owner
        self._tell()

    def keep(self, owners: dict[str, InstanceId]) -> None:
        """Know these keys and no others. What is connected stays so: its words are refused."""
        self._owners = dict(owners)
        self._tell()

    def owner(self, key: str) -> InstanceId | None:
        """Whose key it is."""
        return self._owners.get(key)


class _Waiting(NamedTuple):
    route: list[bytes]
    request_id: bytes
    key: str
    until_s: float


class Doorkeeper:
    """Answers ZeroMQ's questions for all sockets of one context, in a thread of its own."""

    def __init__(self, context: Context, ring: KeyRing, wire: str, patience_s: float) -> None:
        """An unknown key is waited for as long as the handshake may take, ``patience_s``."""
        self.rejections = Rejections(f"{wire} door")
        self._ring = ring
        self._patience_s = patience_s
        self._socket = context.socket(zmq.SocketType.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._waiting: list[_Waiting] = []
        self._is_closing = False
        self._wakeup = Wakeup()
        ring.listen(self._wakeup.set)
        self._thread = threading.Thread(target=self._run, name="doorkeeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        try:
            while not self._is_closing:
                poller.poll(round(self._patience_s * 1000) if self._waiting else None)
                self._wakeup.clear()
                self._read()
                self._look_again()
        finally:
            self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route, question = frames[:_ROUTING_FRAMES], frames[_ROUTING_FRAMES:]
            key = _key_in(question)
            request_id = question[1] if len(question) > 1 else b""
            if key is None or len(self._waiting) >= _MOST_WAITING:
                self._answer(route, request_id, None)
            else:
                until_s = time.monotonic() + self._patience_s
                self._waiting.append(_Waiting(route, request_id, key, until_s))

    def _look_again(self) -> None:
        now_s, left = time.monotonic(), []
        for one in self._waiting:
            if self._ring.owner(one.key) is not None:
                self._answer(one.route, one.request_id, one.key)
            elif now_s >= one.until_s:
                self.rejections.note()  # the handshake is over by itself, and may be tried again
            else:
                left.append(one)
        self._waiting = left

    def _answer(self, route: list[bytes], request_id: bytes, key: str | None) -> None:
        if key is None:
            self.rejections.note()
        verdict = (_DENIED, b"no", b"", b"") if key is None else (_OK, b"OK", key.encode(), b"")
        self._socket.send_multipart((*route, _VERSION, request_id, *verdict))

    def close(self) -> None:
        """Let nobody in any more, and wait for the thread. Callable twice."""
        if not self._is_closing:
            self._is_closing = True
            self._ring.listen(_nobody)
            self._wakeup.set()
            self._thread.join()
            self._wakeup.close()


def _nobody() -> None:
    return None


def _key_in(frames: list[bytes]) -> str | None:
    """The key of whoever asks to come in; None if it proves nothing."""
    if len(frames) != _QUESTION_FRAMES or frames[5] != b"CURVE" or len(frames[6]) != _KEY_BYTES:
        return None
    return str(z85.encode(frames[6]), "ascii")


def key_of(frame: zmq.Frame) -> str:
    """The key of the process that sent a frame, as ZeroMQ has checked it; empty without one."""
    try:
        found = frame.get("User-Id")
    except zmq.ZMQError:
        return ""
    return found if isinstance(found, str) else ""
