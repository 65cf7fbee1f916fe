"""Ranks as forks of the test's process: a child of its own would import torch for seconds."""

import contextlib
import gc
import os
import signal
import socket
import time
import traceback
import warnings

from kunserve.transport.children.child import Child
from kunserve_extras.ranks.member import run_member


class ForkedRank(Child):
    """A child by a fork, which keeps what this process has imported."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def join(self, timeout_s: float | None = None) -> int | None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another thread has waited for it
                continue
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif deadline_s is not None and time.monotonic() > deadline_s:
                return None
            else:
                time.sleep(0.002)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_member(end: socket.socket) -> ForkedRank:
    """Starts a rank, for ``RankedBackend``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads that the child does not have
        pid = os.fork()
    if pid:
        return ForkedRank(pid)
    code = 1
    gc.freeze()  # a rank collects once: it would look at, and so copy, all that the tests have made
    try:
        # Whoever has the other end must not be a rank, or nobody would see that it is closed.
        # Numbers stay taken, because objects of the parent still close theirs here.
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, nothing, end.fileno()):
                with contextlib.suppress(OSError):  # the listing's own
                    os.fstat(int(name))
                    os.dup2(nothing, int(name))
        code = run_member(end)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
