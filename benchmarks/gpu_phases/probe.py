"""P0: what the machine has, what is missing, and the most that it can copy and multiply."""

import contextlib
import importlib.metadata
import platform
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.machine import (
    FAKE_GRANULARITY_BYTES,
    GIB,
    KIB,
    MIB,
    Machine,
    median,
)
from benchmarks.report import Report, Setting
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.host_kv import Copy, HostCopies, PinnedPool
from kunserve_extras.torch_body.cuda.pages import DevicePages

_UNITS = 48
"""Of a block: layers of 14B."""
_ROUNDS = 5
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")


def missing() -> list[str]:
    """Requirements that are not installed here; ``bench`` too, because some phases need it."""
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
    found = []
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["bench"]):
        name = re.split(r"[<>=!~ \[]", requirement, maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(requirement)
    return found


def how_to_bring(requirements: list[str]) -> str:
    """One command where there is a network, and one here."""
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    platforms = " ".join(f"--platform {name}" for name in _PLATFORMS)
    quoted = " ".join(f"'{requirement}'" for requirement in requirements)
    return (
        f"pip download --only-binary=:all: --python-version {version} {platforms} "
        f"--dest wheels {quoted}\n"
        f"pip install --no-index --find-links wheels {quoted}"
    )


def run(machine: Machine, report: Report) -> None:
    """The ceilings first; ``doctor``, which compiles kernels for the host, last."""
    machine.do(
        Part("ceilings", partial(_ceilings, machine, report)),
        Part("host memory", partial(_host_memory, machine, report)),
        Part("facts", partial(_facts, machine, report)),
        Part("doctor", partial(_doctor, machine, report)),
    )


def _facts(machine: Machine, report: Report) -> None:
    """Facts are figures without a value."""

    def fact(subject: str, text: object) -> None:
        report.add("fact", None, "", subject=subject, text=str(text))

    fact("Python", platform.python_version())
    fact("torch", torch.__version__)
    try:
        fact("Triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        fact("Triton", "missing")
    driver = machine.driver()
    free, total = driver.memory_bytes()
    fact("device", driver.name)
    fact("driver is for CUDA", f"{driver.version // 1000}.{driver.version % 1000 // 10}")
    fact("maps memory at chosen addresses", driver.has_virtual_memory)
    fact("exports memory to other processes", driver.can_export)
    report.add("free memory", free / MIB, "MiB")
    report.add("memory", total / MIB, "MiB")
    report.add("granularity", driver.granularity_bytes() / 1024, "KiB")
    lacking = missing()
    report.add("missing packages", len(lacking), "")
    if lacking:
        fact("missing", ", ".join(lacking))
        for line in how_to_bring(lacking).splitlines():
            fact("to bring them", line)


def _doctor(machine: Machine, report: Report) -> None:
    """What it says, and in how many seconds: on a bare machine it compiles the CPU's kernels."""
    try:
        from kunserve_extras.doctor import examine
    except ImportError as error:
        report.add("doctor", None, "", verdict="not run", subject="", said=str(error))
        return
    began = time.perf_counter()
    for finding in examine(machine.library):
        seconds, began = time.perf_counter() - began, time.perf_counter()
        where: dict[str, Setting] = {"verdict": finding.verdict, "subject": finding.subject}
        report.add("doctor", seconds, "s", **where, said=finding.text)


def _ceilings(machine: Machine, report: Report) -> None:
    device = machine.torch_device
    num_bytes = 2 * GIB if machine.is_real else MIB
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds, _ = machine.seconds(lambda: target.copy_(source), 10)
    report.add("copy, read and written", 2 * num_bytes / seconds / 1e9, "GB/s")
    width = 8192 if machine.is_real else 64
    matrix = torch.randn(width, width, device=device).to(torch.bfloat16)
    seconds, _ = machine.seconds(lambda: matrix @ matrix, 10)
    report.add("bfloat16 product", 2 * width**3 / seconds / 1e12, "TFLOP/s")


def _host_memory(machine: Machine, report: Report) -> None:
    """How fast KV goes to host memory and back: blocks of 12 MiB, as 14B has them with 64 tokens.

    By pinned memory, as swapping and parking do it, alone and beside products; and in pieces, as
    where none can be pinned.
    """
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
