"""``kunserve doctor``: what this machine can do, and what would stop a server from starting."""

import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import click
import numpy as np
import torch

import kunserve
from kunserve.core.code import code_of
from kunserve.core.config import MIB, ClusterConfig, InstanceConfig, ModelConfig, ServerConfig
from kunserve.core.errors import ConfigError
from kunserve.engine.cpu.kernels.build import find_or_build, of_level
from kunserve.engine.cpu.kernels.levels import (
    asked_level,
    fitting_levels,
    has_slow_bfloat16,
    levels_of,
    processor_features,
)
from kunserve.engine.memory.arena import Arena
from kunserve.engine.memory.free_memory import PROCESS_BYTES, available_bytes, front_bytes_left
from kunserve.engine.memory.huge_pages import HUGE_PAGE_BYTES
from kunserve.engine.memory.pages import HostPages
from kunserve.engine.nodes import numa_nodes
from kunserve.model.source import resolve_model
from kunserve_extras.torch_body.cuda.driver import LIBRARY, CudaError, Driver
from kunserve_extras.torch_body.cuda.opening import check_torch

Verdict: TypeAlias = Literal["ok", "note", "STOP"]

_FEW_FILES = 1024
_NO_OVERCOMMIT = 2
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    verdict: Verdict
    """"note": it works, but slower or with less. "STOP": a server would not start."""
    subject: str
    text: str


def _versions() -> Iterator[Finding]:
    text = f"kunserve {kunserve.__version__} (code {code_of()}), Python {platform.python_version()}"
    yield Finding("ok", "versions", f"{text}, torch {torch.__version__}, {platform.platform()}")
    if not sys.platform.startswith("linux"):
        yield Finding("STOP", "system", f"{sys.platform}: memory can be remapped on Linux only")


def _processor() -> Iterator[Finding]:
    levels = fitting_levels()
    name = levels[0].name if levels else platform.machine()
    cores = len(os.sched_getaffinity(0))
    has_bf16 = bool(levels) and "avx512_bf16" in levels[0].needs
    text = f"{cores} usable cores, {name}"
    is_slow = not has_bf16 and has_slow_bfloat16()
    if is_slow:
        text += "; kernels compute bfloat16 in float32, twice as fast as its AVX-512 BF16"
    elif not has_bf16:
        text += "; no AVX-512 BF16, so kernels compute bfloat16 in float32"
    yield Finding("ok" if has_bf16 or is_slow else "note", "processor", text)


def _nodes() -> Iterator[Finding]:
    nodes, instances = numa_nodes(), ClusterConfig().num_instances
    text = "one node of memory, so instances run wherever there is a core"
    if len(nodes) > 1:
        sizes = " and ".join(str(len(node)) for node in nodes)
        text = f"{len(nodes)} nodes of memory with {sizes} cores, for instances and ranks in turn"
    if len(nodes) <= instances:
        yield Finding("ok", "nodes", text)
        return
    text += f"; {instances} instances leave some idle: --num-instances {len(nodes)}, or more ranks"
    yield Finding("note", "nodes", text)


def _kernels() -> Iterator[Finding]:
    yield Finding("ok", "kernels", str(find_or_build()))
    for level in levels_of(platform.machine()) if asked_level() is None else ():
        if not level.has_tiles:
            continue
        lacking = ", ".join(sorted(level.needs - processor_features()))
        if lacking:
            yield Finding("ok", "AMX", f"not used: this processor has no {lacking}")
            continue
        try:
            of_level(level)
        except ConfigError as error:
            yield Finding("note", "AMX", f"not used: {error}")
        else:
            yield Finding("ok", "AMX", "used: Linux gives its tiles, and a product came out right")


def _memory() -> Iterator[Finding]:
    available, instances = available_bytes(), ClusterConfig().num_instances
    wanted = instances * (InstanceConfig().memory_bytes + PROCESS_BYTES) + front_bytes_left()
    text = f"{available / MIB:.0f} MiB left for this process and its cgroups"
    if available < wanted:
        text += (
            f"; {instances} instances want {wanted / MIB:.0f} MiB in all: lower --instance-memory"
        )
    yield Finding("ok" if available >= wanted else "STOP", "memory", text)
    overcommit = _setting("vm/overcommit_memory")
    if overcommit == _NO_OVERCOMMIT:
        text = "vm.overcommit_memory is 2, so a remap may be refused under load"
        yield Finding("note", "memory", text)


