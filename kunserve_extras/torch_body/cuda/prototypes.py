"""The types of libcuda's functions and structures; a test compares them with CUDA's header."""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any


class Location(ctypes.Structure):
    """``CUmemLocation``: a device, or the host."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProp(ctypes.Structure):
    """``CUmemAllocationProp``: which memory is wanted."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    """``CUmemAccessDesc``: who may do what with mapped memory."""

    _fields_ = (("location", Location), ("flags", c_int))


class CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``: when a batch of copies may read."""

    _fields_ = (
        ("source_order", c_int),
        ("source", Location),
        ("target", Location),
        ("flags", c_uint),
    )


_P = POINTER
CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_P(c_int),),
    "cuDeviceGetCount": (_P(c_int),),
    "cuDeviceGet": (_P(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (_P(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (_P(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (_P(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetInfo_v2": (_P(c_size_t), _P(c_size_t)),
    "cuMemGetAllocationGranularity": (_P(c_size_t), _P(AllocationProp), c_int),
    "cuMemAddressReserve": (_P(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (_P(c_uint64), c_size_t, _P(AllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemRetainAllocationHandle": (_P(c_uint64), c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, _P(AccessDesc), c_size_t),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (_P(c_uint64), c_void_p, c_int),
    "cuMemHostAlloc": (_P(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (_P(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (_P(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventQuery": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint, c_uint),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint, c_uint),
}
NEWER_CALLS: dict[str, tuple[Any, ...]] = {
    "cuMemcpyBatchAsync_v2": (
        _P(c_uint64), _P(c_uint64), _P(c_size_t), c_size_t,
        _P(CopyAttributes), _P(c_size_t), c_size_t, c_void_p,
    ),
}  # fmt: skip
"""Of CUDA 13.0; what they do can be done without them."""
