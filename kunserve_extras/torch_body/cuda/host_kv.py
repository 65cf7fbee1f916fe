"""KV that waits in pinned memory, which the device itself copies to and from beside its steps."""

import ctypes
import errno
import mmap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kunserve.core.ids import RequestId
from kunserve.engine.memory.free_memory import available_bytes
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve_extras.torch_body.cuda.driver import Driver

BehindSteps = Callable[[int], None]
"""Lets what a stream is given from now on begin behind all steps so far."""


class Copy(NamedTuple):
    """Bytes of one stretch of host memory and one of the device's."""

    host: int
    device: int
    num_bytes: int


class PinnedPool:
    """Host memory in slots of one size, taken once. It is in huge pages where there are some."""

    def __init__(self, driver: Driver, num_bytes: int, slot_bytes: int) -> None:
        """Raises OSError where there is not so much, or where it cannot be pinned."""
        available = available_bytes()
        if num_bytes > available:  # asking would wake the system's out-of-memory killer
            raise OSError(errno.ENOMEM, f"{available} bytes are left of the machine's memory")
        num_slots = num_bytes // slot_bytes
        size = -(-num_slots * slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._driver = driver
        self._slot_bytes = slot_bytes
        self._memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), mmap.MAP_PRIVATE)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        try:
            driver.pin(self._address, len(self._memory))
        except OSError:
            self._memory.close()
            raise
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take(self, num_slots: int) -> list[int]:
        """So many slots: next to each other, as long as everybody takes as many."""
        assert num_slots <= len(self._free), "more KV goes to host memory than was promised"
        taken = self._free[-num_slots:]
        del self._free[-num_slots:]
        return taken[::-1]

    def give(self, slots: Sequence[int]) -> None:
        """Have them back."""
        self._free.extend(reversed(slots))

    def copies(self, slots: Sequence[int], device: int) -> list[Copy]:
        """Between these slots and a stretch of the device's memory, as few as can be."""
        size = self._slot_bytes
        edges = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]
        return [
            Copy(self._address + slots[first] * size, device + first * size, (end - first) * size)
            for first, end in pairwise([0, *edges, len(slots)])
        ]

    def close(self) -> None:
        """Give it back. No copy may be under way."""
        self._driver.unpin(self._address)
        self._memory.close()


class HostCopies:
    """Two streams, one each way, because a link carries both at once. One batch at a time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._streams = (driver.stream(), driver.stream())
        self._ends = (driver.event(), driver.event())
        self._is_under_way = False

    def begin(
        self, out: Sequence[Copy], back: Sequence[Copy], behind: BehindSteps | None = None
    ) -> None:
        """Ask the device for them, out to the host and back."""
        assert not self._is_under_way
        driver, (leaves, comes) = self._driver, self._streams
        driver.enter()
        for stream, end, some in zip(self._streams, self._ends, (out, back), strict=True):
            if some and behind is not None:
                behind(stream)
            for host, device, num_bytes in some:
                if stream == leaves:
                    driver.copy_out(host, device, num_bytes, stream)
                else:
                    driver.copy_in(device, host, num_bytes, comes)
            driver.record(end, stream)
        self._is_under_way = True

    @property
    def is_copying(self) -> bool:
        """Whether any is not done yet. Never waits."""
        if self._is_under_way:
            self._is_under_way = not all(self._driver.is_done(end) for end in self._ends)
        return self._is_under_way

    def wait(self) -> bool:
        """Until all are done; whether any were under way."""
        was_under_way, self._is_under_way = self._is_under_way, False
        if was_under_way:
            self._driver.enter()
            for end in self._ends:
                self._driver.wait(end)
        return was_under_way

    def close(self) -> None:
        """Let them end, and give everything back."""
        self.wait()
        for stream, end in zip(self._streams, self._ends, strict=True):
            self._driver.stream_destroy(stream)
            self._driver.event_destroy(end)


class PinnedKv:
    """Implements ``HostKv`` for one device. Called from the thread of its steps."""

    def __init__(
        self, driver: Driver, memory: InstanceMemory, num_bytes: int, behind: BehindSteps
    ) -> None:
        """Raises OSError where so much cannot be pinned."""
        self._driver = driver
        self._memory = memory
        self._behind = behind
        self._pool = PinnedPool(driver, num_bytes, memory.unit_bytes)
        self._copies = HostCopies(driver)
        self._blocks: dict[RequestId, dict[int, list[int]]] = {}
        """Request -> block -> its slots, a unit each."""
        self._out: list[Copy] = []
        self._back: list[Copy] = []
        self._moving: set[RequestId] = set()
        """Whose blocks are on their way."""
        self._leaving: list[int] = []
        """Slots of what comes back, which are free once it is back."""

    def put(self, request_id: RequestId, block: int, unit: int, num_units: int) -> None:
        """See ``HostKv``."""
        blocks = self._blocks.setdefault(request_id, {})
        assert block not in blocks, f"block {block} of {request_id} is in host memory already"
        blocks[block] = self._pool.take(num_units)
        self._out += self._pool.copies(blocks[block], self._memory.units_at(unit, num_units))
        self._moving.add(request_id)

    def take(self, request_id: RequestId, block: int, unit: int, num_units: int) -> None:
        """See ``HostKv``."""
        address = self._memory.units_at(unit, num_units)
        slots = self._blocks[request_id].pop(block)
        assert len(slots) == num_units, (request_id, block, num_units)
        if not self._blocks[request_id]:
            del self._blocks[request_id]
        self._back += self._pool.copies(slots, address)
        self._moving.add(request_id)
        self._leaving += slots

    def begin(self) -> None:
        """See ``HostKv``."""
        if self._out or self._back:
            self._copies.begin(self._out, self._back, self._behind)
            self._out, self._back = [], []

    @property
    def is_copying(self) -> bool:
        """See ``HostKv``."""
        if self._moving and not (self._out or self._back or self._copies.is_copying):
            self._end()
        return bool(self._moving)

    def wait(self) -> None:
        """See ``HostKv``."""
        if self._copies.wait():
            self._end()

    def forget(self, request_id: RequestId) -> None:
        """See ``HostKv``. What moves for it gets there first: it is the next one's memory."""
        if request_id in self._moving:
            self.begin()
            self.wait()
        for slots in self._blocks.pop(request_id, {}).values():
            self._pool.give(slots)

    def close(self) -> None:
        """See ``HostKv``."""
        self._copies.close()
        self._pool.close()

    def _end(self) -> None:
        """All that was begun is done."""
        self._moving.clear()
        self._pool.give(self._leaving)
        self._leaving = []
