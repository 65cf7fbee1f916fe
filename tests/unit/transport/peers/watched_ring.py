"""A ring's writer that is watched, and a hand that spoils what it has written."""

import mmap
import os
from typing import ClassVar

import pytest

from kunserve.transport.peers import rings, shared_ring
from kunserve.transport.peers.shared_ring import RingWriter

DATA_AT = mmap.PAGESIZE
"""Where messages begin in a ring's memory. Its first 8 bytes count those that are written."""


class WatchedWriter(RingWriter):
    """Remembers what went by the ring."""

    made: ClassVar[list["WatchedWriter"]] = []
    """All of them, the newest last."""

    def __init__(self, fd: int, num_bytes: int = shared_ring.RING_BYTES) -> None:
        super().__init__(fd, num_bytes)
        self.memory = SpoiltMemory(fd, num_bytes)
        self.took: list[bool] = []
        """Of each message, whether the ring has it."""
        self.loses_next = False
        self.made.append(self)

    def write(self, data: bytes | bytearray, payload: memoryview | None) -> bool:
        if self.loses_next:
            self.loses_next = False
            return True
        self.took.append(super().write(data, payload))
        return self.took[-1]


class SpoiltMemory:
    """A ring's memory, for whoever writes there what no writer writes."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory = mmap.mmap(fd, DATA_AT + num_bytes)

    def count(self) -> int:
        """Bytes written so far."""
        return int.from_bytes(self._memory[:8], "little")

    def set_count(self, num_bytes: int) -> None:
        """Say that so many are written."""
        self._memory[:8] = num_bytes.to_bytes(8, "little")

    @property
    def next_at(self) -> int:
        """Where the next message will begin."""
        return self.count() % self._num_bytes

    def scribble(self, data: bytes, at: int) -> None:
        """Write over messages."""
        self._memory[DATA_AT + at : DATA_AT + at + len(data)] = data


def watch_writers(monkeypatch: pytest.MonkeyPatch) -> list[WatchedWriter]:
    """Every ring that is written to from now on, as it comes."""
    monkeypatch.setattr(WatchedWriter, "made", [])
    monkeypatch.setattr(rings, "RingWriter", WatchedWriter)
    return WatchedWriter.made


def die_while_writing() -> None:
    """The end of this process, with a message half written to its only ring."""
    memory = WatchedWriter.made[-1].memory
    memory.scribble(b"half written", at=memory.next_at + 8)
    os._exit(0)
