"""The calls of libcuda that the engine makes. Its library may be a stand-in.

By ctypes, because the driver's interface is stable and small, and no package has to be installed.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, TypeAlias

from kunserve.core.faults import Fault
from kunserve_extras.torch_body.cuda.prototypes import (
    CALLS,
    NEWER_CALLS,
    AccessDesc,
    AllocationProp,
    CopyAttributes,
    Location,
)

LIBRARY = "libcuda.so.1"

Handle: TypeAlias = int
"""Of a piece of physical memory."""

_DEVICE = 1
_PINNED = 1
_READ_WRITE = 3
_POSIX_FD = 1
_HAS_VIRTUAL_MEMORY = 102
_CAN_EXPORT_FD = 103
_BY_KERNELS = frozenset({700, 701, 709, 710, 714, 715, 716, 717, 718, 719, 721})
"""Errors of kernels that stay: illegal addresses and instructions, failed assertions."""
_BY_DEVICES = frozenset({214, 220, 226, 702, 810, 911, 999})
"""And of the hardware: memory, links, a kernel without end, and what nobody knows."""
_CAPABILITY = (75, 76)
_NON_BLOCKING = 1
_NO_TIMING = 2
_OUT_OF_MEMORY = 2
_NOT_READY = 600
_AT_LEAST = 0
_IN_STREAM_ORDER = 1


class CudaError(OSError):
    """The driver refused a call. ``strerror`` names the error and the call."""


class DeviceLost(RuntimeError):
    """The device does nothing more for this process, which must end.

    No OSError: those are refusals, after which one may go on.
    """

    def __init__(self, text: str, result: int) -> None:
        super().__init__(text)
        self.fault = Fault.REQUEST if result in _BY_KERNELS else Fault.MACHINE
        """A kernel did it, and so perhaps a request; or the device."""


@dataclass(frozen=True, slots=True)
class Card:
    """A device that nobody has entered yet: entering takes hundreds of MiB of it."""

    name: str
    total_bytes: int
    capability: tuple[int, int]
    """Of computing: (9, 0) is an H100."""
    has_virtual_memory: bool
    driver_version: int
    """Of CUDA that the driver knows: 13000 is 13.0."""


def bind(library: str = LIBRARY) -> ctypes.CDLL:
    """The library with the types of its functions. OSError where it is none, or too old."""
    bound = ctypes.CDLL(library)
    for name, arguments in CALLS.items():
        try:
            function = getattr(bound, name)
        except AttributeError as error:
            raise OSError(f"{library} is too old: it has no {name}") from error
        function.argtypes, function.restype = arguments, c_int
    for name, arguments in NEWER_CALLS.items():
        if function := getattr(bound, name, None):
            function.argtypes, function.restype = arguments, c_int
    bound.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))
    return bound


def read_cards(library: str = LIBRARY) -> tuple[Card, ...]:
    """All devices. OSError where there is no driver, CudaError where it refuses."""
    bound = bind(library)

    def number(name: str, *arguments: int) -> int:
        value = c_int()
        _call(bound, name, byref(value), *arguments)
        return value.value

    _call(bound, "cuInit", 0)
    version, cards = number("cuDriverGetVersion"), []
    for ordinal in range(number("cuDeviceGetCount")):
        device, total = number("cuDeviceGet", ordinal), c_size_t()
        _call(bound, "cuDeviceTotalMem_v2", byref(total), device)
        major, minor = (number("cuDeviceGetAttribute", which, device) for which in _CAPABILITY)
        is_able = bool(number("cuDeviceGetAttribute", _HAS_VIRTUAL_MEMORY, device))
        name = _name(bound, device)
        cards.append(Card(name, total.value, (major, minor), is_able, version))
    return tuple(cards)


def _name(bound: ctypes.CDLL, device: int) -> str:
    text = ctypes.create_string_buffer(256)
    _call(bound, "cuDeviceGetName", text, len(text), device)
    return text.value.decode()


def _call(bound: ctypes.CDLL, name: str, *arguments: Any) -> None:
    result = getattr(bound, name)(*arguments)
    if result:
        raise _error(bound, name, result)


def _error(bound: ctypes.CDLL, name: str, result: int) -> CudaError | DeviceLost:
    text = c_char_p()
    bound.cuGetErrorName(result, byref(text))
    what = f"{(text.value or b'an unknown error').decode()} ({result}) in {name}"
    if name != "cuInit" and result in _BY_KERNELS | _BY_DEVICES:
        return DeviceLost(f"the device is lost: {what}", result)
    return CudaError(result, what)


class Driver:
    """libcuda with one device. A thread calls ``enter`` before anything else."""

    def __init__(self, ordinal: int = 0, library: str = LIBRARY) -> None:
        """Raises OSError where there is no driver, CudaError where there is no such device."""
        self._library = bind(library)
        self._call("cuInit", 0)
        device, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(device), ordinal)
        self.device = device.value
        self._call("cuDevicePrimaryCtxRetain", byref(context), self.device)
        self._context = context
        self._prop = AllocationProp(type=_PINNED, location=Location(_DEVICE, ordinal))
        self._access = AccessDesc(Location(_DEVICE, ordinal), _READ_WRITE)
        self.enter()
        self.can_export = self._gets_exportable()
        """Whether memory can be given to other processes as a file descriptor."""

    def enter(self) -> None:
        """Let this thread use the device."""
        self._call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Leave the device. Everything made must be gone."""
        self._call("cuDevicePrimaryCtxRelease_v2", self.device)

    # The device

    @property
    def version(self) -> int:
        """Of CUDA that the driver knows: 13000 is 13.0."""
        return self._number("cuDriverGetVersion")

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return self._number("cuDeviceGetCount")

    @property
    def name(self) -> str:
        """What the device is called."""
        return _name(self._library, self.device)

    @property
    def capability(self) -> tuple[int, int]:
        """See ``Card``."""
        major, minor = (
            self._number("cuDeviceGetAttribute", which, self.device) for which in _CAPABILITY
        )
        return major, minor

    @property
    def has_virtual_memory(self) -> bool:
        """Whether memory can be mapped at chosen addresses."""
        return bool(self._number("cuDeviceGetAttribute", _HAS_VIRTUAL_MEMORY, self.device))

    def memory_bytes(self) -> tuple[int, int]:
        """Device memory: what is free now, and all of it."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def granularity_bytes(self) -> int:
        """Physical memory comes in multiples of this."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._prop), 0)
        return size.value

    # Virtual memory

    def reserve(self, num_bytes: int, alignment: int) -> int:
        """Address space without memory."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), num_bytes, alignment, 0, 0)
        return address.value

    def unreserve(self, address: int, num_bytes: int) -> None:
        """Give back all of what one ``reserve`` gave. Nothing may be mapped there."""
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> Handle:
        """Physical memory. It lives until it is neither held nor mapped."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), num_bytes, byref(self._prop), 0)
        return handle.value

    def release(self, handle: Handle) -> None:
        """Hold it no longer."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: Handle) -> None:
        """Map all of a piece; nobody can touch it yet."""
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        """Let the device read and write whole mappings."""
        self._call("cuMemSetAccess", address, num_bytes, byref(self._access), 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Empty a stretch of whole mappings."""
        self._call("cuMemUnmap", address, num_bytes)

    def handle_at(self, address: int) -> Handle | None:
        """What is mapped at an address; only to be compared."""
        handle = c_uint64()
        if self._library.cuMemRetainAllocationHandle(byref(handle), address):
            return None
        self.release(handle.value)
        return handle.value

    def export(self, handle: Handle) -> int:
        """A file descriptor by which another process can map the piece. The caller closes it."""
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, _POSIX_FD, 0)
        return fd.value

    def import_(self, fd: int) -> Handle:
        """Another process's piece. The descriptor may be closed afterwards."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _POSIX_FD)
        return handle.value

    # Copies

    def host_alloc(self, num_bytes: int) -> int:
        """Address of host memory that copies need not wait for (pinned)."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), num_bytes, 0)
        assert address.value is not None
        return address.value

    def host_free(self, address: int) -> None:
        """Give pinned memory back."""
        self._call("cuMemFreeHost", address)

    def pin(self, address: int, num_bytes: int) -> None:
        """Make whole pages of host memory pinned that are there already."""
        self._call("cuMemHostRegister_v2", address, num_bytes, 0)

    def unpin(self, address: int) -> None:
        """Let what one ``pin`` made be as it was."""
        self._call("cuMemHostUnregister", address)

    def stream(self) -> int:
        """A queue of work that waits for no other."""
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def stream_destroy(self, stream: int) -> None:
        """Let its work end, and forget it."""
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        """Wait for all its work."""
        self._call("cuStreamSynchronize", stream)

    def event(self) -> int:
        """A mark to be put into streams."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), _NO_TIMING)
        assert event.value is not None
        return event.value

    def event_destroy(self, event: int) -> None:
        """Forget it."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Mark what the stream has been given so far."""
        self._call("cuEventRecord", event, stream)

    def wait(self, event: int) -> None:
        """Wait for all work before the mark."""
        self._call("cuEventSynchronize", event)

    def is_done(self, event: int) -> bool:
        """Whether all work before the mark is done. Never waits."""
        result = self._library.cuEventQuery(event)
        if result not in (0, _NOT_READY):
            raise _error(self._library, "cuEventQuery", result)
        return bool(result == 0)

    def begin_behind(self, event: int, stream: int) -> None:
        """Let what the stream is given from now on begin behind the mark."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def copy_in(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """From host memory to the device; done when the stream says so."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, num_bytes, stream)

    def copy_out(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """From the device to host memory."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, num_bytes, stream)

    def copy_inside(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """From device memory to device memory."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)

    def copy_many(self, copies: Sequence[tuple[int, int, int]], stream: int) -> bool:
        """Targets, sources and bytes of copies by one call, in any order; False if none can.

        Of device memory and pinned memory.
        """
        if not hasattr(self._library, "cuMemcpyBatchAsync_v2"):
            return False
        count = len(copies)
        targets, sources, sizes = zip(*copies, strict=True)
        attributes = CopyAttributes(source_order=_IN_STREAM_ORDER)
        self._call(
            "cuMemcpyBatchAsync_v2",
            (c_uint64 * count)(*targets),
            (c_uint64 * count)(*sources),
            (c_size_t * count)(*sizes),
            count,
            byref(attributes),
            byref(c_size_t(0)),
            1,
            stream,
        )
        return True

    # Words that streams write and wait for

    def write_value(self, address: int, value: int, stream: int) -> None:
        """Write four bytes of device memory, behind all that the stream has written before."""
        self._call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def wait_value(self, address: int, value: int, stream: int) -> None:
        """Let the stream wait, however long, until the word there has come to ``value``."""
        self._call("cuStreamWaitValue32_v2", stream, address, value, _AT_LEAST)

    def _gets_exportable(self) -> bool:
        """Ask for such memory from now on, if there is any.

        The device's word is not enough: under some sandboxes all of it is refused.
        """
        if not self._number("cuDeviceGetAttribute", _CAN_EXPORT_FD, self.device):
            return False
        self._prop.handle_types = _POSIX_FD
        try:
            self.release(self.create(self.granularity_bytes()))
        except CudaError as error:
            if error.errno != _OUT_OF_MEMORY:  # of that, whoever needs memory will hear
                self._prop.handle_types = 0
                return False
        return True

    def _number(self, name: str, *arguments: int) -> int:
        value = c_int()
        self._call(name, byref(value), *arguments)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        _call(self._library, name, *arguments)
