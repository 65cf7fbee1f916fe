"""A mark by which a process on this machine is found again, by others than its parent."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from kunserve.transport.children.child import end_of
from kunserve.transport.wire.network import FrontPlace


def mark_of(pid: int) -> str | None:
    """A process's number and start, so that another with its number is told from it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Field 3 is the state and field 22 the start, as counted from 1 in proc(5).
    return None if fields[0] in "ZX" else f"{pid}:{fields[19]}"


def own_mark(mark: str) -> str:
    """A process's mark without what its launcher has added behind an ``@``."""
    return mark.partition("@")[0]


def open_marked(mark: str) -> int | None:
    """A descriptor of the marked process; None if it has ended."""
    pid = pid_of(mark)
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        if mark_of(pid) == own_mark(mark):
            return fd
        os.close(fd)
    return None


def pid_of(mark: str) -> int:
    """The process's number."""
    return int(mark.partition(":")[0])


def kill_marked(mark: str) -> None:
    """SIGKILL the marked process, if it still runs."""
    fd = open_marked(mark)
    if fd is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


class FoundProcess:
    """A process that an earlier front of this machine started. Belongs to one event loop."""

    said = b""
    """Its standard output went to that front."""
    exit_code: int | None = None
    """Its parent alone is told."""

    public_key: str | None = None

    def __init__(self, mark: str, fd: int) -> None:
        """``fd`` is of ``open_marked``."""
        self.mark = mark
        self.pid = pid_of(mark)
        self._fd = fd
        self._end = asyncio.ensure_future(end_of(fd))

    async def wait(self) -> str:
        """Wait for its end; a process that is no child tells nobody its exit code."""
        await asyncio.shield(self._end)
        return "it ended"

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if not self._end.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def follow(self, front: FrontPlace) -> None:
        """Nobody can tell it anything: it sees its front by the lock, or at the old address."""
