"""Where ranks meet: barriers and commands between processes, each wait with an end."""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import TypeAlias

from kunserve.core.faults import Fault, MachineFailed
from kunserve.engine.cpu.kernels.library import CRanks, library

PATIENCE_S = 60.0
"""How long a rank waits for another one before the instance gives up. A rank that dies is seen at
once; this is for one that stands still."""
EXIT_ANOTHER_LOST = 5
"""Of a rank that has lost another one: how that one ended tells why."""
_BYTES = mmap.PAGESIZE


Why: TypeAlias = Callable[[], Fault]
"""Whether a rank that is lost has died of what it computed: rank 0's ``Members`` know."""


class RankLost(MachineFailed):
    """A rank has died, or does not answer: nothing that is computed now can be used."""

    def __init__(self, message: str, why: Why | None = None) -> None:
        """Without ``why`` it is the machine's."""
        super().__init__(message)
        if why is not None:
            self.fault = why()


class Meeting:
    """One process's view of it. Rank 0 makes the memory file; the others open it."""

    def __init__(
        self, rank: int, num_ranks: int, fd: int | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        kernels = library()
        assert kernels.kun_ranks_meeting_bytes() <= _BYTES
        if fd is None:
            fd = os.memfd_create("kunserve-meeting")
            os.ftruncate(fd, _BYTES)
        self.fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self.as_c = CRanks(
            meeting=ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),
            patience_ns=int(patience_s * 1e9),
            rank=rank,
            size=num_ranks,
        )
        self.why: Why | None = None
        self._meet, self._tell = kernels.kun_ranks_meet, kernels.kun_ranks_tell
        self._wait, self._lose = kernels.kun_ranks_wait, kernels.kun_ranks_lose

    @property
    def rank(self) -> int:
        """Of this process."""
        return int(self.as_c.rank)

    @property
    def num_ranks(self) -> int:
        """Processes that meet."""
        return int(self.as_c.size)

    def meet(self) -> None:
        """Return once all ranks are here. Raises RankLost."""
        self._meet(self.as_c)
        self.check()

    def check(self) -> None:
        """Raise RankLost if a rank was lost in a meeting since."""
        if self.as_c.lost:
            raise RankLost(
                "a rank of this instance has died, or stood still for too long", self.why
            )

    def tell(self) -> None:
        """A command is written: the other ranks are to carry it out."""
        self._tell(self.as_c)

    def wait(self, seen: int, seconds: float) -> int:
        """The number of the last command, when it is another than ``seen``, or after so long.

        Raises RankLost.
        """
        number = int(self._wait(self.as_c, seen, int(seconds * 1000)))
        self.check()
        return number

    def lose(self) -> None:
        """Have nobody wait any more."""
        self._lose(self.as_c)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)
