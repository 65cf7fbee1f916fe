"""Of S: hidden states into the memory of another process's stage and back, and what that takes;
and what it adds to a step that still runs when the other stage hears of its rows.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu_phases.machine import Machine
from benchmarks.report import Report
from kunserve_extras.torch_body.hops.hops import Hops

ROWS, WIDTH = 64, 5120
"""Of 14B in two bytes; on the stand-in narrower ones."""
_FAKE_WIDTH = 64
_ROUNDS = 100
_STEP_PRODUCTS, _STEP_SIZE = 8, 4096
"""Of matrices, as a step of some milliseconds."""
_FAKE_SIZE = 16
_PATIENCE_S = 20.0
_CHILD = """
import sys
import torch
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.hops.hops import Hops
library, name, here, there, slot_bytes, row_bytes = sys.argv[1:]
device = torch.device(name)
hops = Hops(Driver(device.index or 0, library), device, here, int(slot_bytes), int(row_bytes))
print("ready", flush=True)
for line in sys.stdin:
    rows = hops.take(bytes.fromhex(line)).tensor(torch.bfloat16)
    back = hops.give(rows + 1, there)
    reads = hops.reads.mark()
    rows.sum().item()
    hops.reads.ended(reads)
    print("" if back is None else bytes(back).hex(), flush=True)
hops.close()
"""
"""The next stage: adds one to what comes."""


def measure_hop(machine: Machine, report: Report) -> None:
    """There and back, behind the first rounds, in which both find each other."""
    driver, device = machine.driver(), machine.torch_device
    if not driver.can_export:
        report.add("memory cannot be exported", None, "")
        return
    width = WIDTH if machine.is_real else _FAKE_WIDTH
    sizes = 2 * ROWS * width, 2 * width
    with tempfile.TemporaryDirectory(prefix="hop") as folder:
        here, there = (f"ipc://{Path(folder) / name}" for name in ("first", "second"))
        hops = Hops(driver, device, here, *sizes)
        name = str(device if device.index is not None or not machine.is_real else "cuda:0")
        words = [machine.library, name, there, here, *map(str, sizes)]
        command, pipe = [sys.executable, "-c", _CHILD, *words], subprocess.PIPE
        with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n", "the other process has no hops"
                times_s = _times(hops, child, there, width, lambda: None, device)
                step = _step_of(device, _STEP_SIZE if machine.is_real else _FAKE_SIZE)
                behind_s = median(_times(hops, child, there, width, step, device))
                step_s = median(_alone(step, device))
            finally:
                child.kill()
                hops.close()
    sizes_of = {"rows": ROWS, "width": width}
    report.add("hop there and back", median(times_s) * 1e3, "ms", **sizes_of)
    added_s = behind_s - step_s
    report.add("added to a step", added_s * 1e3, "ms", **sizes_of, step_ms=step_s * 1e3)


def _step_of(device: torch.device, size: int) -> Callable[[], None]:
    matrix = torch.zeros(size, size, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for _ in range(_STEP_PRODUCTS):
            matrix @ matrix

    return step


def _alone(step: Callable[[], None], device: torch.device) -> list[float]:
    times_s: list[float] = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        step()
        torch.zeros(1, device=device).item()
        times_s.append(time.perf_counter() - began_s)
    return times_s


def _times(
    hops: Hops,
    child: subprocess.Popen[str],
    there: str,
    width: int,
    step: Callable[[], None],
    device: torch.device,
) -> list[float]:
    """The other stage hears of rows at once, although they come behind the step."""
    assert child.stdin is not None and child.stdout is not None
    times_s: list[float] = []
    until_s = time.monotonic() + _PATIENCE_S
    number = 0
    while len(times_s) < _ROUNDS:
        assert time.monotonic() < until_s, "the two have not found each other"
        number += 1
        sent = torch.full((ROWS, width), float(number % 7), dtype=torch.bfloat16, device=device)
        began_s = time.perf_counter()
        step()
        ticket = hops.give_ahead(sent, there)
        if ticket is None:
            time.sleep(0.01)
            continue
        child.stdin.write(bytes(ticket).hex() + "\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        landed = hops.take(bytes.fromhex(answer)) if answer else None
        if landed is None:
            continue  # its way back is not there yet
        rows = landed.tensor(torch.bfloat16)
        reads = hops.reads.mark()
        first = float(rows.min().item())
        hops.reads.ended(reads)
        times_s.append(time.perf_counter() - began_s)
        assert first == number % 7 + 1.0, (first, number)
    return times_s
