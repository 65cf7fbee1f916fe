"""An instance's memory as bytes: what movers read and fill, wherever it lies."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Extents: TypeAlias = Sequence[tuple[int, int]]
"""(offset, bytes) of stretches of a file."""
UnitRuns: TypeAlias = Sequence[tuple[int, int]]
"""(first unit, number of units) of stretches of consecutive units."""


class UnitMemory(Protocol):
    """KV units. Everything is done on return."""

    @property
    def unit_bytes(self) -> int:
        """Of one unit."""
        ...

    def read_units(self, unit_runs: UnitRuns, into: Bytes) -> None:
        """Copy the units' bytes, one run after the other, into exactly as many bytes."""
        ...

    def write_units(self, unit_runs: UnitRuns, data: Bytes) -> None:
        """The reverse."""
        ...


class MovableMemory(UnitMemory, Protocol):
    """KV units and weights. The bulk mover calls it from a thread of its own."""

    @property
    def layer_bytes(self) -> int:
        """Of one layer's packed weights; every layer has as many."""
        ...

    @property
    def shared_fd(self) -> int | None:
        """The file in which it all lies, so that peers on this host may read there; None if it
        is no file. Neither ``locate`` is called then.
        """
        ...

    def locate_units(self, unit_runs: UnitRuns) -> Extents:
        """Where ``read_units`` would read."""
        ...

    def locate_layer(self, layer: int, offset: int, num_bytes: int) -> Extents:
        """Where ``read_layer`` would read."""
        ...

    def read_layer(self, layer: int, offset: int, into: Bytes) -> None:
        """Copy bytes of a mapped layer's weights."""
        ...

    def write_layer(self, layer: int, offset: int, data: Bytes) -> None:
        """The reverse."""
        ...


class ViewedMemory:
    """Implements ``MovableMemory`` where memory is this process's own: by views of it."""

    def unit_view(self, unit: int, num_units: int) -> Bytes:
        """The bytes of consecutive KV units, writable in place."""
        raise NotImplementedError

    def layer_view(self, layer: int) -> Bytes:
        """The bytes of one mapped layer's weights, writable in place."""
        raise NotImplementedError

    @property
    def layer_bytes(self) -> int:
        """See ``MovableMemory``."""
        raise NotImplementedError

    @property
    def shared_fd(self) -> int | None:
        """Views of arrays are no file."""
        return None

    def locate_units(self, unit_runs: UnitRuns) -> Extents:
        """See ``MovableMemory``."""
        raise NotImplementedError

    def locate_layer(self, layer: int, offset: int, num_bytes: int) -> Extents:
        """See ``MovableMemory``."""
        raise NotImplementedError

    @property
    def unit_bytes(self) -> int:
        """See ``UnitMemory``."""
        return self.unit_view(0, 1).nbytes

    def read_units(self, unit_runs: UnitRuns, into: Bytes) -> None:
        """See ``UnitMemory``."""
        position = 0
        for view in [self.unit_view(*run) for run in unit_runs]:
            into[position : position + view.nbytes] = view
            position += view.nbytes
        assert position == into.nbytes, (position, into.nbytes)

    def write_units(self, unit_runs: UnitRuns, data: Bytes) -> None:
        """See ``UnitMemory``."""
        position = 0
        for view in [self.unit_view(*run) for run in unit_runs]:
            view[:] = data[position : position + view.nbytes]
            position += view.nbytes
        assert position == data.nbytes, (position, data.nbytes)

    def read_layer(self, layer: int, offset: int, into: Bytes) -> None:
        """See ``MovableMemory``."""
        into[:] = self.layer_view(layer)[offset : offset + into.nbytes]

    def write_layer(self, layer: int, offset: int, data: Bytes) -> None:
        """See ``MovableMemory``."""
        self.layer_view(layer)[offset : offset + data.nbytes] = data
