import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kunserve.control.instance.body import StepWork, UnitCopy
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.kv_blocks import KvRing, ring_of
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.core.step import Chunk, StepPlan
from kunserve.engine.backend import CpuBackend
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.decoder import LOGIT_ROWS, StepDecoder
from kunserve.engine.cpu.ends import Ends
from kunserve.engine.cpu.hidden_rows import tensor_of
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory import pages
from kunserve.engine.memory.memory import Memory
from kunserve.engine.sampling.sampler import Sampler
from kunserve.engine.sampling.structured.forms import Forms
from kunserve.engine.step_batch import build_batch
from kunserve.model.spec import ModelSpec
from tests.direct_engine import DirectEngine, arenas_mapped
from tests.tiny_models import save_tiny

A = RequestId("a")
SMALL = InstanceConfig(memory_bytes=4 << 20, granule_bytes=8192)


class WatchedBackend(CpuBackend):
    """Tells what computes, and what chooses tokens."""

    made: StepDecoder
    chooser: Sampler

    def decoder(
        self, spec: ModelSpec, weights: ModelWeights, memory: Memory, config: InstanceConfig
    ) -> StepDecoder:
        self.made = super().decoder(spec, weights, memory, config)
        return self.made

    def sampler(self, eos_ids: Sequence[int], vocab_size: int, forms: Forms) -> Sampler:
        self.chooser = super().sampler(eos_ids, vocab_size, forms)
        return self.chooser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama", 3)


@pytest.fixture
def backend() -> WatchedBackend:
    return WatchedBackend()


@pytest.fixture
def body(folder: Path, backend: WatchedBackend) -> Iterator[EngineBody]:
    made = EngineBody(InstanceId(4), ModelConfig(model=str(folder)), SMALL, backend=backend)
    yield made
    made.check()
    made.close()


def test_the_account_is_of_the_memory_there_is(body: EngineBody) -> None:
    account, spec = body.account, body.spec
    assert spec.instance_id == 4
    assert account.memory_bytes == SMALL.memory_bytes
    assert account.weights_bytes + account.kv_bytes <= account.memory_bytes
    assert account.kv_blocks * 3 <= account.kv_units == spec.kv_units
    assert account.longest_request_tokens == min(512, account.kv_blocks * 16)
    assert "longest request 512 tokens" in str(account)


def test_a_start_tells_of_kv_that_lies_outside_of_windows(tmp_path: Path) -> None:
    """And has memory for both tables of rotary positions."""
    model = ModelConfig(model=str(save_tiny(tmp_path, "gemma3", 3)), max_model_len=200)
    limits = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48)
    backend = WatchedBackend()
    body = EngineBody(InstanceId(0), model, SMALL, scheduler=limits, backend=backend)
    try:
        # Two of three layers see 24 of 512 tokens.
        assert body.account.unseen_share == pytest.approx(2 / 3 * (1 - 24 / 512))
        assert "512 tokens, 64% of its KV outside the windows of layers" in str(body.account)
        widths, head, rope = 2 * 64 + 256 + 128 + 96, 160 * 4 + 64 * 2, 2 * 200 * 32 * 4
        assert body.account.buffer_bytes == 48 * widths * 2 + LOGIT_ROWS * head + rope
        assert backend.made.buffer_bytes == body.account.buffer_bytes
    finally:
        body.close()


def test_or_of_how_many_more_requests_fit_because_it_does_not(tmp_path: Path) -> None:
    model = ModelConfig(model=str(save_tiny(tmp_path, "gemma3", 4)), max_model_len=400)
    ring = ring_of(24, 2, 16, 48)
    body = EngineBody(InstanceId(0), model, SMALL, ring=ring)
    try:
        assert ring == body.spec.kv_ring == KvRing(6, 2)
        told = (
            "longest request 512 tokens in 19 blocks, whole they would be 32, so 1.7 times as many"
        )
        assert told in str(body.account)
        assert body.spec.blocks.tokens_in(body.account.kv_blocks) > 512
    finally:
        body.close()


