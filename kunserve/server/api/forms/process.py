"""The front's end of the process that tries forms."""

import contextlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from kunserve.core.errors import MAX_WAITING_FORMS, Overloaded
from kunserve.core.request import StructuredOutput
from kunserve.server.api.forms.child import Order, Verdict, read_message, write_message

MAX_TRY_S = 5.0
"""A form's second of processor time comes within this, unless the machine has none to give."""
MAX_START_S = 60.0
TOO_MUCH = "it is too deep, too large or too slow to compile"
"""What is said of a form that has ended the process."""
_BY_THE_FORM = tuple(
    -number for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
)
"""Ends of the process: out of time, of memory, of stack."""
_MAX_END_S = 2.0


class FormProcess:
    """One process at a time, started when the first form comes. Not for two threads at once."""

    def __init__(self, order: Callable[[], Order]) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None

    def try_form(self, form: StructuredOutput) -> Verdict:
        """Whether the form can be had. Blocks for twice ``MAX_TRY_S`` at most, beside a start.

        Raises Overloaded when that could not be found out.
        """
        process = self._process or self._start()
        began_s = time.monotonic()
        try:
            with _killed_after(process, MAX_TRY_S):
                write_message(_stream(process.stdin), form)
            verdict = self._answer(process, MAX_TRY_S)
        except OSError:
            verdict = None
        if verdict is not None:
            return verdict
        if self._end(process) in _BY_THE_FORM:
            return Verdict(TOO_MUCH, time.monotonic() - began_s)
        raise Overloaded("Structured outputs cannot be compiled now.", limit=MAX_WAITING_FORMS)

    def kill(self) -> None:
        """Have ``try_form`` return soon. May be called from another thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if there is one."""
        self.kill()
        if self._process is not None:
            self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of a process that gives no answer; it is ended if it does not end."""
        self._process = None
        try:
            code = process.wait(_MAX_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                _stream(stream).close()
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kunserve.server.api.forms.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._process = process
        try:
            with _killed_after(process, MAX_START_S):
                write_message(_stream(process.stdin), self._order())
            ready = self._answer(process, MAX_START_S)
        except OSError:
            ready = None
        if ready is None:
            self._end(process)
            raise Overloaded(
                "The process that compiles structured outputs did not start.",
                limit=MAX_WAITING_FORMS,
            )
        return process

    @staticmethod
    def _answer(process: subprocess.Popen[bytes], timeout_s: float) -> Verdict | None:
        """The next answer; None if the process ends instead, or must be ended.

        An answer is short: all of it comes at once.
        """
        stream = _stream(process.stdout)
        readable, _, _ = select.select([stream], [], [], timeout_s)
        if readable:
            return read_message(stream, Verdict)
        process.kill()
        return None


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """A process that reads nothing is ended, because who writes to it would wait for ever."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _stream(stream: object) -> BinaryIO:
    return cast(BinaryIO, stream)
