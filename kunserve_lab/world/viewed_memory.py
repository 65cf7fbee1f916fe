"""Memories for movers that are this process's own arrays."""

from abc import ABC, abstractmethod

import numpy as np

from kunserve.transport.bulk.movable_memory import Bytes, Content, InFile, Mapped, Places, UnitRuns


class ViewedMemory(ABC):
    """Implements ``MovableMemory`` by views. Peers get its bytes sent."""

    places: Places | None = None
    """See ``MovableMemory``. Views of arrays are no file, and no device's."""

    @abstractmethod
    def unit_view(self, unit: int, num_units: int) -> Bytes:
        """The bytes of consecutive KV units, writable in place."""

    def layer_view(self, layer: int) -> Bytes:
        """The bytes of one mapped layer's weights, writable in place; none without weights."""
        return np.empty(0, dtype=np.uint8)

    @property
    def unit_bytes(self) -> int:
        """See ``UnitMemory``."""
        return self.unit_view(0, 1).nbytes

    @property
    def layer_bytes(self) -> int:
        """See ``MovableMemory``."""
        return self.layer_view(0).nbytes

    def read_units(self, unit_runs: UnitRuns, into: Bytes) -> None:
        """See ``UnitMemory``."""
        position = 0
        for view in [self.unit_view(*run) for run in unit_runs]:
            into[position : position + view.nbytes] = view
            position += view.nbytes
        assert position == into.nbytes, (position, into.nbytes)

    def write_units(self, unit_runs: UnitRuns, data: Content) -> None:
        """See ``UnitMemory``."""
        assert not isinstance(data, Mapped), data
        views = [self.unit_view(*run) for run in unit_runs]
        if isinstance(data, InFile):
            data.fill(views)
            return
        position = 0
        for view in views:
            view[:] = data[position : position + view.nbytes]
            position += view.nbytes
        assert position == data.nbytes, (position, data.nbytes)

    def read_layer(self, layer: int, offset: int, into: Bytes) -> None:
        """See ``MovableMemory``."""
        into[:] = self.layer_view(layer)[offset : offset + into.nbytes]

    def write_layer(self, layer: int, offset: int, data: Content) -> None:
        """See ``MovableMemory``."""
        assert not isinstance(data, Mapped), data
        view = self.layer_view(layer)[offset : offset + data.nbytes]
        if isinstance(data, InFile):
            data.fill([view])
        else:
            view[:] = data
