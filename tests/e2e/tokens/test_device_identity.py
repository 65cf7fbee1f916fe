"""The body of a GPU on a stand-in for its driver: greedy tokens in float32 are those of
transformers, with steps recorded or not, and with layers and KV as bytes.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers

from kunserve.control.instance.body import HostCopy, StepOutcome, StepWork
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.errors import ConfigError
from kunserve.core.faults import StepVoid
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.decoder import StepDecoder
from kunserve.engine.cpu.kernels.panels import PanelMatrix, in_panels
from kunserve.engine.layer_weights import ModelWeights
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.memory import Memory
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.decoder import TorchDecoder
from kunserve_extras.torch_body.graphs import GraphCounts
from kunserve_extras.torch_body.hops import reads
from kunserve_extras.torch_body.hops.far import FarHops
from kunserve_extras.torch_body.hops.hops import Hops
from tests.conftest import wait_until as eventually
from tests.direct_engine import DirectEngine, prepare_all
from tests.fakecuda.library import KIB, FakeCuda, build
from tests.tape import TapeRecorder
from tests.tiny_models import KINDS, SPARSE_KINDS, VOCAB, expected_tokens, save_with_answers
from tests.unit.transport.addresses import fresh_address

NUM_LAYERS = 4
NUM_TOKENS = 8
WHOLE = LayerRange(0, NUM_LAYERS)
HALVES = (LayerRange(0, 2), LayerRange(2, 4))
PROMPTS = [
    np.random.default_rng(length).integers(3, VOCAB, length).tolist() for length in (1, 7, 40)
]


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.left() == {}


@pytest.fixture(scope="module", params=KINDS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_with_answers(folder, request.param, PROMPTS, NUM_TOKENS)


def open_body(
    folder: Path,
    number: int = 0,
    recorder: TapeRecorder | None = None,
    *,
    eager: bool = False,
    backend: CudaBackend | None = None,
) -> EngineBody:
    return EngineBody(
        InstanceId(number),
        # Attention of a recorded step is over all positions that there may be.
        ModelConfig(model=str(folder), dtype="float32", max_model_len=64),
        InstanceConfig(
            memory_bytes=4 << 20, granule_bytes=8 * KIB, block_size=8, enforce_eager=eager
        ),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48),
        backend=backend or CudaBackend(torch.device("cpu"), build(), recorder),
    )


class CountedBackend(CudaBackend):
    """Tells what was recorded of steps."""

    made: StepDecoder

    def decoder(
        self, spec: ModelSpec, weights: ModelWeights, memory: Memory, config: InstanceConfig
    ) -> StepDecoder:
        self.made = super().decoder(spec, weights, memory, config)
        return self.made

    @property
    def counts(self) -> GraphCounts:
        assert isinstance(self.made, TorchDecoder) and self.made.graph_counts is not None
        return self.made.graph_counts


@pytest.mark.parametrize("saved", ["mistral", "qwen3", *SPARSE_KINDS], indirect=True)
def test_recorded_steps_outlive_transitions(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]]
) -> None:
    """What was recorded at the start serves every stage that layers are ever parted into."""
    folder, expected = saved
    draw = random.Random(7)
    recorder = TapeRecorder()
    with ExitStack() as stack:
        backends = [CountedBackend(torch.device("cpu"), build(), recorder) for _ in range(2)]
        pair = [
            stack.enter_context(closing(open_body(folder, number, backend=backend)))
            for number, backend in enumerate(backends)
        ]
        recorder.is_closed = True
        recorded = [backend.counts.recorded for backend in backends]
        assert sum(recorded) == recorder.num_recorded > 0
        for chunk_size in (48, 5):
            cut = draw.randrange(1, NUM_LAYERS)
            stages = (LayerRange(0, cut), LayerRange(cut, NUM_LAYERS))
            for body, keep in zip(pair, stages, strict=True):
                engine = DirectEngine([(body, WHOLE)])
                assert engine.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected
                assert draw.random() < 0.5 or prepare_all(body.memory, keep) is None
                body.memory.drop(keep)
            engine = DirectEngine(list(zip(pair, stages, strict=True)))
            assert engine.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected
            for body, missing in zip(pair, reversed(stages), strict=True):
                body.memory.reclaim(missing)
                body.load_layers(missing)
                body.check()
        for backend, count in zip(backends, recorded, strict=True):
            counts = backend.counts
            assert counts.recorded == count
            # Each run has as many steps of single tokens as tokens, but the first one's prompts,
            # which are small enough to be recorded, too.
            assert counts.steps > counts.mixed_steps > 0 == counts.eager_steps
            # Alone, but for each prompt's steps; as a stage of two never.
            alone = 2 * (NUM_TOKENS - 1)
            assert alone <= counts.whole_steps < counts.steps - counts.mixed_steps


class HoppingEngine(DirectEngine):
    """Each stage hears of a step before the one before it has ended it, as in ``DeviceLoop``."""

    num_ahead = num_tickets = 0

    def __init__(self, stages: Sequence[tuple[EngineBody, LayerRange]], addresses: list[str]):
        super().__init__(stages)
        self.addresses = addresses

    def _run_stage(self, index: int, work: StepWork, hidden: memoryview | None) -> StepOutcome:
        body, _ = self.stages[index]
        landed = None if hidden is None else body.hidden_from_bytes(bytearray(hidden))
        asked = body.launch(work, landed)
        to = "" if work.is_last else self.addresses[index + 1]
        passed = body.write_ahead(asked, to)
        if not body.await_input(asked):
            passed = None
        outcome = body.collect(asked)
        if work.is_last:
            assert passed is None
            return outcome
        self.num_ahead += passed is not None
        given = passed or body.hidden_to_bytes(outcome.hidden, to)
        self.num_tickets += given.nbytes < outcome.hidden[0].nbytes
        return replace(outcome, hidden=given)


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_stages_hear_of_steps_that_are_not_computed(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]]
) -> None:
    folder, expected = saved
    cuts = (LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, NUM_LAYERS))
    addresses = [fresh_address() for _ in cuts]
    with ExitStack() as stack:
        backends = [CudaBackend(torch.device("cpu"), build()) for _ in cuts]
        bodies = [
            stack.enter_context(closing(open_body(folder, number, backend=backend)))
            for number, backend in enumerate(backends)
        ]
        for backend, address in zip(backends, addresses, strict=True):
            backend.open_hops(address)
            assert backend._hops is not None
            stack.callback(backend._hops.close)
        for body, keep in zip(bodies, cuts, strict=True):
            body.memory.drop(keep)
        engine = HoppingEngine(list(zip(bodies, cuts, strict=True)), addresses)
        assert engine.generate(PROMPTS, NUM_TOKENS, 5) == expected
        eventually(lambda: all(w.slots for one in backends[:2] for w in one._hops._ways.values()))
        engine.num_ahead = 0
        assert engine.generate(PROMPTS, NUM_TOKENS, 5) == expected
        assert engine.num_ahead == engine.step_id, "both stages, of this half of the steps"


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_a_void_step_leaves_nothing_behind(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stage before has died behind its ticket, and this one computes alone then."""
    folder, expected = saved
    monkeypatch.setattr(reads, "PATIENCE_S", 0.0)
    backends = [CudaBackend(torch.device("cpu"), build()) for _ in HALVES]
    addresses = [fresh_address() for _ in HALVES]
    with ExitStack() as stack:
        bodies = [
            stack.enter_context(closing(open_body(folder, number, backend=backend)))
            for number, backend in enumerate(backends)
        ]
        for backend, address in zip(backends, addresses, strict=True):
            backend.open_hops(address)
            assert isinstance(backend._hops, Hops)
            stack.callback(backend._hops.close)
        for body, keep in zip(bodies, HALVES, strict=True):
            body.memory.drop(keep)
        engine = HoppingEngine(list(zip(bodies, HALVES, strict=True)), addresses)
        assert engine.generate(PROMPTS, NUM_TOKENS, 5) == expected
        eventually(lambda: all(way.slots for way in backends[0]._hops._ways.values()))
        began = engine.step_id
        with monkeypatch.context() as dead:
            dead.setattr(Driver, "write_value", only_of_threads(Driver.write_value))
            with pytest.raises(StepVoid):
                engine.generate(PROMPTS, NUM_TOKENS, 5)
        last = bodies[1]
        for number in range(len(PROMPTS)):
            last.forget(RequestId(f"{began}-{number}"))
        last.memory.reclaim(HALVES[0])
        last.load_layers(HALVES[0])
        assert DirectEngine([(last, WHOLE)]).generate(PROMPTS, NUM_TOKENS) == expected