def test_the_largest_step_takes_no_memory_that_was_not_reserved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(model=str(folder), max_model_len=200)
    limits = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48)
    reserved: list[int] = []
    reserve = Ends.reserve

    def watched(ends: Ends, num_sampled: int) -> None:
        reserved.append(num_sampled)
        reserve(ends, num_sampled)

    monkeypatch.setattr(Ends, "reserve", watched)
    backend = WatchedBackend()
    body = EngineBody(InstanceId(0), model, SMALL, scheduler=limits, backend=backend)
    try:
        buffers, decoder = body.account.buffer_bytes, backend.made
        logits_at = decoder.room_for_logits(1, 1).data_ptr()
        widths, head, rope = 2 * 64 + 256 + 128 + 96, 160 * 4 + 64 * 2, 200 * 32 * 4
        assert buffers == 48 * widths * 2 + LOGIT_ROWS * head + rope == decoder.buffer_bytes
        mib = f"{buffers / (1 << 20):.1f}"
        assert f"beside it {mib} MiB for steps" in str(body.account)
        assert body.account.process_bytes > SMALL.memory_bytes + buffers
        engine = DirectEngine([(body, LayerRange(0, 3))])
        engine.generate([[7] * 100, [9] * 150, [3] * 150], 50, chunk_size=16)
        assert decoder.buffer_bytes == buffers
        assert decoder.room_for_logits(1, 1).data_ptr() == logits_at
        assert reserved == [LOGIT_ROWS]
    finally:
        body.close()


def test_memory_for_steps_is_asked_for_with_the_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1000, max_num_batched_tokens=1000)
    monkeypatch.setattr(pages, "available_bytes", lambda: SMALL.memory_bytes + 1000 * 160 * 4)
    with pytest.raises(TooLittleMemory, match=r"4194304 bytes of memory and \d{7} for its steps"):
        EngineBody(InstanceId(0), ModelConfig(model=str(folder)), SMALL, scheduler=scheduler)


def test_a_length_that_cannot_fit_is_refused(folder: Path) -> None:
    tight = InstanceConfig(kv_cache_memory_bytes=100_000, granule_bytes=8192)
    model = ModelConfig(model=str(folder), max_model_len=500)
    before = arenas_mapped()
    with pytest.raises(
        TooLittleMemory, match=r"500 tokens.*longest request that would fit has \d+"
    ):
        EngineBody(InstanceId(0), model, tight)
    assert arenas_mapped() == before


def test_a_shape_that_no_kernel_runs_is_refused_before_anything_is_loaded(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"head_dim": 80}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(CpuBackend, "open_memory", None)
    model = ModelConfig(model=str(tmp_path), load_format="dummy")
    with pytest.raises(ConfigError, match="head_dim 80.*not a multiple of 32"):
        EngineBody(InstanceId(0), model, SMALL)


def test_batches_are_flattened_in_plan_order() -> None:
    chunks = (
        Chunk(RequestId("a"), 5, 1, True),
        Chunk(RequestId("b"), 0, 3, False),
        Chunk(RequestId("c"), 2, 2, True),
    )
    work = StepWork(
        plan=StepPlan(GroupId(0), StepId(0), (), (), chunks),
        layers=LayerRange(0, 1),
        is_first=True,
        is_last=True,
        token_ids=np.arange(6, dtype=np.int32),
        tables=np.zeros((9, 2), dtype=np.int32),
        rows=np.array([7, 1, 4], dtype=np.int32),
    )
    batch = build_batch(work)
    assert batch.positions.tolist() == [5, 0, 1, 2, 2, 3]
    assert batch.q_starts.tolist() == [0, 1, 4, 6]
    assert batch.context_lens.tolist() == [6, 3, 4]
    assert batch.sample_rows.tolist() == [0, 5]
    batch.check()


def test_a_decode_with_guesses_is_several_decodes_or_reads_kv_once() -> None:
    chunks = (
        Chunk(RequestId("a"), 5, 3, 3),
        Chunk(RequestId("b"), 9, 1, 1),
        Chunk(RequestId("c"), 2, 2, 0),
    )
    plan = StepPlan(GroupId(0), StepId(0), (), (), chunks)
    work = StepWork(
        plan=plan,
        layers=LayerRange(0, 1),
        is_first=True,
        is_last=True,
        token_ids=np.arange(6, dtype=np.int32),
        tables=np.zeros((9, 2), dtype=np.int32),
        rows=np.array([7, 1, 4], dtype=np.int32),
    )
    batch = build_batch(work)
    assert batch.positions.tolist() == [5, 6, 7, 9, 2, 3]
    alike = build_batch(work, rows_are_alike=True)
    assert alike.positions.tolist() == batch.positions.tolist()
    assert alike.sample_rows.tolist() == batch.sample_rows.tolist()
    assert alike.rows.tolist() == [7, 1, 4]
    assert alike.q_starts.tolist() == [0, 3, 4, 6]
    assert alike.context_lens.tolist() == [8, 10, 4]
    alike.check()
    assert batch.rows.tolist() == [7, 7, 7, 1, 4]
    assert batch.q_starts.tolist() == [0, 1, 2, 3, 4, 6]
    assert batch.context_lens.tolist() == [6, 7, 8, 10, 4]
    assert batch.sample_rows.tolist() == [0, 1, 2, 3]
    assert [row.num_before for row in plan.sampled_rows] == [6, 7, 8, 10]
    batch.check()


