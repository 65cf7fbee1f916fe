"""Physical memory in granules, and address space to map them into.

``Arena`` alone knows which granule belongs where. What is here carries its orders out, and may
refuse them with an OSError.
"""

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kunserve.core.config import MIB
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.engine.memory import address_space
from kunserve.engine.memory.free_memory import available_bytes
from kunserve.engine.memory.huge_pages import HUGE_PAGE_BYTES, collapse, fill
from kunserve.transport.bulk import movable_memory

logger = logging.getLogger(__name__)

Granules: TypeAlias = npt.NDArray[np.int32]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Spans: TypeAlias = Sequence[tuple[int, int]]
"""(address, number of bytes) of stretches of mapped memory."""
Copies: TypeAlias = Sequence[tuple[int, int, int]]
"""(target, source, number of bytes) between stretches that do not overlap."""

NOTHING = -1
ARENA_FILE = "kunserve-arena"
"""What the kernel calls memory files of arenas."""


class Pages(Protocol):
    """One budget of physical memory. An OSError of ``map`` or ``unmap`` leaves things as before."""

    granule_bytes: int
    num_granules: int
    num_calls: int
    """Calls of the system made to map, move and unmap."""
    is_host: bool
    """Whether this process may read and write what is mapped."""
    file_offset: int
    """Where the first granule lies, in a file of which others may be told."""
    moves: bool
    """Whether ``move`` is the cheapest remap. Otherwise granules are mapped a second time."""
    granules_per_page: int
    """Granules in a huge page, which is mapped whole only where the first one's slot is a multiple
    of this, too. 1 where that does not matter."""

    def reserve(self, num_bytes: int) -> int:
        """Address space without memory, at an address that suits the granules."""
        ...

    def unreserve(self, address: int) -> None:
        """Give address space back, whatever is mapped there."""
        ...

    def map(self, address: int, granules: Granules, populate: bool = False) -> None:
        """Map granules one after the other, also those that are mapped elsewhere.

        With ``populate`` no later touch has to wait for a page.
        """
        ...

    def unmap(self, address: int, num: int, *, is_moved: bool = False) -> None:
        """Empty ``num`` consecutive full slots, which stay reserved.

        ``is_moved``: by ``move``, so that there is nothing left to take apart.
        """
        ...

    def move(self, source: int, target: int, num: int) -> bool:
        """Move consecutive granules with their page tables; False if that cannot be done.

        The source may still show them: ``unmap`` it afterwards, as what ``is_moved``.
        """
        ...

    def granules_at(self, address: int, num: int) -> Granules:
        """[num] what the system says lies at consecutive slots, -1 for nothing. Slow."""
        ...

    def prefault(self, address: int, num_bytes: int) -> None:
        """Get pages ready in the background, where a first touch is slow."""
        ...

    def read(self, spans: Spans, into: Bytes) -> None:
        """Copy what lies there, one span after the other; done on return."""
        ...

    def write(self, spans: Spans, data: Bytes) -> None:
        """The reverse."""
        ...

    def copy(self, copies: Copies) -> None:
        """Copy in order; a later copy may read what an earlier one wrote. Done on return."""
        ...

    @property
    def shared(self) -> movable_memory.Granules | None:
        """What other processes can map; None where they cannot, or can read a file instead."""
        ...

    @property
    def huge_bytes(self) -> int:
        """How much of what is mapped lies in huge pages of the host, as the system says. Slow."""
        ...

    def check(self) -> None:
        """Assert that no more memory is taken than the budget."""
        ...

    def close(self) -> None:
        """Release all memory and address space."""
        ...


OpenPages: TypeAlias = Callable[[int, int, int], Pages]
"""(bytes, granule bytes, bytes that the process needs beside them) to pages."""


