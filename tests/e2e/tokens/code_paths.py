"""What computes tokens in a cluster that drops, and what befalls it besides."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import InstanceId
from kunserve.engine.memory.free_memory import children_of
from kunserve.model.spec import DTYPE_BYTES
from kunserve_extras.torch_body.cuda.cards import STAND_IN
from tests.e2e.tokens.asked_cluster import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    QUEUED,
    QUEUED_TOKENS,
    SEEDED,
    Answers,
    Wanted,
    config_of,
    drop_to,
    restore_when_it_fits,
)
from tests.e2e.tokens.test_kv_ring import ringed
from tests.e2e.tokens.test_ranked_cluster import ranked
from tests.fakecuda.library import build
from tests.running.engines import NEEDS_VLLM
from tests.tiny_gguf import write_gguf
from tests.tiny_models import VOCAB, tiny_model


class Wave(NamedTuple):
    """Groups are dropped until so few are left, then requests are asked, then all have tokens."""

    num_groups: int | None
    wanted: dict[str, Wanted]
    have_tokens: int


ALL = {name: Wanted(prompt, NUM_TOKENS[name]) for name, prompt in PROMPTS.items()} | {
    name: Wanted(prompt, QUEUED_TOKENS) for name, prompt in QUEUED.items()
}


def some(first: int, end: int, **changes: object) -> dict[str, Wanted]:
    """The first ten are of several sizes, the others more than memory admits at once."""
    return {name: ALL[name]._replace(**changes) for name in list(ALL)[first:end]}  # type: ignore[arg-type]


def in_turn(wanted: dict[str, Wanted]) -> dict[str, Wanted]:
    """Every second one draws its tokens."""
    return {
        name: one._replace(like=SEEDED if number % 2 else GREEDY)
        for number, (name, one) in enumerate(wanted.items())
    }


def with_one_beginning() -> list[dict[str, Wanted]]:
    """Of five blocks of 8, and a part of one."""
    system = np.random.default_rng(5).integers(3, VOCAB, 43).tolist()
    ends = [np.random.default_rng(i).integers(3, VOCAB, 3 + 5 * (i % 4)).tolist() for i in range(8)]
    wanted = [(f"r{i}", Wanted(system + end, 14, GREEDY, False)) for i, end in enumerate(ends)]
    return [dict(wanted[:3]), dict(wanted[3:6]), dict(wanted[6:])]


def long_ones() -> dict[str, Wanted]:
    draws = [np.random.default_rng(i).integers(100, 30000, 40 + 30 * i).tolist() for i in range(3)]
    return in_turn({f"r{i}": Wanted(prompt, 32) for i, prompt in enumerate(draws)})


FEW = (Wave(None, some(1, 5), 3), Wave(1, some(10, 16), 2))
SHARED = with_one_beginning()
LONG = long_ones()
BACKWARDS = {"late": Wanted(LONG["r2"].prompt[::-1], 4, SEEDED)}


async def nothing_more(cluster: LocalCluster, answers: Answers, folder: Path) -> None:
    pass


async def drop_beside_decodes(cluster: LocalCluster, answers: Answers, folder: Path) -> None:
    """Until the traces show that KV was pulled.

    While this process stands still on a busy machine, whoever had KV may end or be preempted.
    """
    for number in count():
        if any('"KV from' in file.read_text() for file in folder.glob("trace*")):
            return
        assert number < 100, "no drop met KV that had to be exchanged"
        answers.ask_for({f"x{number}-{which}": Wanted(PROMPTS["r0"], 150) for which in range(2)})
        await answers.have(1)
        await drop_to(cluster, 1)
        await restore_when_it_fits(cluster)


async def crash(cluster: LocalCluster, answers: Answers, folder: Path) -> None:
    answers.ask_for(some(16, 19, num_tokens=70))
    await answers.have(2)
    await cluster.kill(InstanceId(1))


async def kill_a_rank(cluster: LocalCluster, number: int) -> None:
    """Of one instance; its process ends, and another one takes its place."""
    instance = cluster.vitals().pids[number]
    instance_id, pid = instance
    (member, *_) = children_of(pid)
    os.kill(member, signal.SIGKILL)
    async with asyncio.timeout(60.0):
        while cluster.pid_of(instance_id) in (pid, None):
            await asyncio.sleep(0.01)
        while cluster.vitals().num_missing:
            await asyncio.sleep(0.05)
    assert cluster.state().num_deaths == 1


async def lose_a_rank(cluster: LocalCluster, answers: Answers, folder: Path) -> None:
    answers.ask_for(some(18, 26))
    await kill_a_rank(cluster, 1)
    await drop_to(cluster, 1)


async def lose_a_rank_of_a_pipeline(cluster: LocalCluster, answers: Answers, folder: Path) -> None:
    """Its requests are run again, and the other instance loads what it had dropped."""
    await kill_a_rank(cluster, 0)


@dataclass(frozen=True)
class CodePath:
    """What a cluster computes with, what it is asked, and what befalls it besides."""

    kind: str
    num_layers: int = 5
    num_instances: int = 2
    num_ranks: int = 1
    waves: tuple[Wave, ...] = FEW
    is_restored: bool = True
    after: Callable[[LocalCluster, Answers, Path], Awaitable[None]] = nothing_more
    num_blocks: int = 24
    """With 192 tokens in each instance, some requests are preempted."""
    last_layers: int | None = None
    """Of the last stage of a pipeline of all; None: they are not looked at."""
    quant: Quant | None = None
    engine: str = "own"
    dtype: str = "float32"
    on_device: bool = False
    guesses: bool = False
    some_are_right: bool = False
    """Of the guesses: tokens of some models never repeat themselves."""
    lookahead: bool = True
    is_traced: bool = False
    is_ring: bool = False
    num_shared_tokens: int = 0
    """That at least one prompt finds in the prefix cache."""

    @property
    def is_pretrained(self) -> bool:
        return self.kind == "smollm2-135m"

    def config_in(self, folder: Path) -> KunServeConfig:
        """Save what is to be served, and tell how."""
        device = STAND_IN + build() if self.on_device else "cpu"
        if self.is_pretrained:
            return config_of(
                self.kind, "bfloat16", 2, 64 << 20, 256 * 1024, 16, guesses=self.guesses
            )
        model = tiny_model(self.kind, self.num_layers)
        kv_heads = max(self.num_ranks, model.config.num_key_value_heads)
        kv_values = self.num_blocks * self.num_layers * 2 * 8 * kv_heads * 32
        if self.quant is not None:
            file = write_gguf(folder / "model.gguf", model, self.kind, self.quant)
            config = config_of(str(file), "bfloat16", 2, 2 * kv_values, granule_bytes=4096)
            return replace(config, model=replace(config.model, quantization="gguf"))
        model.save_pretrained(folder)
        value_bytes = DTYPE_BYTES[self.dtype]
        trace = str(folder / "trace.json") if self.is_traced else None
        config = config_of(
            str(folder), self.dtype, self.num_instances, value_bytes * kv_values, device=device,
            lookahead=self.lookahead, trace_out=trace, guesses=self.guesses, engine=self.engine,
        )  # fmt: skip
        return ringed(config) if self.is_ring else ranked(config, self.num_ranks)


SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
LOOKED_AT_BY_TOKENS = CodePath(
    "qwen2",
    waves=(Wave(None, some(0, 6), 3), Wave(1, some(6, 10), 0), Wave(1, some(10, 26), 10)),
    after=drop_beside_decodes,
    last_layers=2,
    lookahead=False,
    guesses=True,
    is_traced=True,
)
AHEAD = replace(LOOKED_AT_BY_TOKENS, lookahead=True, guesses=False)
EXPERTS = replace(AHEAD, kind="qwen3_moe", num_layers=4)
FOUR = replace(
    AHEAD,
    kind="llama",
    num_layers=9,
    num_instances=4,
    waves=(Wave(None, some(0, 6), 3), Wave(3, some(6, 10), 0), Wave(1, some(10, 26), 10)),
)
DEVICE = CodePath(
    "qwen3",
    waves=(Wave(None, some(0, 4, num_tokens=24), 1), Wave(1, some(10, 13), 0)),
    on_device=True,
    guesses=True,
    some_are_right=True,
)
AHEAD_ON_DEVICES = replace(
    DEVICE,
    waves=(Wave(None, some(0, 4, num_tokens=60), 1), Wave(1, some(10, 13, num_tokens=60), 40)),
    guesses=False,
    some_are_right=False,
)
# Four layers: of five, which are small, a drop would add no block.
PACKED = CodePath(
    "llama", 4, waves=(Wave(None, in_turn(some(0, 4)), 3), FEW[1]), quant=Quant.Q8_0
)  # fmt: skip
BFLOAT16 = CodePath(
    "smollm2-135m",
    30,
    waves=(Wave(None, LONG, 5), Wave(1, BACKWARDS, 4)),
    guesses=True,
    some_are_right=True,
)
PREFIXES = CodePath(
    "qwen2",
    waves=(Wave(None, SHARED[0], 4), Wave(None, SHARED[1], 1), Wave(1, SHARED[2], 4)),
    num_blocks=48,
    num_shared_tokens=40,
)
RANKS = CodePath(
    "qwen2",
    num_ranks=2,
    waves=(Wave(None, some(0, 6), 3), Wave(1, some(6, 18), 2)),
    after=lose_a_rank,
)
# A drop of layers that are small beside blocks of 32 tokens must add a block to each stage.
BY_VLLM = replace(AHEAD, num_layers=8, engine="vllm", guesses=True, num_blocks=28, last_layers=None)
VLLM_PATHS = {
    "by-tokens": replace(BY_VLLM, lookahead=False),
    "four-stages": replace(FOUR, engine="vllm", num_layers=12, last_layers=None),
    "bfloat16": replace(
        BY_VLLM,
        kind="llama",
        dtype="bfloat16",
        waves=(Wave(None, in_turn(some(0, 4)), 3), *FEW[1:], Wave(1, in_turn(some(4, 10)), 2)),
        is_traced=False,
        after=nothing_more,
    ),
    "prefixes": replace(PREFIXES, engine="vllm", num_layers=8, num_shared_tokens=32),
    "death": CodePath("qwen3", 8, engine="vllm", num_blocks=28, after=crash),
    "windows-gemma2": CodePath("gemma2", 8, engine="vllm", num_blocks=28),
    "experts": replace(EXPERTS, engine="vllm", num_blocks=28, last_layers=None),
    "unknown-to-us": CodePath("stablelm", 8, engine="vllm", num_blocks=28),
}
VLLM_PATHS["experts-bfloat16"] = replace(VLLM_PATHS["bfloat16"], kind="qwen3_moe", num_layers=4)
PIPELINE_OF_RANKS = CodePath(
    "qwen3",
    num_ranks=2,
    waves=(Wave(None, some(0, 10), 2), Wave(1, {}, 4)),
    is_restored=False,
    after=lose_a_rank_of_a_pipeline,
)
PATHS = [
    pytest.param(LOOKED_AT_BY_TOKENS, id="by-tokens"),
    pytest.param(FOUR, id="four-stages"),
    pytest.param(EXPERTS, id="experts", marks=pytest.mark.slow),
    pytest.param(DEVICE, id="device"),
    pytest.param(AHEAD_ON_DEVICES, id="device-ahead"),
    pytest.param(replace(AHEAD_ON_DEVICES, is_restored=False, after=crash), id="device-death"),
    pytest.param(PACKED, id="q8_0"),
    pytest.param(replace(PACKED, quant=Quant.Q4_1), id="q4_1"),
    pytest.param(BFLOAT16, id="bfloat16"),
    pytest.param(PREFIXES, id="prefixes"),
    pytest.param(CodePath("gemma3"), id="windows-gemma3"),
    pytest.param(CodePath("gemma2"), id="windows-gemma2", marks=pytest.mark.slow),
    pytest.param(CodePath("gemma3", after=crash, last_layers=3, is_ring=True), id="ring-gemma3"),
    pytest.param(
        CodePath("gemma2", after=crash, last_layers=3, is_ring=True),
        id="ring-gemma2",
        marks=pytest.mark.slow,
    ),
    pytest.param(RANKS, id="ranks", marks=SLOW),
    pytest.param(replace(RANKS, kind="llama", num_ranks=4), id="four-ranks", marks=SLOW),
    pytest.param(replace(RANKS, kind="qwen3", on_device=True), id="device-ranks", marks=SLOW),
    pytest.param(PIPELINE_OF_RANKS, id="pipeline-of-ranks", marks=SLOW),
    *(pytest.param(path, id=f"vllm-{name}", marks=NEEDS_VLLM) for name, path in VLLM_PATHS.items()),
]
