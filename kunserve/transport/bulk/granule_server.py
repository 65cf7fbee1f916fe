"""Where a device's granules are handed to other processes of this host, as file descriptors.

Over a Unix socket in the cluster's private folder, because the driver's descriptors can be passed
on in no other way: opened a second time through ``/proc`` they are other files, and the call that
takes them out of another process (``pidfd_getfd``) is refused in containers and by Yama. The taker
asks for the next few, so there are never many open on either side, and it keeps its connection:
when that ends, the giver is gone, and its memory must not be held any longer.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from kunserve.transport.bulk.movable_memory import Granules, Window

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Descriptors in one message; the system takes 253."""
_MOST_TAKERS = 64
_REQUEST_BYTES = 8
_ANSWER = b"g"
_IPC = "ipc://"


def open_desk(bind: str, granules: Granules | None) -> "GranuleServer | None":
    """Where peers get a memory's granules, if it has any and there is a folder for sockets."""
    if granules is None or not bind.startswith(_IPC):
        return None
    return GranuleServer(Path(bind.removeprefix(_IPC) + ".g"), granules)


class GranuleServer:
    """A giver's. Belongs to one thread; ``turn`` never waits."""

    def __init__(self, path: Path, granules: Granules) -> None:
        """Listen at ``path``."""
        self.path = path
        self._granules = granules
        self._takers: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """Readable when ``turn`` has something to do."""
        if len(self._takers) >= _MOST_TAKERS:
            return tuple(
                self._takers
            )  # who waits to be accepted would wake the caller all the time
        return (self._listener, *self._takers)

    def turn(self) -> None:
        """Answer everybody who has asked; send those away who ask for what there is not."""
        # Also where no descriptor is left: whoever knocks is let in later, or reads bytes.
        with contextlib.suppress(OSError):
            while len(self._takers) < _MOST_TAKERS:
                taker, _ = self._listener.accept()
                taker.setblocking(False)
                self._takers.append(taker)
        for taker in tuple(self._takers):
            try:
                asked = taker.recv(_REQUEST_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                asked = b""
            if not self._answers(taker, asked):
                self._takers.remove(taker)
                taker.close()

    def close(self) -> None:
        """Takers see the end of their connections."""
        for one in (self._listener, *self._takers):
            one.close()
        self._takers.clear()
        self.path.unlink(missing_ok=True)

    def _answers(self, taker: socket.socket, asked: bytes) -> bool:
        """Hand out granules from the one asked for on; False if that cannot be."""
        first = int.from_bytes(asked, "little")
        if len(asked) != _REQUEST_BYTES or first >= self._granules.num_granules:
            return False
        fds: list[int] = []
        try:
            for granule in range(first, min(first + _AT_ONCE, self._granules.num_granules)):
                fds.append(self._granules.export(granule))
            socket.send_fds(taker, [_ANSWER], fds)
        except OSError as error:
            logger.info("this memory cannot be handed to a peer, its bytes are sent: %s", error)
            return False
        finally:
            for fd in fds:
                os.close(fd)
        return True


class OpenWindow:
    """A taker's: the granules of one source, which come a few at a time. ``turn`` never waits."""

    def __init__(self, path: str, window: Window, num_granules: int) -> None:
        """Raises OSError where nobody listens."""
        self._window = window
        self._num_granules = num_granules
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(path)
            self._ask()
        except OSError:
            self._socket.close()
            raise

    @property
    def socket(self) -> socket.socket:
        """Readable when ``turn`` has something to do."""
        return self._socket

    @property
    def address(self) -> int:
        """Where the first granule is mapped."""
        return self._window.address

    @property
    def is_complete(self) -> bool:
        """Whether all granules are mapped."""
        return self._window.num_granules == self._num_granules

    def turn(self) -> bool:
        """Map what has come; False if the source has gone, or gives no more."""
        with _received(self._socket) as fds:
            if fds is None:
                return True
            if not fds or self._window.num_granules + len(fds) > self._num_granules:
                return False
            try:
                for fd in fds:
                    self._window.add(fd)
                if not self.is_complete:
                    self._ask()
            except OSError as error:
                logger.warning("a peer's memory cannot be mapped here, its bytes come: %s", error)
                return False
        return True

    def end(self) -> Window:
        """Get no more; what is to be closed, so that the source's memory is held no longer."""
        self._socket.close()
        return self._window

    def _ask(self) -> None:
        self._socket.send(self._window.num_granules.to_bytes(_REQUEST_BYTES, "little"))


@contextlib.contextmanager
def _received(from_: socket.socket) -> Iterator[list[int] | None]:
    """Within, the descriptors of a message; None if there is none, no descriptor at its end."""
    try:
        _, fds, _, _ = socket.recv_fds(from_, len(_ANSWER), _AT_ONCE, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        yield None
        return
    except OSError:
        fds = []
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