class HostPages:
    """A memory file, mapped piece by piece."""

    is_host = True
    moves = True
    shared = None
    file_offset = 0

    @property
    def fd(self) -> int:
        """The file: granule after granule."""
        return self._fd

    def __init__(
        self,
        num_bytes: int,
        granule_bytes: int,
        beside_bytes: int = 0,
        *,
        huge: bool = True,
        first_bytes: int | None = None,
    ) -> None:
        """``beside_bytes`` is what the process will need beside these pages.

        They lie in huge pages where the system gives some, unless that is not wanted: the first
        ones (all where None) at once, others too if that is quick, else when they are prefaulted.
        """
        if granule_bytes <= 0 or granule_bytes % mmap.PAGESIZE:
            raise ConfigError(
                f"granule_bytes must be a multiple of {mmap.PAGESIZE}, not {granule_bytes}"
            )
        self.granule_bytes = granule_bytes
        self.num_granules = num_bytes // granule_bytes
        self.num_calls = 0
        divides = HUGE_PAGE_BYTES % granule_bytes == 0
        self.granules_per_page = HUGE_PAGE_BYTES // granule_bytes if divides else 1
        self._huge = huge
        self._is_filled = False
        self._first_bytes = first_bytes
        self._reserved: dict[int, tuple[int, int]] = {}
        self._prefault: _Prefault | None = None
        self._fd = self._take(self.num_granules * granule_bytes, beside_bytes)

    def _take(self, num_bytes: int, beside_bytes: int) -> int:
        """The file, with all its memory. Raises TooLittleMemory."""
        fd = os.memfd_create(ARENA_FILE)
        try:
            self._claim(fd, num_bytes, beside_bytes)
        except TooLittleMemory:
            os.close(fd)
            raise
        return fd

    def _claim(self, fd: int, num_bytes: int, beside_bytes: int) -> None:
        """Take memory for the last bytes of a file.

        TooLittleMemory where the machine has not so much.
        """
        available = available_bytes()
        if num_bytes + beside_bytes > available:
            # Asking the kernel would wake its out-of-memory killer before it refuses.
            raise TooLittleMemory(
                f"an instance asks for {num_bytes} bytes of memory and {beside_bytes} for its "
                f"steps, the machine, or this process's cgroup, has {available} left"
            )
        try:
            os.ftruncate(fd, self.file_offset + num_bytes)
            if self._huge:
                first_bytes = num_bytes if self._first_bytes is None else self._first_bytes
                self._is_filled = fill(fd, self.file_offset, num_bytes, first_bytes)
            if num_bytes:
                # Now, so that a shortage shows at start and not as a crash under load.
                os.posix_fallocate(fd, self.file_offset, num_bytes)
        except OSError as error:
            raise TooLittleMemory(
                f"the machine cannot give {num_bytes} bytes to an instance: {error.strerror}"
            ) from error

    def reserve(self, num_bytes: int) -> int:
        """See ``Pages``."""
        # A huge page is mapped whole only where its address has the alignment of its file offset.
        reserved_bytes = num_bytes + HUGE_PAGE_BYTES
        reserved_at = address_space.reserve(reserved_bytes)
        address = -(-reserved_at // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._reserved[address] = (reserved_at, reserved_bytes)
        return address

    def unreserve(self, address: int) -> None:
        """See ``Pages``."""
        address_space.unreserve(*self._reserved.pop(address))

    def map(self, address: int, granules: Granules, populate: bool = False) -> None:
        """See ``Pages``. One call for each stretch of consecutive granules."""
        size, first = self.granule_bytes, 0
        try:
            for first, last in runs(granules):
                num_bytes = (last - first) * size
                offset = self.file_offset + int(granules[first]) * size
                at = address + first * size
                address_space.map_file(at, num_bytes, self._fd, offset, populate)
                self.num_calls += 1
        except OSError:
            if first:
                address_space.unmap(address, first * size)
            raise

    def unmap(self, address: int, num: int, *, is_moved: bool = False) -> None:
        """See ``Pages``."""
        address_space.unmap(address, num * self.granule_bytes, is_moved=is_moved)
        self.num_calls += 1

    def move(self, source: int, target: int, num: int) -> bool:
        """See ``Pages``. The granules must be consecutive ones of the file."""
        self.num_calls += 1
        return address_space.move(source, target, num * self.granule_bytes)

    def granules_at(self, address: int, num: int) -> Granules:
        """See ``Pages``."""
        size = self.granule_bytes
        found = np.full(num, NOTHING, dtype=np.int32)
        for mapping in address_space.mappings_of(self._fd):
            for shift in range(0, mapping.num_bytes, size):
                slot = (mapping.address + shift - address) // size
                if 0 <= slot < num:
                    found[slot] = (mapping.offset - self.file_offset + shift) // size
        return found

    def prefault(self, address: int, num_bytes: int) -> None:
        """See ``Pages``."""
        self._prefault = _Prefault(
            address, num_bytes, self._huge and not self._is_filled, self._tell_huge
        )

    @property
    def huge_bytes(self) -> int:
        """See ``Pages``."""
        ends = [end for at, size in self._reserved.values() for end in (at, at + size)]
        first, last = min(ends, default=0), max(ends, default=0)
        return address_space.huge_bytes_at(first, last - first, self._fd)

    def _tell_huge(self) -> None:
        if not self._huge or not logger.isEnabledFor(logging.INFO):
            return
        size = self.num_granules * self.granule_bytes
        logger.info("memory in pages of 2 MiB: %d of %d MiB", self.huge_bytes / MIB, size / MIB)

    def read(self, spans: Spans, into: Bytes) -> None:
        """See ``Pages``."""
        position = 0
        for address, num_bytes in spans:
            into[position : position + num_bytes] = _view(address, num_bytes)
            position += num_bytes
        assert position == into.nbytes, (position, into.nbytes)

    def write(self, spans: Spans, data: Bytes) -> None:
        """See ``Pages``."""
        position = 0
        for address, num_bytes in spans:
            _view(address, num_bytes)[:] = data[position : position + num_bytes]
            position += num_bytes
        assert position == data.nbytes, (position, data.nbytes)

    def fill(self, spans: Spans, data: movable_memory.InFile) -> None:
        """Read what lies in another process's file, into one span after the other."""
        data.fill([_view(*span) for span in spans])

    def copy(self, copies: Copies) -> None:
        """See ``Pages``."""
        for target, source, num_bytes in copies:
            _view(target, num_bytes)[:] = _view(source, num_bytes)

    def check(self) -> None:
        """See ``Pages``."""
        status = os.fstat(self._fd)
        size, held = status.st_size - self.file_offset, status.st_blocks * 512
        assert held <= status.st_size, (held, status.st_size)
        assert size >= self.num_granules * self.granule_bytes, size

    def close(self) -> None:
        """See ``Pages``."""
        if self._prefault is not None:
            self._prefault.stop()
            self._prefault = None
        for address in list(self._reserved):
            self.unreserve(address)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _view(address: int, num_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def runs(granules: Granules) -> list[tuple[int, int]]:
    """[first, last) index pairs of the stretches of consecutive ids."""
    if not len(granules):
        return []
    cuts = np.flatnonzero(np.diff(granules) != 1) + 1
    edges = [0, *cuts.tolist(), len(granules)]
    return list(itertools.pairwise(edges))


def pair_up(targets: Spans, sources: Spans) -> Copies:
    """The copies that fill targets with what lies in sources; both have as many bytes."""
    copies: list[tuple[int, int, int]] = []
    left = [*reversed(sources)]
    for target, num_bytes in targets:
        while num_bytes:
            source, at_source = left.pop()
            size = min(num_bytes, at_source)
            copies.append((target, source, size))
            if at_source > size:
                left.append((source + size, at_source - size))
            target, num_bytes = target + size, num_bytes - size
    assert not left, (targets, sources)
    return copies


class _Prefault:
    """Touches memory in the background, and puts it into huge pages first where that is wanted.

    The first touch of a page costs several microseconds, which steps would pay otherwise. Pieces
    are small, since a remap waits for the one in progress, or for it to be collapsed. It is done
    while nothing else wants the core: with the priority of steps it would take whole slices.
    """

    _PIECE_BYTES = 128 * 1024

    def __init__(
        self, address: int, num_bytes: int, collapses: bool, when_done: Callable[[], None]
    ) -> None:
        self._address = address
        self._num_bytes = num_bytes
        self._collapses = collapses
        self._when_done = when_done
        self._stopping, self._is_over = threading.Event(), threading.Event()
        self._is_whole = False
        # Two, because a thread that may be idle only stays so, and what tells has a remap wait.
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run, "kv-prefault"), (self._tell, "kv-told"))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return once no page is touched any more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            self._is_whole = self._touch()
        finally:
            self._is_over.set()

    def _tell(self) -> None:
        self._is_over.wait()
        if self._is_whole:
            self._when_done()

    def _touch(self) -> bool:
        """Whether all was touched, and is counted soon: to count small pages takes long."""
        collapses = self._collapses
        with contextlib.suppress(OSError):  # a sandbox may refuse it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        address, end = self._address, self._address + self._num_bytes
        while address < end:
            is_page = address % HUGE_PAGE_BYTES == 0 and end - address >= HUGE_PAGE_BYTES
            if is_page and self._collapses:
                # Before it is touched, because what is mapped would have to be unmapped first.
                self._collapses = collapse(address, HUGE_PAGE_BYTES)
            size = min(self._PIECE_BYTES - address % self._PIECE_BYTES, end - address)
            # It does not move meanwhile: drops and restores move what lies behind it.
            if self._stopping.is_set() or not address_space.populate_pages(address, size):
                return False
            address += size
        return self._collapses == collapses
