"""One way between two processes of a host: messages in shared memory, one writer and one reader.

The reader makes the memory, the writer finds it through the file system of processes. Two counts
of bytes say what is written and what is read; each of them has one owner. A message becomes
visible by the count, which is stored last, so one that is half written is never seen, whoever
dies. That rests on stores being seen in their order, which holds on x86-64 and not on all others.
"""

import fcntl
import mmap
import os
import platform
import struct
from typing import NamedTuple

RING_BYTES = 8 << 20
"""Activations of 512 tokens of a 7B model are 4 MiB. Only what has been used takes memory."""
KEPT_WARM_BYTES = 256 << 10
"""An empty ring that is so far goes back to its start: small messages use the same few pages."""

_HEAD, _TAIL, _IS_CLOSED = 0, 8, 16
"""Which 8 bytes hold the counts, and whether the reader has left: in a cache line each."""
_DATA_AT = mmap.PAGESIZE
_SIZES = struct.Struct("<II")
_NO_PAYLOAD = 0xFFFFFFFF
_SKIP = 0xFFFFFFFF
"""Instead of a message's size: nothing more until the end of the ring."""
_ALIGNMENT = 64


class Record(NamedTuple):
    """A message in the ring, until ``pop``."""

    data: memoryview
    payload: memoryview | None


class SpoiltRing(Exception):
    """The counts or sizes in the memory cannot be true."""


def keeps_order() -> bool:
    """Whether this processor lets others see stores in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64")


def room_of(num_bytes: int) -> int:
    """What a message and its payload of so many bytes take in a ring."""
    return -(-(_SIZES.size + num_bytes) // _ALIGNMENT) * _ALIGNMENT


class RingWriter:
    """The sender's end."""

    def __init__(self, fd: int, num_bytes: int = RING_BYTES) -> None:
        """``fd`` is the reader's memory, and may be closed after this. Raises OSError."""
        self._num_bytes = num_bytes
        self._memory = _map(fd, num_bytes)
        self._counts = memoryview(self._memory)[:_DATA_AT].cast("Q")
        self._data = memoryview(self._memory)[_DATA_AT:]
        self._head = self._counts[_HEAD]

    def write(self, data: bytes | bytearray, payload: memoryview | None) -> bool:
        """Append a message; False when there is no room for it now, or no reader any more."""
        if self._counts[_IS_CLOSED]:
            return False
        payload_bytes = 0 if payload is None else payload.nbytes
        needed = room_of(len(data) + payload_bytes)
        head, size = self._head, self._num_bytes
        used = head - self._counts[_TAIL]
        at = head % size
        skipped = 0
        if at + needed > size or (used == 0 and at > KEPT_WARM_BYTES):
            skipped = size - at
        if used + skipped + needed > size:
            return False
        if skipped:
            _SIZES.pack_into(self._data, at, _SKIP, 0)
            at = 0
        start = at + _SIZES.size
        end = start + len(data)
        self._data[start:end] = data
        if payload is not None:
            self._data[end : end + payload_bytes] = payload.cast("B")
        _SIZES.pack_into(
            self._data, at, len(data), _NO_PAYLOAD if payload is None else payload_bytes
        )
        self._head = head + skipped + needed
        self._counts[_HEAD] = self._head
        return True

    def close(self) -> None:
        """The link is over."""
        _unmap(self._memory, self._counts, self._data)


class RingReader:
    """The receiver's end, which owns the memory."""

    def __init__(self, num_bytes: int = RING_BYTES) -> None:
        """Raises OSError where there is no such memory."""
        assert num_bytes % _ALIGNMENT == 0, num_bytes
        self._num_bytes = num_bytes
        self.fd = os.memfd_create("kunserve-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _DATA_AT + num_bytes)
        # Whoever opens it cannot cut it: a touch behind its end would be the end of a process.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = _map(self.fd, num_bytes)
        self._counts = memoryview(self._memory)[:_DATA_AT].cast("Q")
        self._data = memoryview(self._memory)[_DATA_AT:]
        self._tail = 0
        self._end = 0

    @property
    def has_more(self) -> bool:
        """Whether ``front`` gives something."""
        return self._counts[_HEAD] != self._tail

    def front(self) -> Record | None:
        """The next message, in the ring's memory until ``pop``. Raises SpoiltRing."""
        while True:
            unread = self._counts[_HEAD] - self._tail
            if unread == 0:
                return None
            at = self._tail % self._num_bytes
            if not _ALIGNMENT <= unread <= self._num_bytes:
                raise SpoiltRing(f"{unread} bytes are said to be unread")
            data_bytes, payload_bytes = _SIZES.unpack_from(self._data, at)
            if data_bytes == _SKIP:
                self._pass(self._num_bytes - at, unread)
                continue
            has_payload = payload_bytes != _NO_PAYLOAD
            start = at + _SIZES.size
            middle = start + data_bytes
            end = middle + (payload_bytes if has_payload else 0)
            self._end = room_of(end - start)
            if self._end > unread or at + self._end > self._num_bytes:
                raise SpoiltRing(f"a message of {end - start} bytes, {unread} are unread")
            payload = self._data[middle:end] if has_payload else None
            return Record(self._data[start:middle], payload)

    def pop(self) -> None:
        """The message that ``front`` gave has been read; its memory is the writer's."""
        self._pass(self._end, self._end)

    def _pass(self, num_bytes: int, unread: int) -> None:
        if num_bytes > unread:
            raise SpoiltRing(f"{num_bytes} bytes to skip, {unread} are unread")
        self._tail += num_bytes
        self._counts[_TAIL] = self._tail

    def close(self) -> None:
        """Nobody is heard any more. What the writer says at this moment is lost."""
        self._counts[_IS_CLOSED] = 1
        _unmap(self._memory, self._counts, self._data)
        os.close(self.fd)


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    return mmap.mmap(fd, _DATA_AT + num_bytes)


def _unmap(memory: mmap.mmap, *views: memoryview) -> None:
    for view in views:
        view.release()
    try:
        memory.close()
    except BufferError:
        return  # somebody still looks at a message: unmapped with it
