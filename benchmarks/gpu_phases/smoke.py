"""S: each mechanism once, in seconds: what would stop the day is known before anything is timed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.gpu_kit.hop import measure_hop
from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.machine import KIB, MIB, SHAPES, Machine
from benchmarks.report import Report
from kunserve.core.extras import extra_names
from kunserve.engine.memory.wrap import wrap
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.graphs import Graph, Recorder
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.ops.table import Ops
from kunserve_extras.triton_ops.recorder import TorchRecorder
from kunserve_lab.bench.environment import version

_PATIENCE_S = 40.0
_WIDTH = 256
_CHILD = """
import sys
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.staging import Staging
import numpy as np
library, fd, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
driver = Driver(0, library)
handle, address = driver.import_(fd), driver.reserve(size, size)
driver.map(address, size, handle)
driver.allow(address, size)
staging, seen = Staging(driver), np.zeros(size, dtype=np.uint8)
staging.read([(address, size)], seen)
assert (seen == 5).all(), seen[:8]
staging.write([(address, size)], np.full(size, 9, dtype=np.uint8))
print("seen")
"""
"""Of another process: reads what was written here, and writes for us to read."""


def run(machine: Machine, report: Report) -> None:
    """From torch alone to all together; each part opens what it needs."""
    machine.do(
        Part("torch", partial(_torch, machine, report)),
        Part("extras", partial(_extras, report)),
        Part("driver", partial(_driver, machine, report)),
        Part("map and wrap", partial(_map_and_wrap, machine, report)),
        Part("kernels over mapped memory", partial(_kernels, machine, report)),
        Part("record, remap, replay", partial(_remap_under_graph, machine, report)),
        Part("a descriptor to a child", partial(_descriptor, machine, report)),
        Part("a hop to another process", partial(measure_hop, machine, report)),
        Part("a world of one rank", partial(_world, machine, report)),
    )


def recorder_on(machine: Machine) -> Recorder:
    """CUDA graphs, or their stand-in."""
    if machine.is_real:
        return TorchRecorder(machine.torch_device)
    from tests.tape import TapeRecorder

    return TapeRecorder()


def _piece_bytes(machine: Machine) -> int:
    return 2 * MIB if machine.is_real else 64 * KIB


@contextmanager
def _mapped(driver: Driver, size: int, num: int) -> Iterator[tuple[int, list[int]]]:
    """An address with the first of ``num`` pieces, and all pieces; the next place is empty."""
    handles = [driver.create(size) for _ in range(num)]
    address = driver.reserve(2 * size, size)
    try:
        driver.map(address, size, handles[0])
        driver.allow(address, size)
        yield address, handles
    finally:
        driver.unmap(address, size)
        for handle in handles:
            driver.release(handle)
        driver.unreserve(address, 2 * size)


def _torch(machine: Machine, report: Report) -> None:
    one = torch.arange(_WIDTH, device=machine.torch_device, dtype=torch.float32)
    assert float((one @ one).item()) == sum(n * n for n in range(_WIDTH))
    report.add("fact", None, "", subject="torch", text=torch.__version__)


def _extras(report: Report) -> None:
    """What servers find by entry points: where the project is not installed, nothing is."""
    for group, name in (("attention", "triton"), ("ranks", "devices")):
        report.add("found", len(extra_names(group)), "", group=group)
        assert name in extra_names(group), f"no extra {name} of {group}: is the project installed?"
    report.add("fact", None, "", subject="code", text=str(version()["code"]))


def _driver(machine: Machine, report: Report) -> None:
    """The context of torch, taken by ctypes; and memory that others can have, if it is given."""
    driver, size = machine.driver(), _piece_bytes(machine)
    report.add("fact", None, "", subject="device", text=f"{driver.name}, {driver.version}")
    report.add("fact", None, "", subject="exports memory", text=str(driver.can_export))
    assert driver.has_virtual_memory, f"{driver.name} cannot map memory at chosen addresses"
    before, _ = driver.memory_bytes()
    driver.release(driver.create(size))
    report.add("free memory", before / MIB, "MiB")


def _map_and_wrap(machine: Machine, report: Report) -> None:
    driver, size = machine.driver(), _piece_bytes(machine)
    with _mapped(driver, size, 1) as (address, _):
        here = wrap(address, size, machine.torch_device)
        here.fill_(7)
        machine.synchronize()
        assert bool((here.cpu() == 7).all()), "torch does not see what it wrote"
    report.add("bytes seen", size, "bytes")


def _kernels(machine: Machine, report: Report) -> None:
    """Two of our kernels from and to mapped memory, against plain torch."""
    driver, size, spec = machine.driver(), _piece_bytes(machine), SHAPES["tiny"]
    plain, ours = ReferenceOps(spec), _ours(machine)
    with _mapped(driver, size, 1) as (address, _):
        values = wrap(address, size, machine.torch_device).view(torch.float32)
        x, out = values[: 8 * _WIDTH].view(8, _WIDTH), values[8 * _WIDTH :][: 8 * _WIDTH]
        x.copy_(torch.randn(8, _WIDTH))
        weight = torch.rand(_WIDTH, device=machine.torch_device)
        expected, got = torch.empty_like(x), out.view(8, _WIDTH)
        for ops, into in ((plain, expected), (ours, got)):
            ops.rms_norm(x, weight, 1e-6, into)
        errors = {"norm": float((got - expected).abs().max())}
        half = torch.empty(8, _WIDTH // 2, device=machine.torch_device)
        plain.gate_mul(x, half)
        gated = out[: 4 * _WIDTH].view(8, _WIDTH // 2)
        ours.gate_mul(x, gated)
        errors["activation"] = float((gated - half).abs().max())
        machine.synchronize()
    for name, error in errors.items():
        report.add(name, error, "", ops=type(ours).__name__)
    assert max(errors.values()) < 1e-4, errors


def _ours(machine: Machine) -> Ops:
    if not machine.is_real:  # Triton's interpreter has tests of its own
        return ReferenceOps(SHAPES["tiny"])
    from kunserve_extras.triton_ops.ops import TritonOps

    return TritonOps(SHAPES["tiny"])


def _remap_under_graph(machine: Machine, report: Report) -> None:
    """A graph runs over other memory at the same address, after that was unmapped."""
    driver, size = machine.driver(), _piece_bytes(machine)
    with _mapped(driver, size, 2) as (address, (_, other)):
        place = wrap(address, size, machine.torch_device)
        total = torch.zeros(1, dtype=torch.float32, device=machine.torch_device)
        graph = _recorded(recorder_on(machine), place, total)
        place.fill_(1)
        graph.replay()
        machine.synchronize()
        first = float(total.item())
        driver.unmap(address, size)
        driver.map(address, size, other)
        driver.allow(address, size)
        place.fill_(3)
        graph.replay()
        machine.synchronize()
        second = float(total.item())
    report.add("graph over remapped memory", second / first, "")
    assert (first, second) == (_WIDTH, 3 * _WIDTH), (first, second)


def _recorded(recorder: Recorder, place: torch.Tensor, total: torch.Tensor) -> Graph:
    wide = torch.zeros(_WIDTH, dtype=torch.float32, device=total.device)

    def work() -> None:
        wide.copy_(place[:_WIDTH])
        torch.sum(wide, dim=0, keepdim=True, out=total)

    recorder.warm_up(work)
    return recorder.record(work)


def _descriptor(machine: Machine, report: Report) -> None:
    """Another process maps our memory by its descriptor, reads and writes it."""
    driver, size = machine.driver(), _piece_bytes(machine)
    if not driver.can_export:
        report.add("memory cannot be exported", None, "")
        return
    with _mapped(driver, size, 1) as (address, (handle,)):
        place = wrap(address, size, machine.torch_device)
        place.fill_(5)
        machine.synchronize()
        fd = driver.export(handle)
        try:
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, machine.library, str(fd), str(size)],
                pass_fds=(fd,), capture_output=True, text=True, timeout=_PATIENCE_S,
            )  # fmt: skip
        finally:
            os.close(fd)
        assert done.returncode == 0, done.stderr[-2000:]
        machine.synchronize()
        assert bool((place.cpu() == 9).all()), "what the child wrote is not here"
    report.add("bytes through a descriptor", size, "bytes")


def _world(machine: Machine, report: Report) -> None:
    """All constructors and options of sums over ranks, with nobody to wait for."""
    from kunserve_extras.device_ranks.sums import GroupSums, SumsBy, make_store_file

    by, fd = SumsBy.NCCL if machine.is_real else SumsBy.GLOO, make_store_file()
    try:
        sums = GroupSums(by, fd, 0, 1, machine.torch_device, _PATIENCE_S)
        values = torch.full((_WIDTH,), 2.0, device=machine.torch_device)
        sums.add_up(values)
        gathered = sums.gather(values)
        machine.synchronize()
        assert gathered is not None and bool((gathered[0] == 2.0).all())
        sums.close()
    finally:
        os.close(fd)
    report.add("ranks", 1, "", by=by.value)
