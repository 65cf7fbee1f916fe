"""P1: attention over an instance's arena while layers beside it are mapped, unmapped and written.

The driver may stall kernels while it maps, or make one that runs fault: only kernels over the same
address range can show it.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_phases.kernels import operations
from benchmarks.gpu_phases.machine import GIB, MIB, SHAPES, Machine, median
from benchmarks.gpu_phases.smoke import recorder_on
from benchmarks.gpu_phases.speed import single_tokens
from benchmarks.report import Report
from kunserve.core.config import InstanceConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.attention import TORCH_DTYPES
from kunserve.engine.backend import kv_in
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.wrap import wrap
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.pages import DevicePages
from kunserve_extras.torch_body.graphs import Graph
from kunserve_extras.torch_body.ops.table import DeviceBatch

_ROUNDS = 3
_KERNELS_A_GRAPH = 11
"""As many as a layer has."""
_POISON = 0x7F
"""Bytes of it are a bfloat16 and a float32 that no sum survives unnoticed."""


def spec_of(machine: Machine) -> ModelSpec:
    """A 14B model, or a smaller one where that does not fit."""
    if not machine.is_real:
        return SHAPES["tiny"]
    free_bytes, _ = machine.driver().memory_bytes()
    return SHAPES["14b" if free_bytes > 40 * GIB else "1.5b"]


def open_memory(machine: Machine, driver: Driver, granule_bytes: int) -> InstanceMemory:
    """An instance's memory without a model in it, backed below unit 0 as the engine's is."""
    spec = spec_of(machine)
    memory_bytes = 2 * MIB
    if machine.is_real:
        memory_bytes = spec.weights_bytes + spec.weights_bytes // 4
    config = InstanceConfig(
        memory_bytes=memory_bytes,
        block_size=64 if machine.is_real else 8,
        granule_bytes=granule_bytes,
    )
    return InstanceMemory(
        InstanceId(0),
        spec,
        config,
        0,
        lambda size, granule, beside: DevicePages(driver, size, granule, beside),
        backs_guard=True,
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def transitions(
    memory: InstanceMemory, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Seconds of each part of a drop of half of the layers, and of the restore.

    ``between`` is called after each commit, while the old addresses are still mapped.
    """
    whole, half = memory.held, LayerRange(0, memory.held.num_layers // 2)
    seconds: dict[str, float] = {}
    for name, layers in (("drop", half), ("restore", whole)):
        pieces = [timed(partial(memory.prepare, layers))]
        while memory.is_preparing:
            pieces.append(timed(partial(memory.prepare, layers)))
        seconds[f"prepare a {name}"] = sum(pieces)
        seconds[f"prepare a {name}, longest"] = max(pieces)
        change = memory.drop if name == "drop" else memory.reclaim
        seconds[f"commit a {name}"] = timed(partial(change, layers))
        between()
        tidies = []
        while memory.arena.num_aliases:
            tidies.append(timed(memory.tidy))
        seconds[f"unmap after a {name}, all"] = sum(tidies)
        seconds[f"unmap after a {name}, longest"] = max(tidies, default=0.0)
    return seconds


def say_transitions(
    report: Report, timings: list[dict[str, float]], /, **settings: int | bool
) -> None:
    """Medians."""
    for name in timings[0]:
        report.add(name, median([one[name] for one in timings]) * 1e3, "ms", **settings)


def graphs_over(machine: Machine, memory: InstanceMemory, num: int) -> list[Graph]:
    """So many recorded graphs that read the arena's KV memory."""
    recorder = recorder_on(machine)
    place = wrap(memory.kv_base_address, memory.unit_bytes, machine.torch_device)
    total = torch.zeros_like(place)

    def work() -> None:
        for _ in range(_KERNELS_A_GRAPH):
            torch.bitwise_xor(total, place, out=total)

    recorder.warm_up(work)
    return [recorder.record(work) for _ in range(num)]


def beside_attention(machine: Machine, report: Report, granule_bytes: int) -> None:
    """Kernels over KV, and copies, while a drop and a restore change what lies beside it."""
    driver = machine.driver()
    memory = open_memory(machine, driver, granule_bytes)
    try:
        attend, out = _attention(machine, memory)
        attend()
        machine.synchronize()
        expected = out.clone()
        queue = _queue_of(machine, attend)

        alone, _ = machine.seconds(queue, 3)
        wrong, rounds, took = 0, [], []
        for _ in range(_ROUNDS):
            out.zero_()
            machine.synchronize()
            began = time.perf_counter()
            queue()
            rounds.append(transitions(memory, lambda: _write_tail(machine, memory)))
            machine.synchronize()
            took.append(time.perf_counter() - began)
            wrong += int((out != expected).sum().item())
    finally:
        memory.close()
    where = {"granule_kib": granule_bytes // 1024}
    say_transitions(report, rounds, kernels=True, graphs=False, **where)
    report.add("queue of attention, alone", alone * 1e3, "ms", **where)
    report.add("queue of attention, beside a drop and a restore", median(took) * 1e3, "ms", **where)
    report.add("wrong values of attention", wrong, "", **where)
    assert wrong == 0, f"{wrong} values of attention differ"


def _attention(machine: Machine, memory: InstanceMemory) -> tuple[Callable[[], None], torch.Tensor]:
    """Our kernel over units that stay where they are, all layers in turn."""
    spec, device = spec_of(machine), machine.torch_device
    ops = operations(spec)
    served = ops["triton"] if machine.is_real and "triton" in ops else ops["torch"]
    block_size = memory.spec.block_size
    blocks = memory.kv_units // spec.num_layers
    num = min(16 if machine.is_real else 2, blocks)
    context = min(blocks // num, 16) * block_size
    host = single_tokens(spec, num, context, block_size)
    batch = DeviceBatch.of(host, block_size, device)
    dtype = TORCH_DTYPES[spec.dtype]
    shape = (-1, 2, spec.num_kv_heads, block_size, spec.head_dim)
    kv = kv_in(memory, device).view(dtype).view(shape)
    first, end = spec.num_layers, spec.num_layers + memory.kv_units
    kv[first:end].normal_()
    q = torch.randn(num, spec.num_heads, spec.head_dim, device=device).to(dtype)
    out = torch.zeros(num, spec.q_size, dtype=dtype, device=device)

    def attend() -> None:
        for layer in range(spec.num_layers):
            served.attend(layer, q, kv, batch, out)

    return attend, out


def _queue_of(machine: Machine, attend: Callable[[], None]) -> Callable[[], None]:
    """Some hundred milliseconds of it, asked for in one: by graphs, or the host would be slower
    than the kernels.
    """
    once, num = attend, 2
    if machine.is_real:
        recorder = recorder_on(machine)
        recorder.warm_up(attend)
        once, num = recorder.record(attend).replay, 200

    def queue() -> None:
        for _ in range(num):
            once()

    return queue


def _write_tail(machine: Machine, memory: InstanceMemory) -> None:
    """Poison what a drop has given, by the engine's own stream of copies."""
    spec = memory.spec
    first, end = spec.kv_units, memory.backed_units
    if end - first < 2:
        return
    address = memory.kv_base_address + first * spec.unit_bytes
    num_bytes = (end - first) // 2 * spec.unit_bytes
    if not machine.is_real:
        wrap(address, num_bytes, machine.torch_device).fill_(_POISON)
    else:
        with torch.cuda.stream(torch.cuda.Stream(machine.torch_device)):
            wrap(address, num_bytes, machine.torch_device).fill_(_POISON)
            torch.cuda.current_stream().synchronize()
    memory.arena.pages.copy([(address + num_bytes, address, num_bytes)])
