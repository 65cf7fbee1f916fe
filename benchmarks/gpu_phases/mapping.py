"""P1: what mapping device memory costs: alone, with recorded graphs alive, beside kernels."""

import functools
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.arena import (
    beside_attention,
    graphs_over,
    open_memory,
    say_transitions,
    transitions,
)
from benchmarks.gpu_phases.machine import GIB, KIB, MIB, Machine, median
from benchmarks.report import Report, Setting
from kunserve.core.layout import LayerRange
from kunserve.engine.memory.arena import Arena
from kunserve.engine.memory.wrap import wrap
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.pages import DevicePages

_GRAPHS = 972
"""As many as a 14B model's process has."""
_PIECES_BYTES = 4 * GIB
"""Of all pieces together whose calls are timed."""
_EXPORTED = 200
"""At most so many granules, whose descriptors are open at once."""


def run(machine: Machine, report: Report) -> None:
    """Half of a 14B model's layers first, as drops need it: alone, with graphs alive, beside
    kernels; then calls by size.
    """
    driver = machine.driver()
    sizes = [2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB] if machine.is_real else [8 * KIB, 64 * KIB]
    granules = [sizes[2], sizes[0], sizes[1]] if machine.is_real else sizes[:1]
    free_bytes, _ = driver.memory_bytes()
    num_bytes = min(13 * GIB, free_bytes // 2) if machine.is_real else MIB
    half = partial(_half_a_model, machine, report)
    num_graphs = _GRAPHS if machine.is_real else 6

    def calls(size: int) -> None:
        _calls(driver, report, size, max(8, _PIECES_BYTES // size) if machine.is_real else 4)

    def of(granule_bytes: int) -> str:
        return f"{granule_bytes // KIB} KiB"

    machine.do(
        Part(f"half of the layers, {of(granules[0])}", partial(half, granules[0])),
        Part("half of the layers, graphs alive", partial(half, granules[0], num_graphs)),
        Part("beside attention", partial(beside_attention, machine, report, granules[0])),
        Part("beside products", partial(_beside_kernels, machine, report, granules[0])),
        Part("a second mapping", partial(_alias, machine, driver, report, sizes[0])),
        *(Part(f"a window, {of(g)}", partial(_window, driver, report, g, num_bytes))
          for g in granules),
        *(Part(f"calls, {of(size)}", partial(calls, size)) for size in (*sizes[2:], *sizes[:2])),
        *(Part(f"moved, {of(g)}", partial(_moved, driver, report, g, num_bytes)) for g in granules),
        *(Part(f"half of the layers, {of(g)}", partial(half, g)) for g in granules[1:]),
    )  # fmt: skip


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _calls(driver: Driver, report: Report, size: int, num: int) -> None:
    handles: list[int] = []
    address = driver.reserve(num * size, size & -size)
    places = [address + number * size for number in range(num)]
    try:
        creates = [_timed(lambda: handles.append(driver.create(size))) for _ in places]
        maps = [
            _timed(functools.partial(driver.map, at, size, handle))
            for at, handle in zip(places, handles, strict=True)
        ]
        each = [_timed(functools.partial(driver.allow, at, size)) for at in places]
        unmaps = [_timed(functools.partial(driver.unmap, at, size)) for at in places]
        for at, handle in zip(places, handles, strict=True):
            driver.map(at, size, handle)
        whole = _timed(lambda: driver.allow(address, num * size))
        gone = _timed(lambda: driver.unmap(address, num * size))
    finally:
        releases = [_timed(functools.partial(driver.release, handle)) for handle in handles]
        driver.unreserve(address, num * size)
    timings = {
        "create": median(creates),
        "map": median(maps),
        "set access": median(each),
        "set access, all in one call": whole / num,
        "unmap": median(unmaps),
        "unmap, all in one call": gone / num,
        "release": median(releases),
    }
    for name, seconds in timings.items():
        report.add(name, seconds * 1e6, "us", size_kib=size // KIB, pieces=num)


def _alias(machine: Machine, driver: Driver, report: Report, size: int) -> None:
    """Bytes written at one address are read at the other."""
    handle, address = driver.create(size), driver.reserve(2 * size, size)
    for at in (address, address + size):
        driver.map(at, size, handle)
    driver.allow(address, 2 * size)
    first, second = (wrap(at, size, machine.torch_device) for at in (address, address + size))
    first.fill_(7)
    machine.synchronize()
    is_seen = bool((second == 7).all())
    report.add("bytes seen through a second mapping", int(is_seen), "")
    driver.unmap(address, 2 * size)
    driver.release(handle)
    driver.unreserve(address, 2 * size)
    assert is_seen, "an alias shows other bytes"


def _moved(driver: Driver, report: Report, granule_bytes: int, num_bytes: int) -> None:
    """The same granules taken to another range by unmapping first, and by mapping twice first."""
    num = num_bytes // granule_bytes
    arena = Arena(DevicePages(driver, num * granule_bytes, granule_bytes))
    try:
        here, there = (arena.reserve(name, num * granule_bytes) for name in ("here", "there"))
        arena.map(here, 0, arena.take(num))
        timings = {"unmap, then map": _timed(lambda: arena.move(here, 0, there, 0, num))}
        timings["map a second time"] = _timed(lambda: arena.link(there, 0, here, 0, num))
        timings["change the books"] = _timed(lambda: arena.switch(there, 0, num))
        timings["unmap the old, all"] = _timed(lambda: arena.unlink_some(num))
        arena.check(ask_kernel=num <= 512)
    finally:
        arena.close()
    for name, seconds in timings.items():
        report.add(name, seconds * 1e3, "ms", granule_kib=granule_bytes // KIB, granules=num)


def _window(driver: Driver, report: Report, granule_bytes: int, num_bytes: int) -> None:
    """What it takes to give granules to another process, and to map those of another one."""
    where: dict[str, Setting] = {"granule_kib": granule_bytes // KIB}
    if not driver.can_export:
        report.add("granules cannot be exported", None, "", **where)
        return
    num = min(num_bytes // granule_bytes, _EXPORTED)
    pages = DevicePages(driver, num * granule_bytes, granule_bytes)
    window = pages.open_window(granule_bytes, num)
    fds: list[int] = []

    def give(granule: int) -> None:
        fds.append(pages.export(granule))

    try:
        exports = [_timed(functools.partial(give, granule)) for granule in range(num)]
        maps = [_timed(functools.partial(window.add, fd)) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)
        unmap_s = _timed(window.close)
        pages.close()
    timings = {"export": median(exports), "import and map": median(maps), "let go": unmap_s / num}
    for name, seconds in timings.items():
        report.add(f"{name} a granule", seconds * 1e6, "us", **where)


def _half_a_model(
    machine: Machine, report: Report, granule_bytes: int, num_graphs: int = 0
) -> None:
    """A drop of half of the layers and the restore, three times; perhaps with graphs alive."""
    memory = open_memory(machine, machine.driver(), granule_bytes)
    try:
        graphs = graphs_over(machine, memory, num_graphs)
        rounds = []
        for _ in range(3):
            rounds.append(transitions(memory))
            for graph in graphs:
                graph.replay()
            machine.synchronize()
        first, end = memory.layout.granules_of(LayerRange(0, memory.held.num_layers // 2))
        size, kib = (end - first) * granule_bytes / MIB, granule_bytes // KIB
        report.add("half of the layers", size, "MiB", granule_kib=kib)
        settings = {"kernels": False, "graphs": num_graphs > 0}
        say_transitions(report, rounds, granule_kib=kib, **settings)
        if graphs:
            report.add("graphs alive", num_graphs, "", granule_kib=kib)
    finally:
        memory.close()


def _beside_kernels(machine: Machine, report: Report, granule_bytes: int) -> None:
    """Whether a drop and a restore wait for queued kernels, and whether these wait for them."""
    width, num = (8192, 300) if machine.is_real else (32, 4)
    matrix = torch.randn(width, width, device=machine.torch_device).to(torch.bfloat16)
    out = torch.empty_like(matrix)

    def queue() -> None:
        for _ in range(num):
            torch.mm(matrix, matrix, out=out)

    alone, _ = machine.seconds(queue, 3)
    memory = open_memory(machine, machine.driver(), granule_bytes)
    try:
        machine.synchronize()
        began = time.perf_counter()
        queue()
        transitions(memory)
        changed = time.perf_counter() - began
        machine.synchronize()
        beside = time.perf_counter() - began
    finally:
        memory.close()
    report.add("queue of kernels, alone", alone * 1e3, "ms")
    report.add("queue of kernels, beside a drop and a restore", beside * 1e3, "ms")
    report.add("drop and restore done after", changed * 1e3, "ms")
    assert np.isfinite(float(out.float().sum())), "a product is lost"
