"""A process with a time limit, of which nothing is left behind: no server, no instance.

A server of a phase has a process group of its own, so the phase's group is not enough. While a
child runs this process adopts its orphans (``PR_SET_CHILD_SUBREAPER``), and ends them, too. Where
this process is itself killed, the kernel ends the child, and then the child's servers.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from kunserve_lab.bench.with_parent import with_parent

GRACE_S = 15.0
"""Of a limit, for a phase that is told to end to stop its servers."""
_ORPHANS_S = 5.0
_LOOK_S = 0.2
_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Within, what our children leave behind becomes ours, and ends with this."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = frozenset(_children().get(os.getpid(), ()))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _end_all(before)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run(
    command: Sequence[str],
    *,
    folder: Path,
    environment: dict[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    limit_s: float,
    look: Callable[[], None] = lambda: None,
) -> int | None:
    """Its exit code, or None if it had to be stopped. ``look`` is called while it runs.

    It is told to end ``GRACE_S`` before the limit, and killed at the limit; first it is asked for
    its stacks (SIGUSR1).
    """
    grace_s = min(GRACE_S, limit_s / 4)
    ends_s = time.monotonic() + limit_s - grace_s
    with adopting():
        process = subprocess.Popen(
            with_parent(command, signal.SIGKILL),
            cwd=folder,
            env={**os.environ, **environment},
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if time.monotonic() >= ends_s:
                    _stop(process, grace_s)
                    return None
                look()
                time.sleep(_LOOK_S)
            return process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    process.send_signal(signal.SIGUSR1)
    time.sleep(min(0.5, grace_s / 4))
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)


def _end_all(but: frozenset[int]) -> None:
    """End all our children but some, and theirs; with a word first."""
    for sign, patience_s in ((signal.SIGTERM, _ORPHANS_S), (signal.SIGKILL, _ORPHANS_S)):
        until_s = time.monotonic() + patience_s
        is_told: set[int] = set()
        while (left := _left(but)) and time.monotonic() < until_s:
            for pid in left - is_told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sign)
            is_told |= left
            time.sleep(0.02)


def _left(but: frozenset[int]) -> set[int]:
    """Our descendants that run. Those of them that are ours and have ended are forgotten."""
    children = _children()
    found: set[int] = set()
    wave = [pid for pid in children.get(os.getpid(), ()) if pid not in but]
    for pid in list(wave):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                wave.remove(pid)
    while wave:
        found.update(wave)
        wave = [child for pid in wave for child in children.get(pid, ())]
    return found


def _children() -> dict[int, list[int]]:
    """Process -> those that it is the parent of, as the system has it now."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may have any character.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            found.setdefault(int(fields[1]), []).append(int(path.parent.name))
    return found
