"""Instances as forks of a process that has loaded what they need: torch takes each two seconds.

Everything else is as for a spawned one: a session, pipes and an environment of its own, and its
entry point is run anew. A test of starts themselves takes ``LocalLauncher``.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kunserve.cluster.processes.launch import (
    InstanceOrder,
    InstanceProcess,
    LocalLauncher,
    process_environment,
)
from kunserve.cluster.processes.process_mark import mark_of
from kunserve.transport.children.child import words_for
from kunserve.transport.wire.network import FrontPlace

ROOT = Path(__file__).parents[2]
REAL = "kunserve.cluster.instance.main"
_LOADED = {
    "tests.running.early_instance": REAL,
    "kunserve_lab.world.fake_main": "benchmarks.faults.faulty_instance",
}
"""Entry points that are run by forks of a process that has loaded another one, with the same."""
_LONGEST_BYTES = 1 << 16
_FIRST_SHARED_FD = 900
"""Of files that forks inherit: no process has so many of its own."""
_PR_SET_PDEATHSIG = 1


class ForkingLauncher(LocalLauncher):
    """Has a process that is ready fork instances."""

    async def start(self, order: InstanceOrder) -> InstanceProcess:
        """As the launcher that spawns: ``program`` is a file of this tree and its arguments."""
        program = self._program or ("-m", order.fake.module if order.fake else REAL)
        source = source_of(program, order.plan.config.instance.num_threads)
        if order.parent_pid is not None:
            order = replace(order, parent_pid=source.pid)
        shared = self._weights.fds_of(order.instance_id, order.plan, order.model_files)
        there = tuple(range(_FIRST_SHARED_FD, _FIRST_SHARED_FD + len(shared)))
        words = msgspec.json.encode(replace(order, weights_fds=there)) + b"\n"
        return ForkedInstance(*source.fork(program, words, shared))


class ForkedInstance:
    """A fork, watched from the test's event loop."""

    public_key: str | None = None

    def __init__(self, pid: int, said_fd: int, end_fd: int) -> None:
        """``said_fd`` is its standard output; its exit code comes from ``end_fd``."""
        self.pid = pid
        self.mark = mark_of(pid) or f"{pid}:gone"
        self.said = b""
        self.exit_code: int | None = None
        self._end = asyncio.create_task(self._see_end(said_fd, end_fd))

    async def _see_end(self, said_fd: int, end_fd: int) -> str:
        self.said = await read_all(said_fd)
        self.exit_code = int(await read_all(end_fd) or b"-9")
        return words_for(self.exit_code)

    async def wait(self) -> str:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def follow(self, front: FrontPlace) -> None:
        """It sees that by itself."""


async def read_all(fd: int) -> bytes:
    reader = asyncio.StreamReader()
    loop, pipe = asyncio.get_running_loop(), os.fdopen(fd, "rb", 0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()


class Source:
    """The process that forks. It ends with this one, and its forks with it."""

    def __init__(self, module: str, num_threads: int) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.running.forking", str(there.fileno()), module],
                cwd=ROOT,
                env={**process_environment(num_threads), "PYTHONPATH": str(ROOT)},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = here
        self.pid = self._process.pid
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(
        self, program: Sequence[str], order: bytes, shared: Sequence[int] = ()
    ) -> tuple[int, int, int]:
        """The process, and what to read its words and its end from; it inherits ``shared``."""
        pid, order_out, said_in, end_in = self.fork_open(program, shared)
        with contextlib.suppress(BrokenPipeError), os.fdopen(order_out, "wb") as file:
            file.write(order)
        return pid, said_in, end_in

    def fork_open(
        self, program: Sequence[str], shared: Sequence[int] = ()
    ) -> tuple[int, int, int, int]:
        """As ``fork``, with what to write its orders to behind the process."""
        pipes = [os.pipe() for _ in range(3)]
        (order_in, order_out), (said_in, said_out), (end_in, end_out) = pipes
        os.set_inheritable(order_out, False)
        task = json.dumps([list(program), dict(os.environ)]).encode()
        socket.send_fds(self._socket, [task], [order_in, said_out, 2, end_out, *shared])
        for fd in (order_in, said_out, end_out):
            os.close(fd)
        return int(self._socket.recv(32)), order_out, said_in, end_in


@cache
def source(module: str, num_threads: int) -> Source:
    return Source(module, num_threads)


def source_of(program: Sequence[str], num_threads: int) -> Source:
    """One for all entry points that load the same, while this process lives."""
    first, *rest = program
    path = rest[0] if first == "-m" else str(Path(first).relative_to(ROOT))
    module = path.removesuffix(".py").replace("/", ".")
    return source(_LOADED.get(module, module), num_threads)


def serve(control: socket.socket) -> None:
    """Fork on demand, and tell how forks end, until nobody asks any more."""
    ends: dict[int, int] = {}
    woken_in, woken_out = os.pipe()
    os.set_blocking(woken_out, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken_out)

    while True:
        ready, _, _ = select.select([control, woken_in], [], [])
        if woken_in in ready:
            os.read(woken_in, 4096)
            while ends and (found := os.waitpid(-1, os.WNOHANG))[0]:
                os.write(ends[found[0]], b"%d" % os.waitstatus_to_exitcode(found[1]))
                os.close(ends.pop(found[0]))
        if control in ready:
            task, fds, _, _ = socket.recv_fds(control, _LONGEST_BYTES, 16)
            if not task:
                return
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (control.detach(), woken_in, woken_out, fds[3], *ends.values()):
                    os.close(fd)
                become(*json.loads(task), fds)
            for fd in (*fds[:3], *fds[4:]):
                os.close(fd)
            ends[pid] = fds[3]
            control.send(b"%d" % pid)


def become(program: list[str], environment: dict[str, str], fds: list[int]) -> Any:
    """Be what Python would be that runs the program."""
    code = 1
    try:
        os.setsid()
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
            os.close(fd)
        for number, fd in enumerate(fds[4:], _FIRST_SHARED_FD):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main(fd: str, module: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module(module)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(fd)))


if __name__ == "__main__":
    main(*sys.argv[1:])
