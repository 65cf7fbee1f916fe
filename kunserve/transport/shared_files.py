"""Memory files of other processes on this host: bulk is copied from them, not sent.

A source says where in its memory file the bytes lie, and a taker reads them there, through the
file system of processes. Nothing is locked. The source counts in a second file whenever bytes may
get another meaning, before they do. A taker looks at the count when it has read: if it is not the
one that came with the place, what it has read is not used.
"""

import os
from typing import NamedTuple

import numpy as np

from kunserve.core.ids import InstanceId
from kunserve.transport.bulk_wire import Bytes, Located, SharedFile

_COUNT_BYTES = 8


class Count:
    """A source's: how often bytes that takers may read have got another meaning."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("kunserve-count")
        self.file = SharedFile.of(self._fd)
        self.value = -1
        self.add()

    def add(self) -> None:
        """Takers that read from now on know that what they were told is void."""
        self.value += 1
        os.pwrite(self._fd, self.value.to_bytes(_COUNT_BYTES, "little"), 0)

    def close(self) -> None:
        """The source leaves."""
        os.close(self._fd)


class _Opened(NamedTuple):
    memory_fd: int
    count_fd: int


class PeerFiles:
    """A taker's: the files of its sources. Belongs to the mover's thread."""

    def __init__(self) -> None:
        self._opened: dict[InstanceId, tuple[SharedFile, _Opened]] = {}
        self._refused: set[InstanceId] = set()
        self._stale: set[InstanceId] = set()
        self._room: Bytes = np.empty(0, dtype=np.uint8)
        """Used again and again, because new memory costs more than the copy into it."""

    def may_read(self, src: InstanceId) -> bool:
        """Whether to ask the source where bytes lie, rather than for the bytes."""
        return src not in self._refused and src not in self._stale

    def read(self, src: InstanceId, located: Located) -> Bytes | None:
        """The bytes, until the next call. None if the source is to send them instead."""
        opened = self._open(src, located)
        if opened is None:
            self._refused.add(src)
            return None
        total_bytes = sum(num_bytes for _, num_bytes in located.extents)
        if total_bytes > self._room.nbytes:
            self._room = np.empty(total_bytes, dtype=np.uint8)
        data = self._room[:total_bytes]
        position = 0
        for offset, num_bytes in located.extents:
            into = data[position : position + num_bytes].data
            position += os.preadv(opened.memory_fd, [into], offset)
        count = int.from_bytes(os.pread(opened.count_fd, _COUNT_BYTES, 0), "little")
        if count != located.count or position != data.nbytes:
            self._stale.add(src)
            return None
        return data

    def got_bytes(self, src: InstanceId) -> None:
        """The source has sent bytes: its next ones may be read again."""
        self._stale.discard(src)

    def lose(self, src: InstanceId) -> None:
        """The source's process is another one from now on, or gone."""
        opened = self._opened.pop(src, None)
        if opened is not None:
            for fd in opened[1]:
                os.close(fd)
        self._refused.discard(src)
        self._stale.discard(src)

    def close(self) -> None:
        """Close all files."""
        for src in tuple(self._opened):
            self.lose(src)

    def _open(self, src: InstanceId, located: Located) -> _Opened | None:
        known = self._opened.get(src)
        if known is not None and known[0] == located.memory:
            return known[1]
        self.lose(src)
        memory = located.memory.open()
        count = located.count_file.open()
        if memory is None or count is None:
            for fd in (memory, count):
                if fd is not None:
                    os.close(fd)
            return None
        opened = _Opened(memory, count)
        self._opened[src] = (located.memory, opened)
        return opened
