"""Questions and answers by which a process knows that its front is there, and which one it is.

A question carries the asker's own clock, and the answer gives it back. So nobody compares clocks
of two machines, and an answer that was long on its way counts from when it was asked for.
"""

import struct
from typing import NamedTuple, Protocol

GIVEN_UP = ""
"""The front's name as those hear it whom it has given up: they are to end."""
_CLOCK = struct.Struct("<d")


class Pulse(Protocol):
    """Whoever wants to know. Called from the heartbeat's thread."""

    def question(self) -> bytes:
        """What goes to the front with the next heartbeat: ``question_at``."""
        ...

    def answered(self, data: bytes) -> None:
        """The front has answered: ``Answer.read``."""
        ...


class Answer(NamedTuple):
    """The front's."""

    question: bytes
    front: str
    """Its name, or ``GIVEN_UP``."""

    def to_bytes(self) -> bytes:
        """For the wire."""
        return self.question + self.front.encode()

    @classmethod
    def read(cls, data: bytes) -> tuple[float, str]:
        """When it was asked for, by the asker's clock; and the front's name."""
        return _CLOCK.unpack(data[: _CLOCK.size])[0], data[_CLOCK.size :].decode()


def question_at(now_s: float) -> bytes:
    """A question asked now."""
    return _CLOCK.pack(now_s)
