"""Servers of our own, for comparisons that start them themselves: mostly ``kunserve serve``."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kunserve.core.python_command import python_command
from kunserve_lab.bench.session import ServerUnreachable
from kunserve_lab.bench.with_parent import with_parent

READY_S = 180.0
STOP_S = 20.0
LAST_LINES = 15
"""Of the log, in an error."""
SERVER_LOGS = "BENCH_SERVER_LOGS"
"""A variable: the folder in which logs of servers are kept; else they go with the server. Not named
as settings are, because a server warns of what looks like one and is none.
"""


class ServerProcess:
    """One running server. Its log is kept in ``log_path``.

    It is told to end when this process is gone, also if that was killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log_path: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start what listens at the port. ``environment`` are further variables.

        Raises ServerUnreachable where there is no such command.
        """
        self.log_path = log_path
        self.url = f"http://127.0.0.1:{port}"
        whole = {**os.environ, **environment}
        if shutil.which(command[0], path=whole.get("PATH")) is None:
            raise ServerUnreachable(f"cannot start {command[0]}: No such file or directory")
        self._log = log_path.open("wb")
        self._process = subprocess.Popen(
            with_parent(command, signal.SIGTERM),
            env=whole,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    @classmethod
    def serving(cls, flags: Sequence[str], log_path: Path) -> "ServerProcess":
        """A ``kunserve serve`` with these arguments (the model first)."""
        (port,) = free_ports(1)
        command = [*python_command(), "-m", "kunserve.cli", "serve", *flags, "--port", str(port)]
        return cls(command, port, log_path)

    def wait_ready(self, patience_s: float = READY_S, num_lines: int = LAST_LINES) -> float:
        """Seconds until the first health answer. Raises ServerUnreachable with the log's end."""
        began_s = time.monotonic()
        host, port = self.url.removeprefix("http://").split(":")
        while time.monotonic() - began_s < patience_s:
            if self._process.poll() is not None:
                break
            if self._is_healthy(host, int(port)):
                return time.monotonic() - began_s
            time.sleep(0.05)
        raise ServerUnreachable(f"the server did not start:\n{self.log_tail(num_lines)}")

    @staticmethod
    def _is_healthy(host: str, port: int) -> bool:
        try:
            with socket.create_connection((host, port), timeout=1.0) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.recv(64)
        except OSError:
            return False

    def log_tail(self, num_lines: int = LAST_LINES) -> str:
        """The last lines of the server's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def transitions(self) -> list[str]:
        """The server's own lines on its drops and restores."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return [line for line in lines if " drop id=" in line or " restore id=" in line]

    def stop(self) -> None:
        """Drain briefly, then make sure that nothing is left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # others than ours may leave children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def free_ports(number: int) -> list[int]:
    """Different ones of this host that nobody listens at now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def running_server(flags: Sequence[str]) -> Generator[ServerProcess, None, None]:
    """A ready server with these ``kunserve serve`` arguments (the model first)."""
    with unwinding_on_sigterm(), tempfile.TemporaryDirectory(prefix="kunserve-") as folder:
        kept = os.environ.get(SERVER_LOGS)
        name = f"server-{os.getpid()}-{time.time_ns()}.log"
        server = ServerProcess.serving(flags, Path(kept or folder) / name)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def unwinding_on_sigterm() -> Generator[None, None, None]:
    """Within, SIGTERM ends this process as Ctrl-C does: its server is stopped first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)
