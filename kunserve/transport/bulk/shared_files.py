"""Memory files of other processes on this host: bulk is copied from them, not sent.

A source says where in its memory file the bytes lie, and a taker reads them there, through the
file system of processes. Nothing is locked. The source counts in a second file whenever bytes may
get another meaning, before they do. A taker looks at the count when it has read: if it is not the
one that came with the place, what it has read is not used. Memory of a device is no file: there a
taker maps the source's granules (``peer_windows``) and copies, and the rest is the same.
"""

import contextlib
import functools
import logging
import os
import socket
import zlib
from collections.abc import Iterator

from kunserve.core.ids import InstanceId, RequestId
from kunserve.transport.bulk.movable_memory import Granules, InFile, Mapped
from kunserve.transport.bulk.peer_windows import PeerWindows
from kunserve.transport.bulk.wire import Located, SharedFile, SharedGranules

logger = logging.getLogger(__name__)

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
    """A taker's: what it reads in the memory of its sources. Belongs to the mover's thread.

    Files are opened for each read, which costs little beside the copy. A file that stays open would
    keep all memory of a source that has died, while its successor needs as much.
    """

    def __init__(self, granules: Granules | None = None) -> None:
        """``granules`` are the taker's own, if its memory is a device's."""
        self._windows = PeerWindows(granules)
        self._readable: set[InstanceId] = set()
        """Sources whose files have been opened."""
        self._refused: set[InstanceId] = set()
        self._stale: set[InstanceId] = set()

    def may_read(self, src: InstanceId) -> bool:
        """Whether to ask the source where bytes lie, rather than for the bytes."""
        is_void = src in self._refused or src in self._stale
        return not is_void and not self._windows.is_opening(src)

    def has_read(self, src: InstanceId) -> bool:
        """Whether the source's bytes are read here in its file, as far as is known."""
        return src in self._readable and self.may_read(src)

    def has_mapped(self, src: InstanceId) -> bool:
        """Whether the source's memory is mapped here, so that its bytes need no chunks."""
        return self.may_read(src) and self._windows.is_open(src)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """Readable when ``turn`` has something to do."""
        return self._windows.sockets

    def turn(self) -> None:
        """Map what sources have given, and nothing of those that are gone."""
        self._refused.update(self._windows.turn())

    def close(self) -> None:
        """Hold no memory of others."""
        self._windows.close()

    @contextlib.contextmanager
    def find(self, src: InstanceId, located: Located) -> Iterator[InFile | Mapped | None]:
        """Within, the bytes where they lie. None if the source is to send them instead."""
        if isinstance(located.memory, SharedGranules):
            yield self._find_mapped(src, located.memory, located)
            return
        with located.memory.opened() as memory_fd, located.counts.opened() as count_fd:
            if memory_fd is None or count_fd is None:
                self._refused.add(src)
                yield None
                return

            def still_counts() -> bool:
                return _still_counts(located, count_fd)

            self._readable.add(src)
            found = InFile(memory_fd, located.extents, still_counts)
            yield found
            if found.is_void:
                self._stale.add(src)

    def _find_mapped(
        self, src: InstanceId, memory: SharedGranules, located: Located
    ) -> Mapped | None:
        try:
            spans = self._windows.spans(src, memory, located.extents)
        except OSError as error:
            logger.info("source=%d sends its bytes: %s", src, error)
            self._refused.add(src)
            return None
        if spans is None:
            return None
        return Mapped(spans, functools.partial(self._holds, src, located))

    def _holds(self, src: InstanceId, located: Located) -> bool:
        """Whether what was copied was what the source had said of it."""
        with located.counts.opened() as count_fd:
            is_true = count_fd is not None and _still_counts(located, count_fd)
        if not is_true:
            self._stale.add(src)
        return is_true

    def got_bytes(self, src: InstanceId) -> None:
        """The source has sent bytes: its next ones may be read again."""
        self._stale.discard(src)

    def lose(self, src: InstanceId) -> None:
        """The source's process is another one from now on, or gone."""
        self._windows.lose(src)
        self._readable.discard(src)
        self._refused.discard(src)
        self._stale.discard(src)


def _still_counts(located: Located, count_fd: int) -> bool:
    number, expected = located.count
    found = os.pread(count_fd, _COUNT_BYTES, number * _COUNT_BYTES)
    return int.from_bytes(found, "little") == expected
