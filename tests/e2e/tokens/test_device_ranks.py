"""Instances of several ranks with a device each, on a stand-in for its driver, with sums by gloo:
greedy tokens in float32 are those of transformers, whatever is moved and refused.
"""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch

from kunserve.control.instance.body import HostCopy, UnitCopy
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.errors import ConfigError, ModelFiles, TooLittleMemory
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.model.source import resolve_model
from kunserve_extras.device_ranks import memory as device_memory
from kunserve_extras.device_ranks.backend import DeviceRanksBackend
from kunserve_extras.ranks.meeting import RankLost
from kunserve_extras.ranks.processes import Start
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.cuda.cards import STAND_IN
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.hops.hops import Hops
from tests.conftest import wait_until as eventually
from tests.direct_engine import DirectEngine
from tests.e2e.processes.test_lost_ranks import Deaths, lose_a_rank
from tests.e2e.tokens.test_device_identity import HoppingEngine
from tests.e2e.tokens.test_tensor_parallel import (
    HALVES,
    NUM_TOKENS,
    PROMPTS,
    WHOLE,
)
from tests.extras.ranks.forked_ranks import fork_member
from tests.fakecuda.library import KIB, MIB, FakeCuda, build
from tests.tape import TapeRecorder
from tests.tiny_models import KINDS, MORE_KINDS, SPARSE_KINDS, save_tiny, save_with_answers
from tests.unit.transport.addresses import fresh_address

LIMITS = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.left() == {}


@pytest.fixture(scope="module", params=["qwen3", pytest.param("llama3", marks=pytest.mark.slow)])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_with_answers(folder, request.param, PROMPTS, NUM_TOKENS)


def open_ranks(
    folder: Path,
    num_ranks: int = 2,
    number: int = 0,
    *,
    scheduler: SchedulerConfig | None = LIMITS,
    expert_parallel: bool = False,
    recorder: TapeRecorder | None = None,
    start: Start = fork_member,
    deaths: Deaths | None = None,
    **sizes: object,
) -> EngineBody:
    model = ModelConfig(model=str(folder), dtype="float32")
    source = resolve_model(str(folder))
    config = InstanceConfig(
        device=STAND_IN + build(),
        granule_bytes=8 * KIB,
        block_size=8,
        tensor_parallel_size=num_ranks,
        enable_expert_parallel=expert_parallel,
        **{"memory_bytes": 4 * MIB, **sizes},  # type: ignore[arg-type]
    )
    backend = DeviceRanksBackend(
        model,
        source,
        CudaBackend(torch.device("cpu"), build(), recorder),
        [STAND_IN + build()] * num_ranks,
        start,
        deaths or Deaths(),
    )
    return EngineBody(InstanceId(number), model, config, source, scheduler, backend)


OTHER_KINDS = [
    ("olmoe", 2, False, {}),  # whose norms of q and k are over all heads, so over all ranks
    ("qwen2_moe", 2, True, {"num_experts": 8}),  # of the shared expert each has a part
    ("gemma2", 2, False, {}),  # which norms what is summed
    # Of which each KV head is two ranks'.
    pytest.param("qwen2", 4, False, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "num_ranks", "expert_parallel", "changes"), OTHER_KINDS)
def test_what_other_kinds_sum(
    kind: str,
    num_ranks: int,
    expert_parallel: bool,
    changes: dict[str, object],
    fake: FakeCuda,
    tmp_path: Path,
) -> None:
    folder, expected = save_with_answers(tmp_path, kind, PROMPTS, NUM_TOKENS, **changes)
    opened = open_ranks(folder, num_ranks, expert_parallel=expert_parallel, scheduler=None)
    with closing(opened) as body:
        for chunk_size in (1000, 5):
            engine = DirectEngine([(body, WHOLE)])
            assert engine.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected
        body.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS, *SPARSE_KINDS])
