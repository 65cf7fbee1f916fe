"""The front's end of the process that tries forms."""

import contextlib
import signal
import socket
import time
from collections.abc import Callable

from kunserve.core.errors import MAX_WAITING_FORMS, Overloaded
from kunserve.core.request import StructuredOutput
from kunserve.server.api.forms.child import Order, Verdict, framed, read_message
from kunserve.transport.children.child import START_S, Child

MAX_TRY_S = 5.0
"""A form's second of processor time comes within this, unless the machine has none to give."""
TOO_MUCH = "it is too deep, too large or too slow to compile"
"""What is said of a form that has ended the process."""
_BY_THE_FORM = tuple(
    -number for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
)
"""Ends of the process: out of time, of memory, of stack."""


class FormProcess:
    """One process at a time, started when the first form comes. Not for two threads at once."""

    def __init__(self, order: Callable[[], Order]) -> None:
        self._order = order
        self._process: Child | None = None
        self._link: socket.socket | None = None
        """Our end of its standard input and output."""

    def try_form(self, form: StructuredOutput) -> Verdict:
        """Whether the form can be had. Blocks for twice ``MAX_TRY_S`` at most, beside a start.

        Raises Overloaded when that could not be found out.
        """
        if self._process is None:
            self._start()
        began_s = time.monotonic()
        verdict = self._ask(form, MAX_TRY_S)
        if verdict is not None:
            return verdict
        if self._end() in _BY_THE_FORM:
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
        self._end()

    def _start(self) -> None:
        self._link, theirs = socket.socketpair()
        ready = None
        with theirs, contextlib.suppress(OSError):  # no process, memory or descriptor is left
            program = ("-m", "kunserve.server.api.forms.child")
            self._process = Child(program, stdin=theirs, stdout=theirs)
            theirs.close()
            ready = self._ask(self._order(), START_S)
        if ready is None:
            self._end()
            raise Overloaded(
                "The process that compiles structured outputs did not start.",
                limit=MAX_WAITING_FORMS,
            )

    def _ask(self, message: Order | StructuredOutput, timeout_s: float) -> Verdict | None:
        """Its answer; None if the process ends instead, or must be ended."""
        assert self._process is not None and self._link is not None
        self._link.settimeout(timeout_s)
        try:
            self._link.sendall(framed(message))
            with self._link.makefile("rb") as answers:
                answer = read_message(answers)
                return answer if isinstance(answer, Verdict) else None
        except TimeoutError:
            self._process.kill()
        except OSError:
            pass  # it has ended
        return None

    def _end(self) -> int | None:
        """The exit code of a process that gives no answer; it is ended if it does not end."""
        process, self._process = self._process, None
        link, self._link = self._link, None
        code = None if process is None else process.end()
        if link is not None:
            link.close()
        return code
