"""An instance's memory as bytes: what movers read and fill, wherever it lies."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Extents: TypeAlias = Sequence[tuple[int, int]]
"""(offset, bytes) of stretches of a file."""
UnitRuns: TypeAlias = Sequence[tuple[int, int]]
"""(first unit, number of units) of stretches of consecutive units."""


Spans: TypeAlias = Sequence[tuple[int, int]]
"""(address, bytes) of stretches of mapped memory."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Bytes of another process that are mapped here: they are copied from where they lie."""

    spans: Spans
    holds: Callable[[], bool]
    """Whether they were still those bytes: to be asked when they have been copied."""

    @property
    def nbytes(self) -> int:
        """Of all spans."""
        return sum(num_bytes for _, num_bytes in self.spans)


@dataclass(slots=True)
class InFile:
    """Bytes in a file of another process: they are read to the place where they belong."""

    fd: int
    extents: Extents
    still_counts: Callable[[], bool]
    """Whether they are still those bytes."""
    _is_whole: bool = True
    is_void: bool = False
    """``holds`` has been false."""

    @property
    def nbytes(self) -> int:
        """Of all extents."""
        return sum(num_bytes for _, num_bytes in self.extents)

    def fill(self, views: Sequence[Bytes]) -> None:
        """Read into these, one after the other; they have as many bytes."""
        left = [view.data for view in reversed(views)]
        for offset, num_bytes in self.extents:
            parts, missing = [], num_bytes
            while missing:
                view = left.pop()
                if view.nbytes > missing:
                    left.append(view[missing:])
                    view = view[:missing]
                parts.append(view)
                missing -= view.nbytes
            for first in range(0, len(parts), _MAX_PARTS):
                some = parts[first : first + _MAX_PARTS]
                some_bytes = sum(part.nbytes for part in some)
                if os.preadv(self.fd, some, offset) != some_bytes:
                    self._is_whole = False
                offset += some_bytes
        assert not left, (self.extents, len(left))

    def holds(self) -> bool:
        """Whether what was read are the bytes that were meant: to be asked after ``fill``."""
        self.is_void = not (self._is_whole and self.still_counts())
        return not self.is_void


_MAX_PARTS = 1024
"""Of one read, the most that the system takes."""

Content: TypeAlias = Bytes | Mapped | InFile
"""What a memory is filled with."""


class Window(Protocol):
    """Granules of another process, mapped one behind the other."""

    address: int
    num_granules: int
    """Mapped so far."""

    def add(self, fd: int) -> None:
        """Map the next one, of which this is a descriptor. Raises OSError."""
        ...

    def close(self) -> None:
        """Unmap all. No copy may be under way. Raises OSError; then it can be called again."""
        ...


class Granules(Protocol):
    """A device's memory in granules, each of which another process can map."""

    granule_bytes: int
    num_granules: int

    def export(self, granule: int) -> int:
        """A new descriptor, by which a process of this host can map it. Raises OSError."""
        ...

    def open_window(self, granule_bytes: int, num_granules: int) -> Window:
        """Room for another process's granules. Raises OSError."""
        ...


class Places(Protocol):
    """A memory that peers on this host may read where it lies."""

    @property
    def shared_fd(self) -> int | None:
        """The file in which it all lies; None if it is no file."""
        ...

    @property
    def granules(self) -> Granules | None:
        """What peers can map; None if they cannot. Nothing is located where both are None."""
        ...

    def at_once(self) -> contextlib.AbstractContextManager[None]:
        """Within, what is mapped is only noted where it is put; at the end all is copied."""
        ...

    def locate_units(self, unit_runs: UnitRuns) -> Extents:
        """Where ``UnitMemory.read_units`` would read."""
        ...

    def locate_layer(self, layer: int, offset: int, num_bytes: int) -> Extents:
        """Where ``MovableMemory.read_layer`` would read."""
        ...


WriteGate: TypeAlias = Callable[[int, Callable[[], None]], None]
"""Carries out what writes so many bytes; or raises, because they may not be written any more."""


class UnitMemory(Protocol):
    """KV units. Everything is done on return."""

    @property
    def unit_bytes(self) -> int:
        """Of one unit."""
        ...

    def read_units(self, unit_runs: UnitRuns, into: Bytes) -> None:
        """Copy the units' bytes, one run after the other, into exactly as many bytes."""
        ...

    def write_units(self, unit_runs: UnitRuns, data: Content) -> None:
        """The reverse. Only memory whose ``places`` have granules is given what is mapped."""
        ...


class MovableMemory(UnitMemory, Protocol):
    """KV units and weights. The bulk mover calls it from a thread of its own."""

    @property
    def layer_bytes(self) -> int:
        """Of one layer's packed weights; every layer has as many."""
        ...

    @property
    def places(self) -> Places | None:
        """Where its bytes lie in what peers can read; None if bytes must be sent."""
        ...

    def read_layer(self, layer: int, offset: int, into: Bytes) -> None:
        """Copy bytes of a mapped layer's weights."""
        ...

    def write_layer(self, layer: int, offset: int, data: Content) -> None:
        """The reverse."""
        ...