def test_activations_cross_the_wire_unchanged(body: EngineBody) -> None:
    hidden = torch.randn(5, 64).bfloat16()
    data = body.hidden_to_bytes(hidden)
    assert data.nbytes == 5 * 64 * 2
    writable = bytearray(data)
    received = tensor_of(body.hidden_from_bytes(writable), torch.bfloat16)
    assert torch.equal(received, hidden)
    received[0, 0] = 1.0
    assert bytes(writable) != bytes(data), "writable memory is used as it is"
    frozen = bytes(data)
    copied = body.hidden_from_bytes(frozen)
    tensor_of(copied, torch.bfloat16).zero_()
    assert frozen == bytes(data), "read-only memory is copied"


def test_units_are_copied_in_order(body: EngineBody) -> None:
    for unit in range(6):
        body.memory.unit_view(unit, 1)[:] = unit
    body.memory.copy_units((UnitCopy(0, 2, 2), UnitCopy(3, 5, 1)))
    assert [int(body.memory.unit_view(unit, 1)[0]) for unit in range(6)] == [0, 1, 0, 1, 4, 1]
    with pytest.raises(AssertionError):
        body.memory.unit_view(body.memory.backed_units, 1)


def test_logprobs_are_reported_and_state_forgotten(
    body: EngineBody, backend: WatchedBackend
) -> None:
    engine = DirectEngine([(body, LayerRange(0, 3))])
    params = SamplingParams(50, temperature=0.0, num_logprobs=3)
    engine.generate([[7, 8, 9]], 4, sampling=params)
    for token in engine.last[0].sampled:
        assert token.logprobs is not None and token.logprobs.rank == 1
        assert token.logprobs.top[0] == (token.token_id, token.logprobs.logprob)
        assert len(token.logprobs.top) == 3
    body.forget(RequestId("never seen"))
    gone = engine.last[0].request_id
    with pytest.raises(KeyError):
        body.execute(work_at([0], 8, LayerRange(0, 3), gone, samples=True), None)
    (token,) = backend.chooser.sample(torch.zeros(1, 160), [gone], [0])
    assert token.token_id is None, "nobody is known by that name"


def test_the_body_cannot_compute_what_it_does_not_hold(body: EngineBody) -> None:
    body.memory.drop(LayerRange(0, 2))
    with pytest.raises(AssertionError):
        body.load_layers(LayerRange(2, 3))
    with pytest.raises(AssertionError):
        body.memory.layer_view(2)


def work_at(
    entries: list[int],
    context: int,
    layers: LayerRange,
    request_id: RequestId = A,
    *,
    samples: bool = False,
) -> StepWork:
    """The last token of one sequence in blocks of 16."""
    chunk = Chunk(request_id, context - 1, 1, samples)
    return StepWork(
        plan=StepPlan(GroupId(0), StepId(0), (), (), (chunk,)),
        layers=layers,
        is_first=True,
        is_last=samples,
        token_ids=np.array([5], dtype=np.int32),
        tables=np.array([entries], dtype=np.int32),
        rows=np.zeros(1, dtype=np.int32),
    )


def test_no_step_is_given_an_address_that_nothing_is_mapped_at(body: EngineBody) -> None:
    whole = LayerRange(0, 3)
    last = body.memory.backed_units - 3
    body.execute(work_at([0, last, 9999], 32, whole), None)  # the third block is not in use
    for entries in ([0, last + 1], [-1, 0]):
        with pytest.raises(AssertionError):
            body.execute(work_at(entries, 32, whole), None)
    body.memory.drop(LayerRange(1, 3))
    body.execute(work_at([-1, last + 1], 32, LayerRange(1, 3)), None)
    with pytest.raises(AssertionError):
        body.execute(work_at([0, 3], 32, whole), None)


def test_arrays_that_lie_in_one_are_found_there() -> None:
    """As nearly every step's: positions, starts and lengths of decodes."""
    chunks = tuple(Chunk(RequestId(str(i)), 5 + i, 1, 1) for i in range(3))
    plan = StepPlan(GroupId(0), StepId(0), (), (), chunks)
    tables, rows = np.zeros((4, 2), dtype=np.int32), np.array([2, 0, 3], dtype=np.int32)
    tokens = np.arange(3, dtype=np.int32)
    batch = build_batch(StepWork(plan, LayerRange(0, 2), True, False, tokens, tables, rows))
    apart = replace(batch, flat=None)
    assert batch.flat is not None
    for name in ("positions", "q_starts", "context_lens", "tables", "rows"):
        assert getattr(batch.as_c(), name) == getattr(apart.as_c(), name), name
        assert getattr(batch.as_c(), name) == getattr(batch, name).ctypes.data, name
