"""The memory of an instance whose ranks have a device each.

No rank reaches another one's memory. Each keeps the same books and changes them on the same words;
bytes pass through a file that all of them map, a window of it for each rank but the first.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np

from kunserve.control.instance.body import Remap, UnitCopy
from kunserve.core.config import MIB
from kunserve.core.layout import LayerRange
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.transport.bulk.movable_memory import Content, UnitRuns
from kunserve_extras.device_ranks.words import Check, CopyUnits, MoveLayer, MoveUnits, Prepare
from kunserve_extras.ranks.control import Drop, Held, Reclaim
from kunserve_extras.ranks.memory import Bytes, OfAllRanks, bytes_of, granules_of
from kunserve_extras.ranks.processes import Members

_WINDOW_BYTES = 4 * MIB
"""At least; of each rank but the first."""
_MOST_COPIES = 512
"""In one word."""


class Windows:
    """A memory file, cut into as many bytes for each rank but the first."""

    def __init__(self, num_ranks: int, unit_bytes: int = 0, fd: int | None = None) -> None:
        """Rank 0 makes it, for units of that size; the others open it by its descriptor."""
        num = num_ranks - 1
        if fd is None:
            fd = os.memfd_create("kunserve-windows")
            os.ftruncate(fd, num * max(_WINDOW_BYTES, unit_bytes))
        self.fd = fd
        size = os.fstat(fd).st_size
        self.num_bytes = size // num
        """Of one window."""
        self._all = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8).reshape(num, -1)

    def of(self, rank: int) -> Bytes:
        """The window of a rank other than 0."""
        window: Bytes = self._all[rank - 1]
        return window

    def close_file(self) -> None:
        """The memory goes with the last view of it."""
        os.close(self.fd)


class DeviceRanksMemory(OfAllRanks):
    """Implements ``Memory`` of all ranks, of which this process reaches its own."""

    places = None
    """Granules of devices lie in several processes, so peers get bytes sent."""

    def __init__(
        self,
        own: InstanceMemory,
        members: Members,
        windows: Windows,
        close: Callable[[], None],
    ) -> None:
        """See ``OfAllRanks``."""
        super().__init__((own,), members.meeting.num_ranks, close)
        self._members = members
        self._windows = windows
        self._lock = threading.Lock()
        """Held while the windows are in use: movers call from threads of their own."""

    # Changes

    def prepare(self, layers: LayerRange) -> str | None:
        """See ``InstanceMemory``. Nobody has prepared where one refuses."""
        refusals = [self.own.prepare(layers)]
        if refusals[0] is None:
            with self._members.telling(Prepare(layers)) as said:
                pass
            refusals += [one for one in said if isinstance(one, str)]
        refusal = next(filter(None, refusals), None)
        if refusal is not None:
            with self._members.telling(Prepare(self.own.held)):
                self.own.prepare(self.own.held)
        return refusal

    def drop(self, keep: LayerRange) -> Remap:
        """See ``InstanceMemory``."""
        with self._members.telling(Drop(keep)):
            remap = self.own.drop(keep)
        return self._joined(remap, remap.seconds)

    def reclaim(self, layers: LayerRange) -> Remap:
        """See ``InstanceMemory``."""
        with self._members.telling(Reclaim(layers)):
            remap = self.own.reclaim(layers)
        return self._joined(remap, remap.seconds)

    # Bytes

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        """See ``InstanceMemory``."""
        for first in range(0, len(copies), _MOST_COPIES):
            some = copies[first : first + _MOST_COPIES]
            with self._members.telling(CopyUnits(tuple((src, dst, num) for src, dst, num in some))):
                self.own.copy_units(some)

    def read_units(self, unit_runs: UnitRuns, into: Bytes) -> None:
        """Copy the bytes of backed units, run after run."""
        with self._lock:
            for runs, parts in self._by_window(unit_runs, into):
                with self._members.telling(MoveUnits(runs, is_in=False)):
                    own = np.empty(parts[:, 0].size, dtype=np.uint8)
                    self.own.read_units(runs, own)
                    parts[:, 0] = own.reshape(len(parts), -1)
                for rank in range(1, self.num_ranks):
                    theirs = self._windows.of(rank)[: own.nbytes]
                    parts[:, rank] = theirs.reshape(len(parts), -1)

    def write_units(self, unit_runs: UnitRuns, data: Content) -> None:
        """The reverse."""
        with self._lock:
            for runs, parts in self._by_window(unit_runs, bytes_of(data)):
                for rank in range(1, self.num_ranks):
                    window = self._windows.of(rank)[: parts[:, rank].size]
                    window.reshape(len(parts), -1)[:] = parts[:, rank]
                with self._members.telling(MoveUnits(runs, is_in=True)):
                    self.own.write_units(runs, np.ascontiguousarray(parts[:, 0]).reshape(-1))

    def _by_window(
        self, unit_runs: UnitRuns, data: Bytes
    ) -> Iterator[tuple[tuple[tuple[int, int], ...], Bytes]]:
        """Runs that fit into a window and a word, and of ``data`` their [units, ranks, bytes]."""
        units = data.reshape(-1, self.num_ranks, self.own.unit_bytes)
        most, done = self._windows.num_bytes // self.own.unit_bytes, 0
        runs: list[tuple[int, int]] = []
        num = 0
        for first, length in unit_runs:
            while length:
                taken = min(length, most - num)
                runs.append((first, taken))
                first, length, num = first + taken, length - taken, num + taken
                if num == most or len(runs) == _MOST_COPIES:
                    yield tuple(runs), units[done : done + num]
                    done, runs, num = done + num, [], 0
        if runs:
            yield tuple(runs), units[done : done + num]
            done += num
        assert done == len(units), (done, len(units))

    def read_layer(self, layer: int, offset: int, into: Bytes) -> None:
        """Copy bytes of a held layer's packed weights, those of rank 0 first."""
        self._move_layer(layer, offset, into, is_in=False)

    def write_layer(self, layer: int, offset: int, data: Content) -> None:
        """The reverse."""
        self._move_layer(layer, offset, bytes_of(data), is_in=True)

    def _move_layer(self, layer: int, offset: int, data: Bytes, *, is_in: bool) -> None:
        with self._lock:
            for at in range(0, data.nbytes, self._windows.num_bytes):
                piece = data[at : at + self._windows.num_bytes]
                self._move_piece(layer, offset + at, piece, is_in)

    def _move_piece(self, layer: int, offset: int, data: Bytes, is_in: bool) -> None:
        """What fits into a window."""
        parts = self._parts_of(offset, data.nbytes)
        theirs = [
            (self._windows.of(rank)[:num], data[at : at + num])
            for rank, (_, num, at) in enumerate(parts)
            if rank and num
        ]
        if is_in:
            for window, piece in theirs:
                window[:] = piece
        word = MoveLayer(layer, tuple((first, num) for first, num, _ in parts), is_in)
        first, num, at = parts[0]
        with self._members.telling(word) if theirs else nullcontext():
            if num and is_in:
                self.own.write_layer(layer, first, data[at : at + num])
            elif num:
                self.own.read_layer(layer, first, data[at : at + num])
        if not is_in:
            for window, piece in theirs:
                piece[:] = window

    # Proof and end

    def check(self, ask_kernel: bool = False) -> None:
        """Assert that every rank's memory is where it must be, and that all hold the same."""
        with self._members.telling(Check(ask_kernel)) as said:
            self.own.check(ask_kernel)
        assert all(state == state_of(self.own) for state in said), self.own.held

    def close(self) -> None:
        """End the other ranks, and release everything."""
        self._end_others()
        self.own.close()


def state_of(memory: InstanceMemory) -> Held:
    """What must be the same on all ranks."""
    return Held(memory.held, granules_of(memory))
