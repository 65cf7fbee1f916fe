"""What the processor and its memory give at most, measured as the kernels are: least times."""

import time
from ctypes import CDLL, c_int32, c_int64, c_void_p
from typing import Literal, NamedTuple

import torch

from kunserve.engine.memory import address_space
from kunserve.engine.memory.huge_pages import HUGE_PAGE_BYTES

DOTS = {"bfloat16": 0, "float32": 1, "int8": 2}
"""As ``kun_peak_dots`` numbers them."""
AHEAD_BYTES = (0, 2048, 4096, 8192)
"""How far before reading memory is fetched; 0: as the processor does by itself."""
READ_BYTES = 256 << 20
PIECE_BYTES = 4 << 20
"""Read by one call: a call begins slowly, and in a long one more of others' work falls."""


Lies = Literal["small pages", "huge pages", "cache"]
"""Where a call's bytes lie."""


class Limits(NamedTuple):
    """Of a number of threads."""

    bytes_per_s: float
    huge_bytes_per_s: float | None
    """The same from pages of 2 MiB; None where the kernel gives none."""
    flops: dict[str, float]
    """Per second, by type. Of int8, products that are summed in 32 bits."""

    def roof(self, dtype: str, flops: float, num_bytes: float, lies: Lies = "small pages") -> float:
        """The most FLOP/s with which so much arithmetic on so many bytes can be done."""
        if lies == "cache":
            return self.flops[dtype]
        rate = self.bytes_per_s
        if lies == "huge pages" and self.huge_bytes_per_s is not None:
            rate = self.huge_bytes_per_s
        return min(self.flops[dtype], rate * flops / num_bytes)


def measure_limits(library: CDLL, rounds: int = 12) -> Limits:
    """With as many threads as the library has."""
    library.kun_peak_dots.argtypes = (c_int32, c_int64)
    library.kun_peak_dots.restype = c_int64
    library.kun_read.argtypes = (c_void_p, c_int64, c_int64)
    library.kun_read.restype = None
    memory = torch.ones(READ_BYTES + max(AHEAD_BYTES), dtype=torch.uint8)
    small = max(_read_rate(library, memory, ahead, rounds) for ahead in AHEAD_BYTES)
    huge = None
    if put_in_huge_pages(memory):
        huge = max(_read_rate(library, memory, ahead, rounds) for ahead in AHEAD_BYTES)
    flops = {name: _dot_rate(library, kind, rounds) for name, kind in DOTS.items()}
    # bfloat16 can be multiplied as floats, which is quicker on some processors that have both.
    flops["bfloat16"] = max(flops["bfloat16"], flops["float32"])
    return Limits(bytes_per_s=small, huge_bytes_per_s=huge, flops=flops)


def put_in_huge_pages(memory: torch.Tensor) -> bool:
    """Whether all but its edges lies in pages of 2 MiB now (Linux 6.1, whatever sysfs says)."""
    first = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (memory.data_ptr() + memory.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return address_space.collapse(first, end - first) == 0


def _read_rate(library: CDLL, memory: torch.Tensor, ahead: int, rounds: int) -> float:
    starts = range(memory.data_ptr(), memory.data_ptr() + READ_BYTES, PIECE_BYTES)
    least = dict.fromkeys(starts, float("inf"))
    for _ in range(rounds):
        for start in starts:
            began_s = time.perf_counter()
            library.kun_read(start, PIECE_BYTES, ahead)
            least[start] = min(least[start], time.perf_counter() - began_s)
    return READ_BYTES / sum(least.values())


def _dot_rate(library: CDLL, kind: int, rounds: int) -> float:
    best = 0.0
    for _ in range(rounds * 5):
        began_s = time.perf_counter()
        num_products = library.kun_peak_dots(kind, 20_000)
        best = max(best, 2.0 * num_products / (time.perf_counter() - began_s))
    return best
