"""Whose doing a failure is. Whoever raises it says so, because nobody can tell that later."""

import enum
import signal


class Fault(enum.StrEnum):
    """Why a process ends, or is ended."""

    REQUEST = "request"
    """What it computed, most likely: no other reason is known."""
    UNKNOWN = "unknown"
    """A signal, silence, a connection: seldom a request's doing."""
    MACHINE = "machine"
    """A disk, memory, a link, another process: no request's doing."""
    ORDER = "order"
    """Somebody has asked for it."""


class MachineFailed(RuntimeError):
    """Something that no request can break has failed, and the process cannot go on."""

    fault = Fault.MACHINE


class StepVoid(MachineFailed):
    """What a step computes with has not come, as a rule because who was to write it is dead.

    What the step gives is nobody's. The process can go on, in the next group that is formed.
    """


def fault_of(error: BaseException) -> Fault:
    """As it was said where the error was raised."""
    fault = getattr(error, "fault", Fault.REQUEST)
    assert isinstance(fault, Fault), fault
    return fault


EXIT_REMAP_FAILED = 71
"""Exit code of a process that the system refused a call in the middle of a remap."""
EXIT_LOST_MESSAGES = 72
"""Of one that misses messages of the front."""
EXIT_MACHINE_FAILED = 74
"""Of one in which a thread failed that computes nothing."""
_FAULTS: dict[int | None, Fault] = {
    None: Fault.UNKNOWN,
    0: Fault.ORDER,
    -signal.SIGKILL: Fault.UNKNOWN,
    -signal.SIGTERM: Fault.UNKNOWN,
    -signal.SIGINT: Fault.UNKNOWN,
    -signal.SIGHUP: Fault.UNKNOWN,
    EXIT_REMAP_FAILED: Fault.MACHINE,
    EXIT_LOST_MESSAGES: Fault.MACHINE,
    EXIT_MACHINE_FAILED: Fault.MACHINE,
}


def fault_of_exit(code: int | None) -> Fault:
    """Of a process that ended with this code (negative: a signal; None: nobody knows)."""
    return _FAULTS.get(code, Fault.REQUEST)
