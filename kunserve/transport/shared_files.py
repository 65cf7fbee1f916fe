"""Memory files of other processes on this host: bulk is copied from them, not sent.

A source says where in its memory file the bytes lie, and a taker reads them there, through the
file system of processes. Nothing is locked. The source counts in a second file whenever bytes may
get another meaning, before they do. A taker looks at the count when it has read: if it is not the
one that came with the place, what it has read is not used.
"""

import os

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


class PeerFiles:
    """A taker's: what it reads in the files of its sources. Belongs to the mover's thread.

    Files are opened for each read, which costs little beside the copy. A file that stays open would
    keep all memory of a source that has died, while its successor needs as much.
    """

    def __init__(self) -> None:
        self._refused: set[InstanceId] = set()
        self._stale: set[InstanceId] = set()
        self._room: Bytes = np.empty(0, dtype=np.uint8)
        """Used again and again, because new memory costs more than the copy into it."""

    def may_read(self, src: InstanceId) -> bool:
        """Whether to ask the source where bytes lie, rather than for the bytes."""
        return src not in self._refused and src not in self._stale

    def read(self, src: InstanceId, located: Located) -> Bytes | None:
        """The bytes, until the next call. None if the source is to send them instead."""
        with located.memory.opened() as memory_fd, located.count_file.opened() as count_fd:
            if memory_fd is None or count_fd is None:
                self._refused.add(src)
                return None
            total_bytes = sum(num_bytes for _, num_bytes in located.extents)
            if total_bytes > self._room.nbytes:
                self._room = np.empty(total_bytes, dtype=np.uint8)
            data = self._room[:total_bytes]
            position = 0
            for offset, num_bytes in located.extents:
                into = data[position : position + num_bytes].data
                position += os.preadv(memory_fd, [into], offset)
            count = int.from_bytes(os.pread(count_fd, _COUNT_BYTES, 0), "little")
        if count != located.count or position != data.nbytes:
            self._stale.add(src)
            return None
        return data

    def got_bytes(self, src: InstanceId) -> None:
        """The source has sent bytes: its next ones may be read again."""
        self._stale.discard(src)

    def lose(self, src: InstanceId) -> None:
        """The source's process is another one from now on, or gone."""
        self._refused.discard(src)
        self._stale.discard(src)