def _remap() -> Iterator[Finding]:
    size = InstanceConfig().granule_bytes
    arena = Arena(HostPages(2 * size, size))
    try:
        here, there = (arena.reserve(name, 2 * size) for name in ("here", "there"))
        arena.map(here, 0, np.arange(2, dtype=np.int32), populate=True)
        here.bytes_view()[:] = 7
        calls = arena.num_calls
        arena.move(here, 0, there, 0, 2)
        assert there.bytes_view().min() == 7, "a remap lost bytes"
        # One call to move, one to reserve the addresses left; without the first there are three.
        is_fast = arena.num_calls - calls == 2
    finally:
        arena.close()
    text = "pages move with their page tables"
    if not is_fast:
        text = "this kernel maps pages anew (Linux 5.13 moves them): drops take 50 ms more"
    yield Finding("ok" if is_fast else "note", "remap", text)


def _huge_pages() -> Iterator[Finding]:
    pages = HostPages(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    pages.map(pages.reserve(HUGE_PAGE_BYTES), np.zeros(1, dtype=np.int32), populate=True)
    huge_bytes = pages.huge_bytes
    pages.close()
    if huge_bytes:
        yield Finding("ok", "huge pages", "weights and KV can lie in pages of 2 MiB")
        return
    text = "this system gives no pages of 2 MiB, from which memory is read up to twice as fast: "
    text += (
        "Linux 6.1 gives them unless shmem_enabled is deny or memory is in fragments, older ones "
    )
    text += f"with shmem_enabled=advise ({_shmem_enabled()})"
    yield Finding("note", "huge pages", text)


def _shmem_enabled() -> str:
    """What the system says of huge pages in memory files."""
    try:
        text = _SHMEM_ENABLED.read_text(encoding="ascii")
    except OSError:
        return "no transparent huge pages here"
    return f"here it is {text.partition('[')[2].partition(']')[0]}"


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = f"{files} open files, {_setting('vm/max_map_count')} mappings"
    is_low = files != resource.RLIM_INFINITY and files < _FEW_FILES
    yield Finding("note" if is_low else "ok", "limits", text)
    host, port = ServerConfig().host, ServerConfig().port
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            text = f"{host}:{port}: {error.strerror}; choose another --port"
            yield Finding("note", "port", text)


def _model() -> Iterator[Finding]:
    name = ModelConfig().model
    yield Finding("ok", "model", f"{name}: {resolve_model(name, 'auto').path}")


def _devices(library: str) -> Iterator[Finding]:
    try:
        driver = Driver(0, library)
    except CudaError as error:
        yield Finding("note", "CUDA", f"the driver refuses: {error.strerror}")
        return
    except OSError as error:
        text = f"no driver that could be used, so --device cuda cannot be ({error})"
        yield Finding("note", "CUDA", text)
        return
    for ordinal in range(driver.num_devices):
        one = driver if ordinal == 0 else Driver(ordinal, library)
        free, total = (size / MIB for size in one.memory_bytes())
        able = one.has_virtual_memory
        text = f"{one.name}: {free:.0f} of {total:.0f} MiB free, driver for CUDA {_version(one)}"
        text += f", granules of {one.granularity_bytes() >> 10} KiB" if able else ""
        text += "" if able else "; memory cannot be mapped at chosen addresses"
        if not one.can_export:
            text += "; memory cannot be shared, so KV between instances goes through sockets"
        yield Finding("ok" if able else "note", f"device {ordinal}", text)
    try:
        check_torch(torch.version.cuda, driver.version)
    except ConfigError as error:
        yield Finding("note", "CUDA", str(error))


def _version(driver: Driver) -> str:
    return f"{driver.version // 1000}.{driver.version % 1000 // 10}"


def _setting(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", name).read_text(encoding="ascii"))
    except OSError:
        return None


def examine(library: str = LIBRARY) -> Iterator[Finding]:
    """Look at one thing after the other; ``library`` is libcuda."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("versions", _versions),
        ("processor", _processor),
        ("nodes", _nodes),
        ("kernels", _kernels),
        ("memory", _memory),
        ("remap", _remap),
        ("huge pages", _huge_pages),
        ("limits", _limits),
        ("model", _model),
        ("CUDA", lambda: _devices(library)),
    )
    for subject, check in checks:
        try:
            yield from check()
        except (ConfigError, OSError) as error:
            yield Finding("STOP", subject, str(error))


@click.command("doctor")
def doctor_command() -> None:
    """Look at this machine. The exit code is 1 if a server would not start."""
    stops = False
    for finding in examine():
        click.echo(f"{finding.verdict:5}{finding.subject:11}{finding.text}")
        stops = stops or finding.verdict == "STOP"
    sys.exit(int(stops))
