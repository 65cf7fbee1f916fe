"""No operation of a GPU's steps mixes what lies on the device with what lies on the host.

The CPU would do it without a word, so nothing else here could tell.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_phases.machine import FAKE_GRANULARITY_BYTES, MIB, SHAPES
from benchmarks.gpu_phases.models import write_model
from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve.engine.attention import StepBatch
from kunserve.engine.body import EngineBody
from kunserve.engine.memory.wrap import wrap
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.decoder import TorchDecoder
from tests.direct_engine import GREEDY, DirectEngine, prepare_all
from tests.fakecuda.first_bytes import LaunchedOps
from tests.fakecuda.launches import Launches
from tests.fakecuda.library import FakeCuda, build
from tests.strict_device import DEVICE, Mixed, StrictDevice, lies_on_device
from tests.tape import TapeRecorder

SPEC = SHAPES["tiny"]
WHOLE = LayerRange(0, SPEC.num_layers)
MAX_MODEL_LEN = 64
"""Attention of a recorded step is over all positions that there may be."""
SAMPLING = (
    GREEDY,
    SamplingParams(max_tokens=9, temperature=0.9, seed=1),
    SamplingParams(max_tokens=9, temperature=0.7, top_p=0.8, top_k=20, seed=2),
    SamplingParams(max_tokens=9, temperature=0.7, top_k=20, repetition_penalty=1.05, seed=3),
    SamplingParams(max_tokens=9, temperature=0.0, num_logprobs=3),
    SamplingParams(max_tokens=9, temperature=0.8, min_p=0.1, seed=4),
    SamplingParams(9, presence_penalty=0.5, logit_bias=((5, 2.0),), min_tokens=3, seed=5),
    SamplingParams(
        9,
        0.9,
        0.9,
        seed=6,
        allowed_token_ids=TokenIds(range(40)),
        bad_words=((7,),),
        num_logprobs=1,
    ),
)


def open_body(
    folder: Path,
    number: int,
    device: torch.device,
    is_eager: bool,
    spec: ModelSpec = SPEC,
    dtype: str = "float32",
) -> EngineBody:
    return EngineBody(
        InstanceId(number),
        ModelConfig(
            model=str(folder), load_format="dummy", dtype=dtype, max_model_len=MAX_MODEL_LEN
        ),
        InstanceConfig(
            memory_bytes=spec.weights_bytes * 2 + spec.num_layers * MIB // 4,
            block_size=8,
            granule_bytes=FAKE_GRANULARITY_BYTES,
            enforce_eager=is_eager,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=8),
        backend=CudaBackend(device, build(), TapeRecorder()),
    )


def tokens(
    folder: Path, device: torch.device, is_eager: bool, spec: ModelSpec = SPEC
) -> list[list[list[int]]]:
    """Of all kinds of sampling: alone, through two stages after a drop, and after the restore."""
    generator = np.random.default_rng(0)
    prompts = [
        generator.integers(3, SPEC.vocab_size, n).tolist() for n in (5, 17, 30, 3, 9, 12, 6, 8)
    ]
    found = []
    with ExitStack() as stack:
        pair = [
            stack.enter_context(closing(open_body(folder, n, device, is_eager, spec)))
            for n in range(2)
        ]
        found.append(DirectEngine([(pair[0], WHOLE)]).generate(prompts, 8, 32, SAMPLING))
        stages = (LayerRange(0, 2), LayerRange(2, 4))
        for body, keep in zip(pair, stages, strict=True):
            assert prepare_all(body.memory, keep) is None
            body.memory.drop(keep)
        halves = DirectEngine(list(zip(pair, stages, strict=True)))
        found.append(halves.generate(prompts, 8, 32, SAMPLING))
        for body, missing in zip(pair, reversed(stages), strict=True):
            body.memory.reclaim(missing)
            body.load_layers(missing)
        found.append(DirectEngine([(pair[1], WHOLE)]).generate(prompts, 8, 32, SAMPLING))
    return found


@pytest.mark.parametrize("shape", ["tiny", "tiny-sparse"])
@pytest.mark.parametrize("is_eager", [False, True])
def test_steps_of_a_device_mix_nothing(tmp_path: Path, is_eager: bool, shape: str) -> None:
    FakeCuda(FAKE_GRANULARITY_BYTES, 64 * MIB)
    spec = SHAPES[shape]
    folder = write_model(spec, tmp_path / "model")
    expected = tokens(folder, torch.device("cpu"), is_eager, spec)
    with StrictDevice() as strict:
        found = tokens(folder, DEVICE, is_eager, spec)
    assert found == expected and strict.num_checked > 1000
    assert found[0] == found[1] == found[2]


def test_no_kernel_is_launched_with_a_pointer_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after drops, whatever layers are held: the launcher asks for first bytes."""
    fake = FakeCuda(FAKE_GRANULARITY_BYTES, 64 * MIB)
    folder = write_model(SPEC, tmp_path / "model")
    launched = LaunchedOps(SPEC, fake)
    monkeypatch.setattr(CudaBackend, "open_ops", lambda *_: launched)
    expected = tokens(folder, torch.device("cpu"), is_eager=True)
    assert expected[0] == expected[1] == expected[2] and launched.num_asked > 1000
    refused = pytest.raises(AssertionError, match="gate_mul: pointer 0.*cannot be accessed")
    with unmapped() as below, refused:
        launched.gate_mul(below[0], torch.zeros(1, 4))
    assert fake.left() == {}


