"""P6: two processes with random weights: what a drop and a restore cost while both decode."""

import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.live import Asker, describe, with_cluster
from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, GIB, MIB, SHAPES, Machine, median
from benchmarks.gpu_phases.models import BESIDE_BYTES, write_model
from benchmarks.report import Report, Setting
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.ids import RequestId
from kunserve.model.spec import ModelSpec

_NO_LIMIT = """
link_gbps = 1e6
[[hosts]]
name = "here"
instances = 2
"""
MOST_STREAMS = 64
USED = 0.7
"""Of the KV memory, by all streams at their ends."""
_AFTER_S = 0.5
"""How long tokens are watched before a transition, and after it has ended."""


def run(machine: Machine, report: Report) -> None:
    """A 14B and a 7B model on a GPU that has room for two of each.

    KV is copied from mapped granules of the other process; for the 7B model it is sent through
    pinned memory and sockets, too. One round of the 14B model decides; three more tell how much
    rounds differ.
    """
    machine.do(
        Part("14b, mapped", partial(_measure_if_fits, machine, report, "14b", "mapped", 1)),
        Part("7b, mapped", partial(_measure_if_fits, machine, report, "7b", "mapped", 1)),
        Part("7b, sent", partial(_measure_if_fits, machine, report, "7b", "sent", 1)),
        Part("14b again", partial(_measure_if_fits, machine, report, "14b", "mapped", 3)),
    )


def _measure_if_fits(machine: Machine, report: Report, name: str, way: str, rounds: int) -> None:
    if not machine.is_real:
        _measure(machine, report, SHAPES["tiny"], 2 * MIB, way, 1)
        return
    free_bytes, _ = machine.driver().memory_bytes()
    spec = SHAPES[name]
    memory_bytes = min((free_bytes - BESIDE_BYTES) // 2, spec.weights_bytes + 24 * GIB)
    if memory_bytes < spec.weights_bytes + 4 * GIB:
        report.add("too little memory for two", None, "", model=spec.name)
        return
    _measure(machine, report, spec, memory_bytes, way, rounds)


def _measure(
    machine: Machine, report: Report, spec: ModelSpec, memory_bytes: int, way: str, rounds: int
) -> None:
    real = machine.is_real
    prompt_tokens, num_tokens = (1000, 2000) if real else (20, 200)
    num_streams = streams_of(spec, memory_bytes, prompt_tokens + num_tokens) if real else 4
    generator = np.random.default_rng(0)

    async def story(asker: Asker) -> None:
        for number in range(rounds):
            names = [f"{number}-{stream}" for stream in range(num_streams)]
            for name in names:
                prompt = generator.integers(3, spec.vocab_size, prompt_tokens).tolist()
                asker.ask(name, prompt, num_tokens)
            await asker.flow(3)
            for change in (lambda: asker.cluster.drop(None), asker.cluster.restore):
                await asyncio.sleep(_AFTER_S)
                began = time.monotonic()
                record = await asker.change(change)
                await asyncio.sleep(_AFTER_S)
                until = time.monotonic()
                describe(report, record, model=spec.name, bytes=way, round=number)
                before, during = (
                    asker.pauses_s(began - _AFTER_S, began), asker.pauses_s(began, until)
                )  # fmt: skip
                where: dict[str, Setting] = {"transition": record.kind, "model": spec.name}
                where |= {"bytes": way, "round": number}
                if before:
                    report.add("between two tokens before", median(before) * 1e3, "ms", **where)
                if during:
                    report.add("longest pause of a stream", during[-1] * 1e3, "ms", **where)
            for name in names:
                asker.cluster.abort(RequestId(name))
            await asker.until(lambda: asker.cluster.num_unfinished() == 0)
            asker.answers.clear()

    with tempfile.TemporaryDirectory() as folder:
        write_model(spec, Path(folder))
        config = _config(machine, folder, memory_bytes, way)
        ready_s = with_cluster(config, spec.vocab_size, story)
    report.add("both ready after", ready_s, "s", model=spec.name)


def streams_of(spec: ModelSpec, memory_bytes: int, num_tokens: int) -> int:
    """How many run on two instances that have not dropped, and leave memory: else they would drop
    by themselves before they are asked to. ``num_tokens``: of each, prompt included.
    """
    token_bytes = 2 * spec.num_layers * spec.kv_size * spec.dtype_bytes
    kv_bytes = 2 * (memory_bytes - spec.weights_bytes)
    return max(2, min(MOST_STREAMS, int(USED * kv_bytes) // (num_tokens * token_bytes)))


def _config(machine: Machine, folder: str, memory_bytes: int, way: str) -> KunServeConfig:
    real = machine.is_real
    topology = None
    if way == "sent":
        # What has a limited rate is sent.
        topology = Path(folder, "links.toml")
        topology.write_text(_NO_LIMIT)
    return KunServeConfig(
        model=ModelConfig(model=folder, load_format="dummy", dtype="bfloat16"),
        instance=InstanceConfig(
            device=machine.instance_device,
            memory_bytes=memory_bytes,
            block_size=64 if real else 8,
            granule_bytes=64 * MIB if real else FAKE_GRANULARITY_BYTES,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=2048 if real else 48),
        overload=OverloadConfig(policy="drop", restore_below=0.0),
        cluster=ClusterConfig(
            num_instances=2, topology=None if topology is None else str(topology)
        ),
    )
