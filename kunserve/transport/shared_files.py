"""Memory files of other processes on this host: bulk is copied from them, not sent.

A source says where in its memory file the bytes lie, and a taker reads them there, through the
file system of processes. Nothing is locked. The source counts in a second file whenever bytes may
get another meaning, before they do. A taker looks at the count when it has read: if it is not the
one that came with the place, what it has read is not used.
"""

import os
import zlib

import numpy as np

from kunserve.core.ids import InstanceId, RequestId
from kunserve.transport.bulk_wire import Bytes, Located, SharedFile

_COUNT_BYTES = 8
_NUM_COUNTS = 1024
"""Of the layers the first one; requests share the others."""


class Counts:
    """A source's: how often bytes that takers may read have got another meaning.

    Requests have counts of their own, as far as there are any: during an exchange one ends after
    the other, and that says nothing of those whose bytes are being read.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("kunserve-counts")
        self.file = SharedFile.of(self._fd)
        os.ftruncate(self._fd, _NUM_COUNTS * _COUNT_BYTES)
        self._values = [0] * _NUM_COUNTS

    def of(self, request_id: RequestId | None) -> tuple[int, int]:
        """Which count, and its value: a request's, or with None that of the layers."""
        number = 0
        if request_id is not None:
            number = 1 + zlib.crc32(request_id.encode()) % (_NUM_COUNTS - 1)
        return number, self._values[number]

    def add(self, request_id: RequestId | None) -> None:
        """Takers that read from now on know that what they were told of it is void."""
        number, value = self.of(request_id)
        self._values[number] = value + 1
        os.pwrite(self._fd, (value + 1).to_bytes(_COUNT_BYTES, "little"), number * _COUNT_BYTES)

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
        with located.memory.opened() as memory_fd, located.counts.opened() as count_fd:
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
            number, expected = located.count
            found = os.pread(count_fd, _COUNT_BYTES, number * _COUNT_BYTES)
        if int.from_bytes(found, "little") != expected or position != data.nbytes:
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
