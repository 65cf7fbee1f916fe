"""Numbers on the messages of a link, so that none is lost, doubled or overtaken in silence.

ZeroMQ connects again by itself when a connection breaks, and what was on its way is gone. A
message that is missing would be a step that never ends, or KV that never comes. So the receiver
tells a *fault*, and reads nothing more of that link until the sender begins an *epoch* anew. The
sender tells its count for a while after each message, because the last one may be what is lost.
"""

import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kunserve.core.ids import InstanceId

_FORM = struct.Struct("<IQ")


class Stamp(NamedTuple):
    """Which message of a link this is."""

    epoch: int
    """Counts beginnings: at each of them the numbers start at 0."""
    number: int

    def to_bytes(self) -> bytes:
        """For the wire."""
        return _FORM.pack(*self)


STAMP_BYTES = _FORM.size


def read_stamp(data: bytes | memoryview) -> Stamp:
    """A stamp from the wire: ``STAMP_BYTES`` of it."""
    return Stamp(*_FORM.unpack(data))


class Outgoing:
    """The sender's count of one process's links, by peer."""

    def __init__(self) -> None:
        self._latest_epoch = 0
        self._due: dict[InstanceId, Stamp] = {}

    def next(self, peer: InstanceId) -> Stamp:
        """The stamp of the next message to the peer."""
        due = self._due.get(peer)
        if due is None:
            self._latest_epoch += 1
            due = Stamp(self._latest_epoch, 0)
        self._due[peer] = Stamp(due.epoch, due.number + 1)
        return due

    def count(self, peer: InstanceId) -> Stamp | None:
        """What the next message to the peer would carry; None before the first one."""
        return self._due.get(peer)

    def begin_anew(self, peer: InstanceId | None = None) -> None:
        """What was said on the link to the peer, or to all of them, is of no use any more."""
        if peer is None:
            self._due.clear()
        else:
            self._due.pop(peer, None)


@dataclass(slots=True)
class _Heard:
    due: Stamp
    is_broken: bool = False


class Incoming:
    """The receiver's count of its links, by what tells the sending processes apart."""

    def __init__(self) -> None:
        self._heard: dict[bytes, _Heard] = {}

    def take(self, sender: bytes, stamp: Stamp) -> str | None:
        """A message has come. None: it is the next one; else what is wrong with it.

        An empty string is said of all that follows a fault: it is not to be read, nor told again.
        """
        fault = self.compare(sender, stamp)
        if fault is None:
            self._heard[sender].due = Stamp(stamp.epoch, stamp.number + 1)
        return fault

    def when_beside(self, sender: bytes, stamp: Stamp) -> Literal["now", "later", "never"]:
        """When to take a message that has come on a second way, which is not held up by the first.

        The first message of an epoch comes on the first way. So it says that nothing is left there
        of the epochs before.
        """
        heard = self._heard.get(sender)
        if heard is None or stamp.epoch > heard.due.epoch:
            return "later"
        if stamp.epoch < heard.due.epoch or heard.is_broken:
            return "never"
        return "later" if stamp.number > heard.due.number else "now"

    def count(self, sender: bytes, stamp: Stamp) -> str | None:
        """The sender tells what its next message would carry; the answer is as of ``take``.

        It may have sent more since, on the second way.
        """
        heard = self._heard.get(sender)
        if heard is not None and heard.due.epoch == stamp.epoch and stamp < heard.due:
            return None
        return self.compare(sender, stamp)

    def compare(self, sender: bytes, stamp: Stamp) -> str | None:
        """Whether this is the stamp that is due; the answer is as of ``take``."""
        heard = self._heard.get(sender)
        if heard is None:
            heard = self._heard[sender] = _Heard(Stamp(stamp.epoch, 0))
        if stamp.epoch > heard.due.epoch:
            heard.due, heard.is_broken = Stamp(stamp.epoch, 0), False
        if heard.is_broken:
            return ""
        if stamp == heard.due:
            return None
        heard.is_broken = True
        return f"message {stamp.number} has come, but {heard.due.number} was due"
