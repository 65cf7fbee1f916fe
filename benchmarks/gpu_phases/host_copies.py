"""Part of P0: how fast KV goes to host memory and back, alone and beside products.

By pinned memory, as swapping and parking do it, and in pieces, as where none can be pinned.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, KIB, MIB, Machine, median
from benchmarks.report import Report
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.host_kv import Copy, HostCopies, PinnedPool
from kunserve_extras.torch_body.cuda.pages import DevicePages

_UNITS = 48
"""Of a block: layers of 14B."""
_ROUNDS = 5


def run(machine: Machine, report: Report) -> None:
    """Blocks of 12 MiB, as 14B has them with 64 tokens; 64 of them, 32 each way."""
    unit_bytes, granule_bytes = 256 * KIB, 64 * MIB
    if not machine.is_real:
        unit_bytes, granule_bytes = KIB, FAKE_GRANULARITY_BYTES
    block_bytes, num_blocks = _UNITS * unit_bytes, 64
    num_bytes = num_blocks * block_bytes
    driver = machine.driver()
    with _device_memory(driver, num_bytes, granule_bytes) as (pages, address):
        pool, copies = PinnedPool(driver, num_bytes, unit_bytes), HostCopies(driver)
        blocks = [
            pool.copies(pool.take(_UNITS), address + number * block_bytes)
            for number in range(num_blocks)
        ]
        some = [copy for block in blocks for copy in block]
        half = len(some) // 2
        ways = {"out": (some, []), "back": ([], some), "both": (some[:half], some[half:])}
        for way, (out, back) in ways.items():
            seconds, _ = machine.seconds(partial(_copy, copies, out, back), _ROUNDS)
            report.add("to host memory", num_bytes / seconds / 1e9, "GB/s", way=way, by="pinned")
        _beside(machine, report, copies, some)
        copies.close()
        pool.close()
        host, spans = np.ones(num_bytes, np.uint8), [(address, num_bytes)]
        pieces: dict[str, Callable[[], None]] = {
            "out": lambda: pages.read(spans, host),
            "back": lambda: pages.write(spans, host),
        }
        for way, work in pieces.items():
            seconds, _ = machine.seconds(work, 2)
            report.add("to host memory", num_bytes / seconds / 1e9, "GB/s", way=way, by="pieces")


def _copy(copies: HostCopies, out: Sequence[Copy], back: Sequence[Copy]) -> None:
    copies.begin(out, back)
    copies.wait()


def _beside(machine: Machine, report: Report, copies: HostCopies, some: Sequence[Copy]) -> None:
    """Whether products wait for copies."""
    width, num = (8192, 20) if machine.is_real else (32, 4)
    matrix = torch.randn(width, width, device=machine.torch_device).to(torch.bfloat16)
    product = torch.empty_like(matrix)
    half = len(some) // 2

    def queue(with_copies: bool) -> float:
        began = time.perf_counter()
        if with_copies:
            copies.begin(some[:half], some[half:])
        for _ in range(num):
            torch.mm(matrix, matrix, out=product)
        if machine.is_real:
            torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - began
        copies.wait()
        return seconds

    for with_copies in (False, True):
        name = "beside copies to the host" if with_copies else "alone"
        seconds = median([queue(with_copies) for _ in range(_ROUNDS)])
        report.add(f"queue of products, {name}", seconds * 1e3, "ms")


@contextlib.contextmanager
def _device_memory(
    driver: Driver, num_bytes: int, granule_bytes: int
) -> Iterator[tuple[DevicePages, int]]:
    whole = -(-num_bytes // granule_bytes) * granule_bytes
    pages = DevicePages(driver, whole, granule_bytes)
    address = pages.reserve(whole)
    pages.map(address, np.arange(pages.num_granules, dtype=np.int32))
    try:
        yield pages, address
    finally:
        pages.close()
