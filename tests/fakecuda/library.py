"""Builds the stand-in for libcuda, and turns its knobs."""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

SOURCE = Path(__file__).parent / "fakecuda.c"
KIB = 1 << 10
MIB = 1 << 20
ILLEGAL_ADDRESS = 700
REFUSED = 2
"""The error of refused calls: out of memory."""
LEFT = ("memories", "mappings", "reservations", "pinned areas", "streams")


@functools.cache
def build() -> str:
    """Path of the compiled library; compiled again when its source has changed."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"fakecuda-{os.getuid()}-{digest}.so"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True)
        made.rename(path)
    return str(path)


class FakeCuda:
    """What a test does to the driver of this process."""

    def __init__(self, granularity_bytes: int = 4 * KIB, total_bytes: int = 64 * MIB) -> None:
        self._library = ctypes.CDLL(build())
        for name in ("fake_configure", "fake_refuse", "fake_delay", "fake_spoil"):
            getattr(self._library, name).restype = None
        self._library.fake_changes_beside_work.restype = ctypes.c_long
        self._library.fake_configure.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        self._library.fake_refuse.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_int)
        self._library.fake_answer_after.argtypes = (ctypes.c_long,)
        self._library.fake_delay.argtypes = (ctypes.c_long, ctypes.c_long)
        self._library.fake_describe.restype = None
        self._library.fake_calls.restype = ctypes.c_long
        self._library.fake_used.restype = ctypes.c_size_t
        self._library.fake_graphs.argtypes = (ctypes.c_long, ctypes.c_long)
        self._library.fake_spent_ns.restype = ctypes.c_long
        asks = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
        self._library.cuPointerGetAttribute.argtypes = asks
        self._library.fake_configure(granularity_bytes, total_bytes)

    def describe(
        self,
        *,
        version: int = 13000,
        has_virtual_memory: bool = True,
        num_devices: int = 1,
        capability: int = 90,
        can_export: bool = True,
    ) -> None:
        """Be another machine, of cards that are all alike. Only the first one can be entered."""
        self._library.fake_describe(
            version, int(has_virtual_memory), num_devices, capability, int(can_export)
        )

    @property
    def num_calls(self) -> int:
        """Of the driver, since it was configured."""
        return int(self._library.fake_calls())

    @property
    def used_bytes(self) -> int:
        """Physical memory taken."""
        return int(self._library.fake_used())

    def slow_down(self, ns_per_call: int, ns_per_gib: int, num_graphs: int, ns_each: int) -> None:
        """What mapping costs, also for each graph that is alive: ``spent_ns`` counts it."""
        self._library.fake_delay(ns_per_call, ns_per_gib)
        self._library.fake_graphs(num_graphs, ns_each)

    @property
    def spent_ns(self) -> int:
        """Of mapping and unmapping so far, by what they cost."""
        return int(self._library.fake_spent_ns())

    def is_reachable(self, address: int) -> bool:
        """Whether a kernel can be launched with this pointer, as Triton's launcher asks."""
        value = ctypes.c_uint64()
        which = 3  # the address by which the device knows it
        return not self._library.cuPointerGetAttribute(ctypes.byref(value), which, address)

    def refuse(self, after: int, count: int = 1) -> None:
        """Refuse ``count`` calls, the first of them ``after`` calls from now."""
        self._library.fake_refuse(after, count, REFUSED)

    def refuse_nothing(self) -> None:
        """Be good again."""
        self._library.fake_refuse(0, 0, REFUSED)

    def spoil(self, error: int = ILLEGAL_ADDRESS) -> None:
        """Fail every call from now on, as a device does after some errors; until configured."""
        self._library.fake_spoil(error)

    def refuse_exportable(self) -> None:
        """Give no memory that can be exported, although the device says that it has it."""
        self._library.fake_refuse_exportable()

    def refuse_pinning(self) -> None:
        """Pin no memory that others have made."""
        self._library.fake_refuse_pinning()

    def answer_after(self, num_questions: int) -> None:
        """Let work whose end is only asked for have ended at the last of so many questions."""
        self._library.fake_answer_after(num_questions)

    def refuse_values(self) -> None:
        """Have streams that neither write words nor wait for them."""
        self._library.fake_refuse_values()

    def beside_work(self, what: Literal["ignore", "stall", "fault"]) -> None:
        """What mapping and unmapping do to copies that are queued."""
        self._library.fake_beside_work(("ignore", "stall", "fault").index(what))

    @property
    def num_changes_beside_work(self) -> int:
        """Calls that mapped or unmapped while copies were queued, since it was configured."""
        return int(self._library.fake_changes_beside_work())

    def left(self) -> dict[str, int]:
        """What nobody has given back."""
        counts = (ctypes.c_long * len(LEFT))()
        self._library.fake_left(counts)
        return {name: count for name, count in zip(LEFT, counts, strict=True) if count}
