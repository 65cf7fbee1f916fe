"""Where an instance calls its front. One that comes back on another host is called there."""

import logging
import threading
from typing import BinaryIO

import msgspec

from kunserve.cluster.seat import FrontMoved

logger = logging.getLogger(__name__)


class FrontAddress:
    """The address, replaced as a whole, so that any thread may ask."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __call__(self) -> str:
        """Where the front is called now."""
        return self._address

    def follow(self, lines: BinaryIO) -> None:
        """Read what the process's parent writes, ``FrontMoved`` line by line, in a thread."""
        threading.Thread(target=self._read, args=(lines,), name="front moves", daemon=True).start()

    def _read(self, lines: BinaryIO) -> None:
        for line in lines:
            try:
                moved = msgspec.json.decode(line, type=FrontMoved)
            except msgspec.MsgspecError as error:
                logger.error("standard input had no front's address: %s", error)
                continue
            logger.info("the front is another one address=%s", moved.address)
            self._address = moved.address