def test_so_do_all(kind: str, fake: FakeCuda, tmp_path: Path) -> None:
    test_what_other_kinds_sum(kind, 2, False, {}, fake, tmp_path)


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_kv_moves_whole(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between instances, inside one, to host memory and back: in pieces that fit into a window."""
    folder, _ = saved
    with ExitStack() as stack:
        monkeypatch.setattr(device_memory, "_WINDOW_BYTES", 0)  # so that each holds one unit
        monkeypatch.setattr(device_memory, "_MOST_COPIES", 2)
        one, other = (
            stack.enter_context(closing(open_ranks(folder, 2, number))) for number in range(2)
        )
        num = 12
        data = np.random.default_rng(0).integers(0, 256, num * one.memory.unit_bytes, np.uint8)
        one.memory.write_units([(3, 5), (20, 7)], data)
        found, back = np.empty_like(data), np.empty_like(data)
        one.memory.read_units([(3, 5), (20, 7)], found)
        assert (found == data).all()
        # In other runs there, as where blocks lie otherwise.
        other.memory.write_units([(9, 2), (30, 10)], found)
        other.memory.read_units([(9, 2), (30, 10)], back)
        assert (back == data).all()
        one.memory.copy_units((UnitCopy(3, 40, 5), UnitCopy(20, 45, 6), UnitCopy(26, 51, 1)))
        one.memory.read_units([(40, num)], back)
        assert (back == data).all()
        request = RequestId("r")
        out = HostCopy(request, 0, np.array([40, 44, 48], dtype=np.int32), 4)
        one.swap_units((out,), (), beside_step=False)
        one.memory.write_units([(40, num)], np.zeros_like(data))
        there = HostCopy(request, 0, np.array([60, 52, 56], dtype=np.int32), 4)
        one.swap_units((), (there,), beside_step=False)
        one.memory.read_units([(60, 4), (52, 4), (56, 4)], back)
        assert (back == data).all()


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_no_steps_are_recorded(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Sums between processes are not part of a graph."""
    folder, expected = saved
    recorder = TapeRecorder()
    with caplog.at_level(logging.INFO), closing(open_ranks(folder, recorder=recorder)) as body:
        assert "no steps are recorded as graphs: sums over 2 ranks are not" in caplog.text
        assert DirectEngine([(body, WHOLE)]).generate(PROMPTS, NUM_TOKENS) == expected
        assert recorder.num_recorded == 0


# What goes wrong


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_what_one_driver_refuses_none_has_prepared(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's, once: then it can be asked for again, and rank 0's granules are no tidier."""
    prepare, refusals = InstanceMemory.prepare, ["rank 1's driver refuses"]

    def refuse_once(memory: InstanceMemory, layers: LayerRange) -> str | None:
        return refusals.pop() if refusals and layers != WHOLE else prepare(memory, layers)

    def start(end: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(InstanceMemory, "prepare", refuse_once)
            return fork_member(end)  # type: ignore[arg-type]

    with closing(open_ranks(saved[0], start=start)) as body:  # type: ignore[arg-type]
        assert body.memory.prepare(HALVES[0]) == "rank 1's driver refuses"
        body.check()
        assert body.memory.own.held == WHOLE and body.memory.own.arena.num_aliases
        assert DirectEngine([(body, WHOLE)]).generate(PROMPTS, 2) == [one[:2] for one in saved[1]]
        assert not body.memory.own.arena.num_aliases, "tidied between steps"
        assert body.memory.prepare(HALVES[1]) is None
        assert body.memory.drop(HALVES[1]).kv_units == body.spec.units_when_holding(2)
        body.check()


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_a_step_ends_when_a_rank_has_died(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]]
) -> None:
    deaths = Deaths()
    with closing(open_ranks(saved[0], deaths=deaths)) as body:
        lose_a_rank(body, deaths, PROMPTS)


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_a_wait_ends_when_a_rank_stands_still(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]]
) -> None:
    """For a copy, and for an order; for a sum see ``test_sums``."""
    with closing(open_ranks(saved[0])) as body:
        members = body.memory._members
        members._patience_s, members.meeting.as_c.patience_ns = 0.2, 200_000_000
        (pid,) = body.other_pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankLost, match="no word"):
            while True:  # its threads stop one by one
                body.memory.read_units([(0, 1)], np.empty(body.memory.unit_bytes, dtype=np.uint8))
        with pytest.raises(RankLost, match="stood still for too long"):
            DirectEngine([(body, WHOLE)]).generate(PROMPTS, 2)
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("num_ranks", "says"), [(3, "4 attention heads, which it does not divide"), (8, "over 2 or 4")]
)
def test_what_cannot_be_parted_is_refused_before_weights_are_read(
    fake: FakeCuda, tmp_path: Path, num_ranks: int, says: str
) -> None:
    save_tiny(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").write_bytes(b"")

    def start(end: object) -> None:
        raise AssertionError("bad settings start nobody")

    with pytest.raises(ConfigError, match=says):
        open_ranks(tmp_path, num_ranks, start=start)  # type: ignore[arg-type]


def test_what_one_rank_refuses_the_instance_refuses(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that it cannot read, and a device that has no room for it."""
    save_tiny(tmp_path, "qwen3")

    def truncated(*args: object) -> None:
        raise ModelFiles("model.safetensors: truncated")

    def start(end: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr("kunserve.engine.weights.readers.SafetensorsReader.check", truncated)
            return fork_member(end)  # type: ignore[arg-type]

    with pytest.raises(ModelFiles, match="truncated"):
        open_ranks(tmp_path, start=start)  # type: ignore[arg-type]

    def start_beside_others(end: object) -> object:
        driver = Driver(library=build())
        others = driver.create(60 * MIB)
        member = fork_member(end)  # type: ignore[arg-type]
        driver.release(others)
        return member

    with pytest.raises(TooLittleMemory, match="MiB left. Give it less, or end what else uses it"):
        open_ranks(tmp_path, start=start_beside_others)  # type: ignore[arg-type]


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_a_share_of_each_device(fake: FakeCuda, saved: tuple[Path, list[list[int]]]) -> None:
    """All ranks take as much, and what rank 0 needs beside it is left on each."""
    with closing(open_ranks(saved[0], gpu_memory_utilization=0.5)) as body:
        own = fake.used_bytes + body._decoder._own.buffer_bytes  # type: ignore[attr-defined]
        assert 0.45 * 64 * MIB < own <= 0.5 * 64 * MIB
        assert body.spec.memory_bytes == 2 * body.memory.own.spec.memory_bytes
        assert body.spec.tensor_parallel_size == 2
        assert DirectEngine([(body, LayerRange(0, 4))]).generate(PROMPTS, 4) == [
            tokens[:4] for tokens in saved[1]
        ]


def test_ranks_of_stages_hear_of_steps_that_are_not_computed(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]]
) -> None:
    """Rank 0 has all hidden states."""
    folder, expected = saved
    addresses = [fresh_address() for _ in HALVES]
    with ExitStack() as stack:
        bodies = [stack.enter_context(closing(open_ranks(folder, 2, n))) for n in range(2)]
        for body, address, keep in zip(bodies, addresses, HALVES, strict=True):
            backend = body._backend
            assert isinstance(backend, DeviceRanksBackend)
            backend.open_hops(address)
            assert isinstance(backend.ahead, Hops)
            stack.callback(backend.ahead.close)
            body.memory.drop(keep)
        engine = HoppingEngine(list(zip(bodies, HALVES, strict=True)), addresses)
        assert engine.generate(PROMPTS, NUM_TOKENS, 5) == expected
        (way,) = bodies[0].ahead._ways.values()  # type: ignore[attr-defined]
        eventually(lambda: way.slots)
        began = engine.step_id
        engine.num_ahead = 0
        assert engine.generate(PROMPTS, NUM_TOKENS, 5) == expected
        assert engine.num_ahead == engine.step_id - began
