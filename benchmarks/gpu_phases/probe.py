"""P0: what the machine has, what is missing, and the most that it can copy and multiply."""

import importlib.metadata
import platform
import re
import sys
import tomllib
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases import host_copies
from benchmarks.gpu_phases.machine import GIB, MIB, Machine
from benchmarks.report import Report

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
        Part("host memory", partial(host_copies.run, machine, report)),
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
    try:
        from kunserve_extras.doctor import examine
    except ImportError as error:
        report.add("doctor", None, "", verdict="not run", subject="", said=str(error))
        return
    for finding in examine(machine.library):
        text = finding.text
        report.add("doctor", None, "", verdict=finding.verdict, subject=finding.subject, said=text)


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
