"""P12: what a client sees of one instance that has the device to itself, by HTTP."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.costs import batch_tokens_of, block_size_of
from benchmarks.gpu_phases.machine import GIB, SHAPES, Machine
from benchmarks.gpu_phases.models import BESIDE_BYTES, serving_model, write_model
from benchmarks.report import Report, Setting
from kunserve.core.errors import TooLittleMemory
from kunserve.model.spec import ModelSpec
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.metrics import RunMetrics, compute_metrics
from kunserve_lab.bench.prompts import TokenIdPrompts
from kunserve_lab.bench.server_process import running_server
from kunserve_lab.bench.session import Target, find_model, measure
from kunserve_lab.workload.arrivals import immediate_arrivals
from kunserve_lab.workload.lengths import random_lengths
from kunserve_lab.workload.workload import Workload

_STREAMS = (1, 32, 64, 128, 256)
_FEW = (1, 32)
_LEAST_REQUESTS = 3
"""Of one stream one after the other, so that one that is slow does not decide."""
_BESIDE_BYTES = BESIDE_BYTES // 2
"""What this process and the instance take beside its arena."""
_SPARE_BLOCKS = 64
_MODEL_S = 30.0
_REQUEST_S = 60.0
"""A request that takes longer has failed."""
_QWENS = (("temperature", 0.7), ("top_p", 0.8), ("top_k", 20), ("repetition_penalty", 1.05))
"""As Qwen2.5-Instruct's generation config asks for."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Some streams that ask in one way."""

    streams: int
    is_drawn: bool = False

    @property
    def sampling(self) -> str:
        return "Qwen's own" if self.is_drawn else "greedy"


def run(machine: Machine, report: Report) -> None:
    """A server for each set of flags; what most is said of comes first."""
    few = _few(machine)
    streams = _STREAMS if machine.is_real else few
    ways = [_Way(num) for num in streams] + [_Way(num, is_drawn=True) for num in few]
    machine.do(
        Part("served", partial(_served, machine, report, ways, True)),
        Part("without async scheduling",
             partial(_served, machine, report, [_Way(num) for num in few], False)),
    )  # fmt: skip


def _few(machine: Machine) -> tuple[int, ...]:
    return _FEW if machine.is_real else (1, 4)


def _lengths(machine: Machine) -> tuple[int, int]:
    """Tokens of each prompt and of each answer."""
    return (1000, 128) if machine.is_real else (40, 6)


def _served(machine: Machine, report: Report, ways: Sequence[_Way], is_async: bool) -> None:
    """One way after the other to one server: one that fails stops no other."""
    spec, kv_bytes = _model(machine)
    most = most_streams(spec, kv_bytes, block_size_of(machine), sum(_lengths(machine)))
    report.add("KV memory holds", most, "streams", model=spec.name)
    flags = _flags(machine, spec, kv_bytes)
    if not is_async:
        flags.append("--no-async-scheduling")
    bad: list[str] = []
    with running_server(flags) as server:
        for number, way in enumerate(way for way in ways if way.streams <= most):
            metrics = asyncio.run(_asked(machine, server.url, way, number))
            _tell(report, spec, way, is_async, metrics)
            if metrics.num_failed:
                bad.append(f"{way.streams} streams, {way.sampling}: {metrics.num_failed} failed")
    assert not bad, "; ".join(bad)


def _model(machine: Machine) -> tuple[ModelSpec, int]:
    """7B, and KV bytes for as many streams as are asked for, or what there is. Raises
    TooLittleMemory.
    """
    if not machine.is_real:
        return serving_model(machine)
    spec, block_size = SHAPES["7b"], block_size_of(machine)
    free_bytes, _ = machine.driver().memory_bytes()
    wanted = _STREAMS[-1] * _blocks_of(block_size, sum(_lengths(machine))) + _SPARE_BLOCKS
    left = free_bytes - _BESIDE_BYTES - spec.weights_bytes
    kv_bytes = min(left, wanted * spec.block_bytes(block_size))
    if most_streams(spec, kv_bytes, block_size, sum(_lengths(machine))) < max(_FEW):
        raise TooLittleMemory(f"{free_bytes / GIB:.0f} GiB are free: too little for {spec.name}")
    return spec, kv_bytes


def _blocks_of(block_size: int, num_tokens: int) -> int:
    """Of one stream, with one for what is asked for ahead."""
    return -(-num_tokens // block_size) + 1


def most_streams(spec: ModelSpec, kv_bytes: int, block_size: int, num_tokens: int) -> int:
    """Streams of so many tokens each that run at once in that much KV memory: none waits for
    another one's end, and none is preempted.
    """
    num_blocks = kv_bytes // spec.block_bytes(block_size)
    return max(0, num_blocks // _blocks_of(block_size, num_tokens))


def _flags(machine: Machine, spec: ModelSpec, kv_bytes: int) -> list[str]:
    """Of ``kunserve serve``. A rehearsal's computes on the CPU: it knows no stand-in."""
    return [
        str(write_model(spec, machine.folder / spec.name)),
        *("--device", "cuda" if machine.is_real else "cpu"),
        *("--load-format", "dummy"),
        *("--quantization", "none"),
        *("--num-instances", "1"),
        *("--instance-memory", str(spec.weights_bytes + kv_bytes)),
        *("--max-num-batched-tokens", str(batch_tokens_of(machine))),
        *("--block-size", str(block_size_of(machine))),
        *("--num-threads", "1"),
    ]


async def _asked(machine: Machine, url: str, way: _Way, number: int) -> RunMetrics:
    """All streams begin at once, each with a prompt that no run before has had."""
    prompt_tokens, output_tokens = _lengths(machine)
    num = max(_LEAST_REQUESTS, way.streams)
    lengths = random_lengths(num, prompt_tokens, output_tokens, 0.0, 0)
    workload = Workload(immediate_arrivals(num), lengths, "all at once")
    settings = CallSettings(
        model=await find_model((url,), None, None, _MODEL_S),
        endpoint="/v1/completions",
        chat=False,
        ignore_eos=True,
        timeout_s=_REQUEST_S,
        extra_body=_QWENS if way.is_drawn else (),
    )
    target = Target((url,), settings, (), max_concurrency=way.streams, num_warmups=1)
    outcome = await measure(target, workload, TokenIdPrompts(number))
    return compute_metrics(outcome.records, outcome.duration_s)


def _tell(report: Report, spec: ModelSpec, way: _Way, is_async: bool, seen: RunMetrics) -> None:
    where: dict[str, Setting] = {"model": spec.name, "streams": way.streams}
    where |= {"sampling": way.sampling, "async_scheduling": is_async}
    if seen.num_completed:
        report.add("TPOT P50", seen.tpot.median_s * 1e3, "ms", **where)
        # Beside TPOT, which has the other streams' prompts in it: a token when all decode.
        report.add("ITL P50", seen.itl.median_s * 1e3, "ms", **where)
        report.add("TTFT P50", seen.ttft.median_s * 1e3, "ms", **where)
        report.add("output", seen.output_throughput, "tokens/s", **where)
    report.add("failed", seen.num_failed, "", **where)
