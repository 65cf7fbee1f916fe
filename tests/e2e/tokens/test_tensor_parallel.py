"""Instances of several ranks: greedy tokens in float32 are those of transformers, whatever
is moved and swapped in between.
"""

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kunserve.control.instance.body import HostCopy, UnitCopy
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.model.source import resolve_model
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve_extras.ranks.backend import RankedBackend
from tests.direct_engine import DirectEngine
from tests.extras.ranks.forked_ranks import fork_member
from tests.tiny_models import KINDS, VOCAB, save_with_answers
from tests.tiny_models import MORE_KINDS as FAMILIES
from tests.unit.transport.addresses import fresh_address
from tests.unit.transport.bulk.test_bulk import ended
from tests.unit.transport.bulk_world import entries, piece

NUM_LAYERS = 4
NUM_TOKENS = 8
WHOLE = LayerRange(0, NUM_LAYERS)
HALVES = (LayerRange(0, 2), LayerRange(2, 4))
ZERO, ONE = InstanceId(0), InstanceId(1)
PROMPTS = [
    np.random.default_rng(length).integers(3, VOCAB, length).tolist() for length in (1, 7, 40)
]


def open_ranks(
    folder: Path,
    num_ranks: int,
    number: int = 0,
    *,
    dtype: str = "float32",
    num_threads: int = 1,
    scheduler: SchedulerConfig | None = None,
    expert_parallel: bool = False,
) -> EngineBody:
    model = ModelConfig(model=str(folder), dtype=dtype)  # type: ignore[arg-type]
    source = resolve_model(str(folder))
    config = InstanceConfig(
        memory_bytes=4 << 20,
        granule_bytes=8192,
        block_size=8,
        tensor_parallel_size=num_ranks,
        num_threads=num_threads,
        enable_expert_parallel=expert_parallel,
    )
    backend = RankedBackend(model, source, num_ranks, start=fork_member)
    return EngineBody(InstanceId(number), model, config, source, scheduler, backend)


@pytest.fixture(scope="module", params=["llama3", "phi3"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_with_answers(folder, request.param, PROMPTS, NUM_TOKENS)


MORE_KINDS = [kind for kind in (*KINDS, *FAMILIES) if kind not in ("llama3", "phi3")]


@pytest.mark.slow
@pytest.mark.parametrize("saved", MORE_KINDS, indirect=True)
def test_so_are_those_of_every_other_kind(saved: tuple[Path, list[list[int]]]) -> None:
    test_tokens_of_transformers(saved, 2)


@pytest.mark.parametrize("num_ranks", [2, 4])  # with four, each KV head is two ranks'
def test_tokens_of_transformers(saved: tuple[Path, list[list[int]]], num_ranks: int) -> None:
    folder, expected = saved
    with closing(open_ranks(folder, num_ranks)) as body:
        for chunk_size in (1000, 5):
            engine = DirectEngine([(body, WHOLE)])
            assert engine.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected
        body.check()


@pytest.mark.parametrize("saved", ["llama3"], indirect=True)
def test_kv_moves_whole(saved: tuple[Path, list[list[int]]]) -> None:
    """Between instances, inside one, to host memory and back: every rank's part of each unit."""
    folder, _ = saved
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(closing(open_ranks(folder, 2, number))) for number in range(2)
        )
        num = 12
        size = num * one.memory.unit_bytes
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        one.memory.write_units([(3, 5), (20, 7)], data)
        found = np.empty_like(data)
        one.memory.read_units([(3, 5), (20, 7)], found)
        assert (found == data).all()
        # In other runs there, as where blocks lie otherwise.
        other.memory.write_units([(9, 2), (30, 10)], found)
        back = np.empty_like(data)
        other.memory.read_units([(9, 2), (30, 10)], back)
        assert (back == data).all()
        one.memory.copy_units((UnitCopy(3, 40, 5), UnitCopy(20, 45, 7)))
        one.memory.read_units([(40, num)], back)
        assert (back == data).all()
        request = RequestId("r")
        out = HostCopy(request, 0, np.array([40, 44, 48], dtype=np.int32), 4)
        one.swap_units((out,), (), beside_step=False)
        one.memory.write_units([(40, num)], np.zeros(size, dtype=np.uint8))
        there = HostCopy(request, 0, np.array([60, 52, 56], dtype=np.int32), 4)
        one.swap_units((), (there,), beside_step=False)
        one.memory.read_units([(60, 4), (52, 4), (56, 4)], back)
        assert (back == data).all()
        for rank, shard in enumerate(one.memory.shards):
            unit = shard.unit_view(3, 1)
            part = data[: one.memory.unit_bytes].reshape(2, -1)[rank]
            assert (unit == part).all(), "a unit's bytes are those of the ranks in turn"


def test_peers_read_in_the_file_of_all_ranks(
    saved: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units to other places, and layers in chunks that end anywhere, after granules have moved."""
    folder, expected = saved

    def send(*args: object) -> None:
        raise AssertionError("bytes are to be read, not sent")

    with ExitStack() as stack:
        one, other = (
            stack.enter_context(closing(open_ranks(folder, 2, number))) for number in range(2)
        )
        for body, keep in ((one, HALVES[0]), (other, HALVES[1])):
            body.memory.drop(keep)
        # A block's part of a stage is a run of two units, here in other places than there.
        here, there = ((3, one.spec.kv_units, 20), (other.spec.kv_units + 2, 9, 30))
        data = np.random.default_rng(0).integers(0, 256, 6 * one.memory.unit_bytes, np.uint8)
        one.memory.write_units([(unit, 2) for unit in here], data)
        monkeypatch.setattr(one.memory, "read_units", send)
        monkeypatch.setattr(one.memory, "read_layer", send)
        pacing = BulkPacing(chunk_bytes=5000, read_chunk_bytes=5000)
        giver = stack.enter_context(
            closing(BulkMover(ZERO, fresh_address(), one.memory, pacing=pacing))
        )
        taker = stack.enter_context(
            closing(BulkMover(ONE, fresh_address(), other.memory, pacing=pacing))
        )
        taker.connect({ZERO: giver.address})
        giver.export_kv(RequestId("r"), entries(*here))
        taker.pull_kv(piece("r", ZERO, (0, 2), (0, 3)), entries(*there))
        assert [done.refusal for done in ended(taker, 1)] == [None]
        back = np.empty_like(data)
        other.memory.read_units([(unit, 2) for unit in there], back)
        assert (back == data).all()
        other.memory.reclaim(WHOLE)
        giver.offer_layers(HALVES[0])
        taker.pull_layers(HALVES[0], ZERO)
        assert [done.refusal for done in ended(taker, 1)] == [None]
        assert DirectEngine([(other, WHOLE)]).generate(PROMPTS, NUM_TOKENS, 16) == expected


@pytest.mark.parametrize("saved", ["llama3"], indirect=True)
def test_by_several_threads_and_within_limits(saved: tuple[Path, list[list[int]]]) -> None:
    """Bits do not depend on threads, nor on how steps are cut; here in bfloat16."""
    folder, _ = saved
    found = []
    for num_threads, scheduler in (
        (2, None),
        (4, SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48)),
    ):
        body = open_ranks(folder, 2, dtype="bfloat16", num_threads=num_threads, scheduler=scheduler)
        with closing(body):
            for chunk_size in (48, 5):
                engine = DirectEngine([(body, WHOLE)])
                found.append(engine.generate(PROMPTS[1:], NUM_TOKENS, chunk_size))
    assert found[1:] == found[:-1]
