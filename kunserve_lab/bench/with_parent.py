"""Becomes a program that ends with whoever started it, even one that is killed.

    python with_parent.py PARENT_PID SIGNAL COMMAND...

A killed process cleans nothing up, so the kernel has to: it sends the signal.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def with_parent(command: Sequence[str], sign: signal.Signals) -> list[str]:
    """The command, for ``Popen``, as one that gets a signal when this process is gone.

    As it is, where another than the main thread asks: the kernel would take its end for ours.
    """
    if threading.current_thread() is not threading.main_thread():
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(sign)), *command]


def main() -> None:
    """Only the standard library is there."""
    parent, sign, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(sign), 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(128 + int(sign))  # it was gone before the line above: that gives no signal
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
