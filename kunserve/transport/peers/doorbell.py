"""A bell that other processes of this host ring, and that a poll hears."""

import contextlib
import os

from kunserve.transport.bulk.wire import SharedFile

_MANY = 4096


class Doorbell:
    """Of the process that sleeps. A pipe, because others can open it where sockets they cannot."""

    def __init__(self) -> None:
        self._fd, self._ring_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.file = SharedFile.of(self._ring_fd)

    def fileno(self) -> int:
        """For a poller: readable when it was rung since ``clear``."""
        return self._fd

    def clear(self) -> None:
        """Hear what rings from now on. Look for messages after this, not before."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fd, _MANY)) == _MANY:
                pass

    def close(self) -> None:
        """Nobody listens any more."""
        os.close(self._fd)
        os.close(self._ring_fd)


class BellRope:
    """Of a process that wakes another one."""

    def __init__(self, fd: int) -> None:
        """``fd`` may be closed after this."""
        self._fd = os.dup(fd)

    def pull(self) -> None:
        """Ring. It rings already if nothing more goes in; whoever died hears nothing."""
        try:
            os.write(self._fd, b"!")
        except (BlockingIOError, BrokenPipeError):
            return

    def close(self) -> None:
        """The link is over."""
        os.close(self._fd)
