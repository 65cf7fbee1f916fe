"""Device memory in granules: one granule is one piece of the driver, because none can be cut."""

import contextlib

import numpy as np

from kunserve.core.config import MIB
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.engine.memory.pages import NOTHING, Bytes, Copies, Granules, Spans
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.staging import Staging


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


class DevicePages:
    """Implements ``Pages`` over one device. Nothing moves: granules are mapped a second time."""

    is_host = False
    moves = False
    file_offset = 0
    granules_per_page = 1

    def __init__(
        self, driver: Driver, num_bytes: int, granule_bytes: int, beside_bytes: int = 0
    ) -> None:
        """``beside_bytes`` is what the process will take of the device beside these pages."""
        step = driver.granularity_bytes()
        if granule_bytes <= 0 or granule_bytes % step:
            raise ConfigError(
                f"granule_bytes must be a multiple of {step} on {driver.name}, not {granule_bytes}"
            )
        self.granule_bytes = granule_bytes
        free_bytes, total_bytes = driver.memory_bytes()
        has = f"{driver.name} has {_mib(free_bytes)} of {_mib(total_bytes)} left"
        if num_bytes + beside_bytes > free_bytes:
            raise TooLittleMemory(
                f"an instance asks for {_mib(num_bytes)} of memory and {_mib(beside_bytes)} for "
                f"its steps; {has}. Give it less, or end what else uses it (see `nvidia-smi`)"
            )
        self.num_granules = num_bytes // granule_bytes
        self.num_calls = 0
        self._driver = driver
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        """Granule at each mapped address."""
        self._left_over: set[int] = set()
        """Mapped addresses of which the arena does not know: taking them back failed, too."""
        self._handles: list[int] = []
        self._staging = Staging(driver)
        self._is_closed = False
        try:
            for _ in range(self.num_granules):
                self._handles.append(driver.create(granule_bytes))
        except OSError as error:
            self.close()
            raise TooLittleMemory(
                f"cannot give {_mib(num_bytes)} to an instance: {error.strerror}; {has}"
            ) from error

    @property
    def huge_bytes(self) -> int:
        """None of the host."""
        return 0

    def reserve(self, num_bytes: int) -> int:
        """See ``Pages``."""
        address = self._driver.reserve(num_bytes, self.granule_bytes & -self.granule_bytes)
        self._reserved[address] = num_bytes
        return address

    def unreserve(self, address: int) -> None:
        """See ``Pages``."""
        num_bytes = self._reserved[address]
        for at in [at for at in self._mapped if address <= at < address + num_bytes]:
            self._driver.unmap(at, self.granule_bytes)
            del self._mapped[at]
        self._driver.unreserve(address, num_bytes)
        del self._reserved[address]

    def map(self, address: int, granules: Granules, populate: bool = False) -> None:
        """See ``Pages``. Device memory is there at once, so ``populate`` changes nothing."""
        with self._staging.lock:
            self._map(address, granules)

    def _map(self, address: int, granules: Granules) -> None:
        size = self.granule_bytes
        self._remove_left_overs(address, len(granules))
        slots = range(address, address + len(granules) * size, size)
        try:
            for at, granule in zip(slots, granules.tolist(), strict=True):
                self._driver.map(at, size, self._handles[granule])
                self._mapped[at] = granule
                self.num_calls += 1
            self._driver.allow(address, len(granules) * size)
            self.num_calls += 1
        except OSError:
            self._left_over.update(at for at in slots if at in self._mapped)
            # What cannot be removed now is in nobody's way before these slots are mapped again.
            with contextlib.suppress(OSError):
                self._remove_left_overs(address, len(granules))
            raise

    def unmap(self, address: int, num: int, *, is_moved: bool = False) -> None:
        """See ``Pages``. One call for all."""
        with self._staging.lock:
            self._driver.unmap(address, num * self.granule_bytes)
        self.num_calls += 1
        for number in range(num):
            del self._mapped[address + number * self.granule_bytes]

    def move(self, source: int, target: int, num: int) -> bool:
        """The driver cannot."""
        return False

    def granules_at(self, address: int, num: int) -> Granules:
        """See ``Pages``."""
        known = {handle: granule for granule, handle in enumerate(self._handles)}
        found = np.full(num, NOTHING, dtype=np.int32)
        for slot in range(num):
            at = address + slot * self.granule_bytes
            handle = self._driver.handle_at(at)
            if handle is not None and at not in self._left_over:
                found[slot] = known[handle]
        return found

    def prefault(self, address: int, num_bytes: int) -> None:
        """Nothing is touched late here."""

    def read(self, spans: Spans, into: Bytes) -> None:
        """See ``Pages``."""
        self._staging.read(spans, into)

    def write(self, spans: Spans, data: Bytes) -> None:
        """See ``Pages``."""
        self._staging.write(spans, data)

    def copy(self, copies: Copies) -> None:
        """See ``Pages``."""
        self._staging.copy(copies)

    def check(self) -> None:
        """See ``Pages``."""
        assert len(self._handles) == self.num_granules, len(self._handles)
        for address, granule in self._mapped.items():
            found = self._driver.handle_at(address)
            assert found == self._handles[granule], (address, granule)

    @property
    def shared(self) -> "DevicePages | None":
        """See ``Pages``: these, if the device can give memory to other processes."""
        return self if self._driver.can_export else None

    def export(self, granule: int) -> int:
        """See ``Granules``. Any thread may call."""
        self._driver.enter()
        return self._driver.export(self._handles[granule])

    def open_window(self, granule_bytes: int, num_granules: int) -> "DeviceWindow":
        """See ``Granules``. The window belongs to the thread that calls."""
        return DeviceWindow(self._driver, granule_bytes, num_granules)

    def close(self) -> None:
        """See ``Pages``."""
        for address in list(self._reserved):
            self.unreserve(address)
        for handle in self._handles:
            self._driver.release(handle)
        self._handles.clear()
        if not self._is_closed:
            self._staging.close()
            self._is_closed = True

    def _remove_left_overs(self, address: int, num: int) -> None:
        """Unmap what a failed ``map`` has left in these slots."""
        size = self.granule_bytes
        for at in range(address, address + num * size, size):
            if at in self._left_over:
                self._driver.unmap(at, size)
                self.num_calls += 1
                self._left_over.discard(at)
                del self._mapped[at]


class DeviceWindow:
    """Implements ``Window``. Its granules are another process's memory, and not charged here."""

    def __init__(self, driver: Driver, granule_bytes: int, num_granules: int) -> None:
        self._driver = driver
        self._granule_bytes = granule_bytes
        self._num_bytes = granule_bytes * num_granules
        self._handles: list[int] = []
        self.num_granules = 0
        driver.enter()
        self.address = driver.reserve(self._num_bytes, granule_bytes & -granule_bytes)

    def add(self, fd: int) -> None:
        """See ``Window``."""
        at = self.address + self.num_granules * self._granule_bytes
        self._handles.append(self._driver.import_(fd))
        self._driver.map(at, self._granule_bytes, self._handles[-1])
        self.num_granules += 1
        self._driver.allow(at, self._granule_bytes)
        self._release()  # what is mapped lives on without it

    def close(self) -> None:
        """See ``Window``."""
        self._release()
        if self.num_granules:
            self._driver.unmap(self.address, self.num_granules * self._granule_bytes)
            self.num_granules = 0
        self._driver.unreserve(self.address, self._num_bytes)

    def _release(self) -> None:
        while self._handles:
            self._driver.release(self._handles[-1])
            self._handles.pop()
