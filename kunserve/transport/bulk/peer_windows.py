"""A taker's windows: granules of its sources, mapped once and read until the source is gone."""

import logging
import socket

from kunserve.core.ids import InstanceId
from kunserve.transport.bulk.granule_server import OpenWindow
from kunserve.transport.bulk.movable_memory import Extents, Granules, Spans, Window
from kunserve.transport.bulk.wire import SharedGranules

logger = logging.getLogger(__name__)


class PeerWindows:
    """Belongs to the mover's thread."""

    def __init__(self, granules: Granules | None) -> None:
        """``granules`` are the taker's own; None where it can map none of others."""
        self._own = granules
        self._windows: dict[InstanceId, tuple[SharedGranules, OpenWindow]] = {}
        self._to_close: list[Window] = []

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """Readable when ``turn`` has something to do."""
        return tuple(window.socket for _, window in self._windows.values())

    def is_opening(self, src: InstanceId) -> bool:
        """Whether granules of this source are on their way."""
        return src in self._windows and not self._windows[src][1].is_complete

    def is_open(self, src: InstanceId) -> bool:
        """Whether all of this source's granules are mapped."""
        return src in self._windows and self._windows[src][1].is_complete

    def spans(self, src: InstanceId, memory: SharedGranules, extents: Extents) -> Spans | None:
        """Where these bytes are mapped; None until all granules are, which begins with this call.

        Raises OSError where they cannot be.
        """
        total_bytes = memory.granule_bytes * memory.num_granules
        if not all(0 <= offset <= total_bytes - num_bytes for offset, num_bytes in extents):
            raise OSError(f"granules of {total_bytes} bytes have no {extents}")
        known, window = self._windows.get(src, (None, None))
        if known != memory:
            self.lose(src)
            self._open(src, memory)
        if window is None or known != memory or not window.is_complete:
            return None
        return [(window.address + offset, num_bytes) for offset, num_bytes in extents]

    def turn(self) -> list[InstanceId]:
        """Map what has come. Sources that have gone are given up, and returned."""
        opening = [src for src in self._windows if self.is_opening(src)]
        lost = [src for src, (_, window) in self._windows.items() if not window.turn()]
        self._close_all()
        for src in filter(self.is_open, opening):
            logger.info("source=%d its memory is mapped here", src)
        for src in lost:
            self.lose(src)
        return lost

    def lose(self, src: InstanceId) -> None:
        """Hold nothing of this source."""
        _, opened = self._windows.pop(src, (None, None))
        if opened is not None:
            self._to_close.append(opened.end())
            self._close_all()

    def close(self) -> None:
        """Hold nothing."""
        for src in tuple(self._windows):
            self.lose(src)

    def _open(self, src: InstanceId, memory: SharedGranules) -> None:
        if self._own is None:
            raise OSError("this instance's memory is no device's")
        window = self._own.open_window(memory.granule_bytes, memory.num_granules)
        try:
            opened = OpenWindow(memory.path, window, memory.num_granules)
        except OSError:
            self._to_close.append(window)
            raise
        self._windows[src] = memory, opened

    def _close_all(self) -> None:
        """What cannot be closed is tried again with the next turn."""
        for window in tuple(self._to_close):
            try:
                window.close()
            except OSError as error:
                logger.warning("memory of a source stays mapped for now: %s", error)
            else:
                self._to_close.remove(window)
