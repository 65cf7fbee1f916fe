"""Where an instance calls its front. One that comes back on another host is called there."""

import logging
import os
import threading
from collections.abc import Iterable, Iterator

import msgspec

from kunserve.transport.wire.network import FrontPlace

logger = logging.getLogger(__name__)


_CHUNK_BYTES = 1 << 16


def lines_of(fd: int) -> Iterator[bytes]:
    """What comes there, line by line, until its other end is closed.

    Not by a file of Python's: a process that ends while a thread waits in one is aborted, because
    Python cannot have that file's lock any more. Whatever its exit code said is lost then.
    """
    rest = b""
    while chunk := os.read(fd, _CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


class FrontAddress:
    """The address, replaced as a whole, so that any thread may ask."""

    def __init__(self, address: str) -> None:
        self._place = FrontPlace(address)

    def __call__(self) -> FrontPlace:
        """Where the front is called now."""
        return self._place

    def follow(self, lines: Iterable[bytes]) -> None:
        """Read what the process's parent writes, ``FrontPlace`` line by line, in a thread."""
        threading.Thread(target=self._read, args=(lines,), name="front moves", daemon=True).start()

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            try:
                place = msgspec.json.decode(line, type=FrontPlace)
            except msgspec.MsgspecError as error:
                logger.error("standard input had no front's address: %s", error)
                continue
            logger.info("the front is another one address=%s", place.address)
            self._place = place