def only_of_threads(write: Any) -> Any:
    """Of the words that streams write: a sender's never come, but who gives them up writes too."""

    def write_one(driver: Driver, address: int, value: int, stream: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            write(driver, address, value, stream)

    return write_one


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_stages_on_other_hosts_are_given_hidden_states_through_pipes(
    fake: FakeCuda, saved: tuple[Path, list[list[int]]]
) -> None:
    folder, expected = saved
    addresses = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    with ExitStack() as stack:
        backends = [CudaBackend(torch.device("cpu"), build()) for _ in addresses]
        bodies = [
            stack.enter_context(closing(open_body(folder, number, backend=backend)))
            for number, backend in enumerate(backends)
        ]
        ends: list[FarHops] = []
        for backend in backends:
            backend.open_hops("tcp://127.0.0.1")
            assert isinstance(backend._hops, FarHops)
            ends.append(backend._hops)
            stack.callback(backend._hops.close)
        for body, keep in zip(bodies, HALVES, strict=True):
            body.memory.drop(keep)
        engine = HoppingEngine(list(zip(bodies, HALVES, strict=True)), addresses)
        assert engine.generate(PROMPTS, NUM_TOKENS, 5) == expected
        eventually(lambda: ends[0]._giving[addresses[1]].pipe)
        before, engine.num_tickets = engine.step_id, 0
        assert engine.generate(PROMPTS, NUM_TOKENS, 5) == expected
        assert engine.num_tickets == engine.step_id - before
        assert engine.num_ahead == 0


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_eager_steps_are_not_recorded(fake: FakeCuda, saved: tuple[Path, list[list[int]]]) -> None:
    folder, expected = saved
    recorder = TapeRecorder()
    with closing(open_body(folder, 0, recorder, eager=True)) as body:
        assert recorder.num_recorded == 0
        assert DirectEngine([(body, WHOLE)]).generate(PROMPTS, NUM_TOKENS) == expected


def test_layers_and_kv_pass_as_bytes(fake: FakeCuda, saved: tuple[Path, list[list[int]]]) -> None:
    """What a mover does: another instance's layers, units out and in; and what swapping does."""
    folder, expected = saved
    with closing(open_body(folder)) as giver, closing(open_body(folder, 1)) as taker:
        taker.memory.drop(HALVES[0])
        taker.memory.reclaim(HALVES[1])
        for layer in range(*HALVES[1]):
            data = np.empty(giver.memory.layer_bytes, dtype=np.uint8)
            giver.memory.read_layer(layer, 0, data)
            taker.memory.write_layer(layer, 0, data)
        engine = DirectEngine([(taker, WHOLE)])
        assert engine.generate(PROMPTS, NUM_TOKENS) == expected
        units = np.random.default_rng(0).integers(
            0, 255, 3 * taker.memory.unit_bytes, dtype=np.uint8
        )
        taker.memory.write_units([(5, 2), (1, 1)], units)
        back = np.empty_like(units)
        taker.memory.read_units([(5, 2), (1, 1)], back)
        assert (back == units).all()
        copy = HostCopy(RequestId("r"), 0, np.array([5], dtype=np.int32), 2)
        taker.swap_units((copy,), (), beside_step=False)
        taker.memory.write_units([(5, 2)], np.zeros_like(units[: 2 * taker.memory.unit_bytes]))
        taker.swap_units((), (copy._replace(starts=copy.starts + 3),), beside_step=False)
        taker.memory.read_units([(8, 2), (1, 1)], back)
        assert (back == units).all(), "out to host memory, and back to another place"


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_weights_come_a_tensor_at_a_time_or_not_at_all(
    fake: FakeCuda,
    saved: tuple[Path, list[list[int]]],
    load_format: Literal["safetensors", "dummy"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random ones are made where they lie, with the values that they have on a CPU."""
    folder, _ = saved
    model = ModelConfig(model=str(folder), dtype="float32", load_format=load_format)
    staged: list[int] = []
    put = InstanceMemory.put_weights

    def put_and_tell(memory: InstanceMemory, offset: int, data: np.ndarray) -> None:
        staged.append(data.nbytes)
        put(memory, offset, data)

    monkeypatch.setattr(InstanceMemory, "put_weights", put_and_tell)
    sizes = InstanceConfig(memory_bytes=4 << 20, granule_bytes=8 * KIB, block_size=8)
    backend = CudaBackend(torch.device("cpu"), build())
    device = EngineBody(InstanceId(0), model, sizes, backend=backend)
    host = EngineBody(InstanceId(1), model, sizes)
    bodies = (device, host)
    with closing(device), closing(host):
        layout = device.memory.layout
        tensors = {**layout.ends.slots, **layout.layer(0).slots}.values()
        largest = max(int(np.prod(slot.shape)) * device.model.dtype_bytes for slot in tensors)
        assert max(staged, default=0) == (0 if load_format == "dummy" else largest)
        there, here = (body._backend.weights(body.memory, body.model) for body in bodies)
        for layer in range(NUM_LAYERS):
            for name in layout.layer(layer).slots:
                on_host = getattr(here.layers[layer], name)
                on_device = getattr(there.layers[layer], name)
                if isinstance(on_host, PanelMatrix):  # only host memory has panels
                    on_device = in_panels(on_device, is_paired=on_host.is_paired).data
                    on_host = on_host.data
                assert torch.equal(on_device, on_host)


@pytest.mark.gpu
def test_so_it_is_on_a_real_device(tmp_path: Path) -> None:
    """Layers of several granules, and the kernels instead of plain torch."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path)
    expected = [expected_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    with ExitStack() as stack:
        pair = [
            EngineBody(
                InstanceId(number),
                ModelConfig(model=str(tmp_path), dtype="float32"),
                InstanceConfig(memory_bytes=256 << 20, block_size=16),
                backend=CudaBackend(torch.device("cuda", 0)),
            )
            for number in range(2)
        ]
        for body in pair:
            stack.enter_context(closing(body))
        for _ in range(3):
            for body, keep in zip(pair, HALVES, strict=True):
                assert DirectEngine([(body, WHOLE)]).generate(PROMPTS, NUM_TOKENS) == expected
                assert prepare_all(body.memory, keep) is None
                assert body.memory.drop(keep).moved_bytes > 0
            engine = DirectEngine(list(zip(pair, HALVES, strict=True)))
            assert engine.generate(PROMPTS, NUM_TOKENS, 16) == expected
            for body, missing in zip(pair, reversed(HALVES), strict=True):
                assert prepare_all(body.memory, WHOLE) is None
                body.memory.reclaim(missing)
                body.load_layers(missing)
                body.check()


def test_no_driver_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no device cuda:3"):
        CudaBackend(torch.device("cuda", 3), build())
    with pytest.raises(ConfigError, match="no device cpu.*libnothing"):
        CudaBackend(torch.device("cpu"), str(tmp_path / "libnothing.so"))
