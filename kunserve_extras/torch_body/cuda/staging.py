"""Bytes between device memory and this process, through two pieces of pinned memory in turn."""

import ctypes
import threading
from collections.abc import Iterator

import numpy as np

from kunserve.engine.memory.pages import Bytes, Copies, Spans
from kunserve_extras.torch_body.cuda.driver import Driver

PIECE_BYTES = 4 << 20


class Staging:
    """A stream of copies that have ended when a call returns. Any thread may call."""

    def __init__(self, driver: Driver, piece_bytes: int = PIECE_BYTES) -> None:
        self._driver = driver
        self._piece_bytes = piece_bytes
        self.lock = threading.Lock()
        """Held while anything is copied: nothing is mapped or unmapped meanwhile."""
        self._stream = driver.stream()
        self._events = [driver.event(), driver.event()]
        self._pinned = driver.host_alloc(2 * piece_bytes)
        whole = (ctypes.c_uint8 * (2 * piece_bytes)).from_address(self._pinned)
        self._pieces = np.ctypeslib.as_array(whole).reshape(2, piece_bytes)

    def read(self, spans: Spans, into: Bytes) -> None:
        """Copy out what lies in the spans, one after the other."""
        with self.lock:
            self._driver.enter()
            position, before = 0, None
            for number, piece in enumerate(self._cut(spans)):
                size = self._start(number, piece, is_in=False)
                if before is not None:
                    position = self._take(*before, position, into)
                before = number, size
            if before is not None:
                position = self._take(*before, position, into)
            assert position == into.nbytes, (position, into.nbytes)

    def write(self, spans: Spans, data: Bytes) -> None:
        """The reverse."""
        with self.lock:
            self._driver.enter()
            position = 0
            for number, piece in enumerate(self._cut(spans)):
                if number > 1:
                    self._driver.wait(self._events[number % 2])
                size = sum(num_bytes for _, num_bytes in piece)
                self._pieces[number % 2, :size] = data[position : position + size]
                position += size
                self._start(number, piece, is_in=True)
            self._driver.synchronize(self._stream)
            assert position == data.nbytes, (position, data.nbytes)

    def copy(self, copies: Copies) -> None:
        """Copy inside device memory, in order."""
        with self.lock:
            self._driver.enter()
            for target, source, num_bytes in copies:
                self._driver.copy_inside(target, source, num_bytes, self._stream)
            self._driver.synchronize(self._stream)

    def close(self) -> None:
        """Give everything back."""
        self._driver.stream_destroy(self._stream)
        for event in self._events:
            self._driver.event_destroy(event)
        self._driver.host_free(self._pinned)

    def _start(self, number: int, piece: Spans, is_in: bool) -> int:
        """Begin to copy a piece; its bytes."""
        at = first = self._pinned + number % 2 * self._piece_bytes
        copies = []
        for address, num_bytes in piece:
            copies.append((address, at, num_bytes) if is_in else (at, address, num_bytes))
            at += num_bytes
        size = at - first
        if len(copies) == 1 or not self._driver.copy_many(copies, self._stream):
            copy = self._driver.copy_in if is_in else self._driver.copy_out
            for target, source, num_bytes in copies:
                copy(target, source, num_bytes, self._stream)
        self._driver.record(self._events[number % 2], self._stream)
        return size

    def _take(self, number: int, size: int, position: int, into: Bytes) -> int:
        """Wait for a piece that was read and pass it on; where the next one goes."""
        self._driver.wait(self._events[number % 2])
        into[position : position + size] = self._pieces[number % 2, :size]
        return position + size

    def _cut(self, spans: Spans) -> Iterator[list[tuple[int, int]]]:
        """The spans in pieces that fit into the pinned memory."""
        piece: list[tuple[int, int]] = []
        room = self._piece_bytes
        for address, num_bytes in spans:
            while num_bytes:
                size = min(room, num_bytes)
                piece.append((address, size))
                address, num_bytes, room = address + size, num_bytes - size, room - size
                if not room:
                    yield piece
                    piece, room = [], self._piece_bytes
        if piece:
            yield piece
