"""One copy of the weights for the instances of a NUMA node: a memory file that all of them map.

    | what it holds | which sections are there | nothing | at 2 MiB: the weights range |

A section is what lies outside the layers, or a layer. Whoever has its lock maps it for writing,
fills it, and notes that it is there. The kernel frees the locks of a process that dies, and the
next one fills what that left. Once all are there the file is sealed: it is written no more, nor
does its size change. It ends with the last process that has it.
"""

import fcntl
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.engine.memory import address_space
from kunserve.engine.memory.free_memory import available_bytes
from kunserve.engine.memory.huge_pages import HUGE_PAGE_BYTES, fill
from kunserve.engine.weights.layout import WeightLayout

PATIENCE_S = 600.0
"""How long nothing new may be there before an instance gives up waiting for the others."""
_LOOK_S = 0.02
_MAGIC = b"kunserve weights\n"
_NOTES_AT = mmap.PAGESIZE
"""A byte for each section: 1 once it is there."""
_LOCK = struct.Struct("hhqqi4x")
"""The kernel's ``struct flock``: type, whence, first byte, number of bytes, process."""
_HEADER_LOCK, _SECTION_LOCKS = 0, 1
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class SharedWeights(NamedTuple):
    """What a process is told of the copy that it shares."""

    fds: tuple[int, ...]
    """A file for each rank."""
    fingerprint: Mapping[str, str]
    """All that decides about the bytes, by names for people."""

    def of_rank(self, rank: int) -> "SharedWeights":
        """What one of the ranks is told."""
        name = f"{rank} of {len(self.fds)}"
        return SharedWeights((self.fds[rank],), {**self.fingerprint, "rank": name})


class WeightsFile:
    """A process's view of the file."""

    def __init__(
        self, fd: int, fingerprint: Mapping[str, str], layout: WeightLayout, *, huge: bool = True
    ) -> None:
        """The descriptor stays the caller's. Raises ConfigError where the file has other weights,
        and TooLittleMemory.
        """
        self._layout = layout
        # Of its own, because locks belong to what was opened, which whoever inherits shares.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self.window = address_space.reserve(layout.num_bytes)
        """Where the process sees what it fills, and nothing else."""
        try:
            with self._locked(_HEADER_LOCK):
                self._agree(fingerprint, huge)
        except BaseException:
            self.close()
            raise

    def _agree(self, fingerprint: Mapping[str, str], huge: bool) -> None:
        layout = self._layout
        sizes = {"granule_bytes": layout.granule_bytes, "num_bytes": layout.num_bytes}
        mine = {**fingerprint, **{name: str(size) for name, size in sizes.items()}}
        head = os.pread(self._fd, mmap.PAGESIZE, 0)
        if not head.startswith(_MAGIC):
            self._claim(layout.num_bytes, huge)
            text = json.dumps(mine).encode()
            assert len(_MAGIC) + len(text) <= mmap.PAGESIZE, len(text)
            os.pwrite(self._fd, text, len(_MAGIC))
            os.pwrite(self._fd, _MAGIC, 0)  # last: whoever dies before it has said nothing
            return
        theirs = json.loads(head[len(_MAGIC) :].rstrip(b"\0"))
        for name in mine | theirs:
            if mine.get(name) != theirs.get(name):
                raise ConfigError(
                    "--weights shared: the copy that the node's instances share has another "
                    f"{name}: {theirs.get(name)}, not {mine.get(name)}"
                )

    def _claim(self, num_bytes: int, huge: bool) -> None:
        """Take the memory now, so that a shortage shows at start."""
        available = available_bytes()
        if num_bytes > available:
            raise TooLittleMemory(
                f"the instances' one copy of the weights takes {num_bytes} bytes; the machine, or "
                f"this process's cgroup, has {available} left"
            )
        try:
            os.ftruncate(self._fd, HUGE_PAGE_BYTES + num_bytes)
            if huge:
                fill(self._fd, HUGE_PAGE_BYTES, num_bytes, first_bytes=num_bytes)
            os.posix_fallocate(self._fd, HUGE_PAGE_BYTES, num_bytes)
        except OSError as error:
            raise TooLittleMemory(
                f"the machine cannot give {num_bytes} bytes for weights: {error.strerror}"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self._layout.num_bytes

    @property
    def missing(self) -> list[int]:
        """Sections that are not there yet: 0 is what lies outside the layers, then each layer."""
        num_sections = 1 + self._layout.num_layers
        notes = os.pread(self._fd, num_sections, _NOTES_AT).ljust(num_sections, b"\0")
        return [section for section, note in enumerate(notes) if not note]

    @property
    def is_sealed(self) -> bool:
        """Whether nobody can write to it any more."""
        return bool(fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    def map_at(self, address: int) -> None:
        """Map the weights there, to be read only: no call makes them writable there."""
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            address_space.map_file(
                address, self.num_bytes, fd, HUGE_PAGE_BYTES, populate=False, writable=False
            )
        finally:
            os.close(fd)

    def show(self, address: int) -> None:
        """Everything is there: fault it in where it is mapped."""
        address_space.populate_pages(address, self.num_bytes, writable=False)

    def load(self, load: Callable[[int], None], patience_s: float = PATIENCE_S) -> None:
        """Return once everything is there. ``load`` fills a section in the window.

        Raises ConfigError when another process is not done with its part in time.
        """
        missing, deadline_s = self.missing, time.monotonic() + patience_s
        while missing:
            for section in missing:
                self._take_turn(section, load)
            before, missing = missing, self.missing
            if missing == before:
                if time.monotonic() > deadline_s:
                    raise ConfigError(
                        f"another instance of the node has not loaded its part of the weights "
                        f"within {patience_s:g} s"
                    )
                time.sleep(_LOOK_S)
            else:
                deadline_s = time.monotonic() + patience_s
        with suppress(OSError):  # another has, or cannot: all the same it is only read from now on
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)

    def _take_turn(self, section: int, load: Callable[[int], None]) -> None:
        """Fill a section, unless another process is at it, or has."""
        if not self._lock(_SECTION_LOCKS + section, fcntl.F_WRLCK):
            return
        try:
            if section in self.missing:
                with self._writable(section):
                    load(section)
                os.pwrite(self._fd, b"\1", _NOTES_AT + section)
        finally:
            self._lock(_SECTION_LOCKS + section, fcntl.F_UNLCK)

    @contextmanager
    def _writable(self, section: int) -> Iterator[None]:
        layout, page = self._layout, mmap.PAGESIZE
        first = layout.layer_offset(section - 1) if section else 0
        end = layout.layer_offset(section)
        first, size = first // page * page, -(-end // page) * page - first // page * page
        at, offset = self.window + first, HUGE_PAGE_BYTES + first
        address_space.map_file(at, size, self._fd, offset, populate=True)
        try:
            yield
        finally:
            address_space.unmap(at, size)

    @contextmanager
    def _locked(self, number: int) -> Iterator[None]:
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._lock(number, fcntl.F_WRLCK):
            if time.monotonic() > deadline_s:
                raise ConfigError("another instance holds the node's shared weights")
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            self._lock(number, fcntl.F_UNLCK)

    def _lock(self, number: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, number, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        """What is mapped to be read stays so."""
        if self._fd >= 0:
            address_space.unreserve(self.window, self.num_bytes)
            os.close(self._fd)
            self._fd = -1