@contextmanager
def unmapped() -> Iterator[torch.Tensor]:
    """A tensor that begins where nothing is mapped, as units below unit 0 would without a guard."""
    driver, num_bytes = Driver(library=build()), 2 * FAKE_GRANULARITY_BYTES
    address = driver.reserve(num_bytes, FAKE_GRANULARITY_BYTES)
    yield wrap(address, num_bytes, torch.device("cpu"))[:8].view(1, 1, 8)
    driver.unreserve(address, num_bytes)


def test_what_torch_on_a_device_refuses_is_refused() -> None:
    with StrictDevice():
        here, there = torch.zeros(3, device=DEVICE), torch.ones(3)
        assert here.device == DEVICE and there.device != DEVICE
        for mixes in (
            lambda: here + there,
            lambda: torch.mm(here[None], there[:, None]),
            lambda: here.index_select(0, torch.tensor([0])),
            lambda: torch.add(there, there, out=here),
            here.numpy,
        ):
            with pytest.raises(Mixed):
                mixes()
        moved = there.to(DEVICE)
        for one in (here + moved, here.split([1, 2])[1], torch.tensor([1], device=here.device)):
            assert lies_on_device(one)
        for one in (here.cpu(), here.to("cpu", torch.float64), here.tolist(), there[:2]):
            assert not isinstance(one, torch.Tensor) or not lies_on_device(one)
        here.copy_(there)
        assert here.tolist() == [1.0, 1.0, 1.0] and float(here.sum() * 2) == 6.0


def launches_of_a_mixed_step(
    folder: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, *, is_eager: bool
) -> tuple[list[list[int]], int]:
    """Tokens of decodes with a chunk of a prompt beside them, and what a layer-run asks for."""
    with closing(open_body(folder, 0, torch.device("cpu"), is_eager, spec)) as body:
        decoder, counts = body._decoder, []
        assert isinstance(decoder, TorchDecoder)
        with monkeypatch.context() as patch:
            launches, forward = Launches(patch), decoder.forward

            def counted(batch: StepBatch, *given: Any) -> torch.Tensor:
                before = launches.num
                with launches:
                    hidden = forward(batch, *given)
                if 1 in np.diff(batch.q_starts) and batch.num_tokens > len(batch.rows):
                    counts.append(launches.num - before)
                return hidden

            patch.setattr(decoder, "forward", counted)
            prompts = [[5, 6, 7], [8] * 20, [9] * 15]
            whole = LayerRange(0, spec.num_layers)
            found = DirectEngine([(body, whole)]).generate(prompts, 4, 16)
    assert len(counts) > 1 and len(set(counts)) <= 2, counts
    return found, max(counts)


