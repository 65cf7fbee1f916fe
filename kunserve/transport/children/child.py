"""A process that this one starts, watches and ends: an instance, a front, a rank, a form's trial.

started -> (it leaves by itself, or is killed) -> over -> (a pause that doubles) the next one
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from kunserve.core.python_command import python_command

START_S = 60.0
"""How long a child that loads no model may take to its first word."""
LEAVE_S = 5.0
"""How long a child that was asked to leave may take before it is killed."""
END_S = 5.0
"""How long a killed process is waited for: one that a driver holds may not end for hours."""
FIRST_PAUSE_S = 0.25
"""Between the end of a child and the start of the next."""
MAX_PAUSE_S = 30.0
"""Each child that ends soon doubles the pause, up to this."""
SOON_S = 60.0
"""A child that has served for so long does not count as one that ends soon."""


class Child:
    """Another Python of this server. Threads ``join`` it; an event loop that watches it waits."""

    def __init__(
        self,
        program: Sequence[str],
        *,
        within: Sequence[str] = (),
        fds: Sequence[int] = (),
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. Raises OSError when the system refuses.

        ``program`` is what Python runs, ``within`` a command that runs the rest of its line. The
        child has ``fds`` by their numbers, and is in a process group of its own, because what a
        terminal sends is for its parent to hear. It is not in a session of its own: Linux shares
        processors between sessions first, and may then have one wait for seconds.
        """
        self._process = subprocess.Popen(
            [*within, *python_command(), *program],
            stdin=stdin,
            stdout=stdout,
            pass_fds=fds,
            env=environment,
            process_group=0,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._over: asyncio.Future[int] | None = None

    @property
    def exit_code(self) -> int | None:
        """The negative signal if one ended it; None while it runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens to a child that has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once. May be called again, after its end, and by any thread."""
        self._process.kill()

    # For threads

    def join(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end; its exit code, or None if it still runs after so long."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, patience_s: float = LEAVE_S) -> int | None:
        """Let it end by itself for so long, then kill it; its exit code."""
        if self.join(patience_s) is None:
            self.kill()
        return self.join()

    # For an event loop

    def watched(self) -> Self:
        """The running event loop sees its end from now on.

        Raises OSError when the system refuses, and kills the child then.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            self.end(0.0)
            raise
        self._over = asyncio.ensure_future(self._see_end(fd))
        return self

    async def _see_end(self, fd: int) -> int:
        await end_of(fd)
        return self._process.wait()

    async def wait(self) -> str:
        """Wait for its end; how it ended, for people."""
        assert self._over is not None, "nobody watches it"
        return words_for(await asyncio.shield(self._over))


class Mortal(Protocol):
    """A process that an event loop waits for, wherever it runs."""

    async def wait(self) -> str:
        """Wait for its end; how it ended, for people."""
        ...

    def kill(self) -> None:
        """End it at once. May be called again, and after its end."""
        ...


async def ended(process: Mortal, patience_s: float = 0.0) -> bool:
    """Let it end by itself for so long, then kill it; False if even that does not end it soon."""
    over = asyncio.ensure_future(process.wait())
    try:
        if patience_s:
            await asyncio.wait({over}, timeout=patience_s)
        process.kill()
        await asyncio.wait({over}, timeout=END_S)
        return over.done()
    finally:
        over.cancel()


async def end_of(fd: int) -> None:
    """Return when the process of this descriptor (``os.pidfd_open``) is over, and close it."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(fd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def words_for(exit_code: int) -> str:
    """How a child ended, for people."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = f"signal {-exit_code}"
    if exit_code != -signal.SIGKILL:
        return f"exit code {exit_code}: ended by {name}"
    return (
        f"exit code {exit_code}: ended by {name}; if nobody sent it, the kernel did because memory "
        "ran out (`dmesg` says so): lower --instance-memory or raise the container's limit"
    )


class Pauses:
    """How long one place stays empty after each child in it."""

    def __init__(self) -> None:
        self._num_soon_over = 0

    def after(self, served_s: float) -> float:
        """The pause after a child that served for so long; 0.0 if it never did."""
        if served_s > SOON_S:
            self._num_soon_over = 0
        self._num_soon_over += 1
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._num_soon_over - 1, 16))