def test_a_recorded_mixed_step_is_asked_for_in_a_few_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are the same. With the 48 layers of 14B it is 11 launches instead of 529."""
    FakeCuda(FAKE_GRANULARITY_BYTES, 256 * MIB)
    spec = replace(SPEC, num_layers=16)
    folder = write_model(spec, tmp_path / "model")
    eager, before = launches_of_a_mixed_step(folder, spec, monkeypatch, is_eager=True)
    recorded, after = launches_of_a_mixed_step(folder, spec, monkeypatch, is_eager=False)
    assert recorded == eager
    assert 11 * 16 <= before < 12 * 16 and after <= 7


def test_steps_with_experts_are_recorded_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of experts: a layer's MLP is six kernels in place of three, recorded or not.

    An expert after the other, Qwen3-30B-A3B's 128 would be a thousand.
    """
    FakeCuda(FAKE_GRANULARITY_BYTES, 256 * MIB)
    spec = replace(SHAPES["tiny-sparse"], num_layers=8)
    folder = write_model(spec, tmp_path / "model")
    eager, before = launches_of_a_mixed_step(folder, spec, monkeypatch, is_eager=True)
    recorded, after = launches_of_a_mixed_step(folder, spec, monkeypatch, is_eager=False)
    assert recorded == eager
    assert 14 * 8 <= before < 15 * 8 and after <= 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_of_a_whole_model_is_one_copy_and_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """From its tokens to the largest logits, all that its sampler starts from."""
    FakeCuda(FAKE_GRANULARITY_BYTES, 256 * MIB)
    folder = write_model(SPEC, tmp_path / "model")
    eager, none, by_layers = decodes(folder, monkeypatch, dtype, is_eager=True)
    found, counts, others = decodes(folder, monkeypatch, dtype, is_eager=False)
    assert found == eager
    assert none == [] and len(counts) >= 7 and set(counts) == {2}
    # The first prompt has three tokens, too.
    assert by_layers.count(3) > others.count(3) == 1


def decodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, *, is_eager: bool
) -> tuple[list[list[int]], list[int], list[int]]:
    """Tokens; launches of each whole step but for its sampler; tokens of the other steps."""
    counts: list[int] = []
    others: list[int] = []
    body = open_body(folder, 0, torch.device("cpu"), is_eager, dtype=dtype)
    with closing(body), monkeypatch.context() as patch:
        decoder, launches = body._decoder, Launches(patch)
        assert isinstance(decoder, TorchDecoder) and (decoder.recorded is None) is is_eager
        ask, forward = decoder.ask_whole, decoder.forward

        def counted(batch: StepBatch) -> Any:
            before = launches.num
            with launches:
                asked = ask(batch)
            if asked is not None:
                counts.append(launches.num - before)
            return asked

        def noted(batch: StepBatch, *given: Any) -> torch.Tensor:
            others.append(batch.num_tokens)
            return forward(batch, *given)

        patch.setattr(decoder, "ask_whole", counted)
        patch.setattr(decoder, "forward", noted)
        prompts = [[5, 6, 7], [8] * 20, [9] * 15]
        return DirectEngine([(body, WHOLE)]).generate(prompts, 8, 16), counts, others


def test_what_was_not_recorded_is_asked_for_layer_by_layer(tmp_path: Path) -> None:
    """Rows that give no token, a prompt, positions behind the tables, a stage."""
    FakeCuda(FAKE_GRANULARITY_BYTES, 64 * MIB)
    folder = write_model(SPEC, tmp_path / "model")
    with closing(open_body(folder, 0, torch.device("cpu"), False)) as body:
        decoder = body._decoder
        assert isinstance(decoder, TorchDecoder) and decoder.recorded is decoder
        batch = single(2, 5)
        assert decoder.ask_whole(batch) is not None
        assert decoder.ask_whole(replace(batch, sample_rows=batch.sample_rows[:1])) is None
        assert decoder.ask_whole(single(9, 5)) is None, "more rows than were recorded"
        far = len(decoder._angles[0])
        assert decoder.ask_whole(single(2, far)) is None
        decoder.set_layers(LayerRange(0, 2))
        assert decoder.ask_whole(batch) is None


def single(num: int, position: int) -> StepBatch:
    """Sequences of one token each, whose KV nobody needs."""
    rows = np.arange(num, dtype=np.int32)
    return StepBatch(
        token_ids=rows,
        positions=np.full(num, position, dtype=np.int32),
        tables=np.full((num, 999), -SPEC.num_layers, dtype=np.int32),
        rows=rows,
        q_starts=np.arange(num + 1, dtype=np.int32),
        context_lens=np.full(num, position + 1, dtype=np.int32),
        sample_rows=rows,
    )
