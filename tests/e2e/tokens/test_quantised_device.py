"""Weights that stay quantised in a device's memory: tokens through drops, exchanges and restores,
and what a drop frees. On a stand-in for the driver.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.model.packed import FP8_FORMATS, KEPT_ON_DEVICES
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.quantised import QuantisedMatrix
from tests.direct_engine import DirectEngine, prepare_all
from tests.fakecuda.library import KIB, FakeCuda, build
from tests.tape import TapeRecorder
from tests.tiny_gguf import write_gguf
from tests.tiny_models import VOCAB, expected_tokens, tiny_model
from tests.unit.engine.quantised_models import save_quantised

NUM_LAYERS = 4
NUM_TOKENS = 5
WHOLE = LayerRange(0, NUM_LAYERS)
HALVES = (LayerRange(0, 2), LayerRange(2, 4))
PROMPTS = [np.random.default_rng(length).integers(3, VOCAB, length).tolist() for length in (1, 19)]
SIZES = {"hidden_size": 128, "intermediate_size": 256}
"""Of which blocks of 128 are a part."""


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.left() == {}


def dequantised(model: torch.nn.Module, quant: Quant) -> None:
    """Give the model the weights that a file of such blocks stands for."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                raw = gguf.quants.quantize(parameter.numpy(), quant)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, quant)))


def save(folder: Path, how: str) -> tuple[Path, list[list[int]]]:
    """The model as files, and the tokens that transformers generates from its expanded weights."""
    model = tiny_model("llama", NUM_LAYERS, **SIZES)
    if how in ("q8_0", "q4_0"):
        quant = Quant[how.upper()]
        path = write_gguf(folder / "m.gguf", model, "llama", quant)
        dequantised(model, quant)
    else:
        path, model = folder, save_quantised(folder, model, how)
    return path, [expected_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def open_body(
    path: Path,
    number: int = 0,
    recorder: TapeRecorder | None = None,
    quantization: str = "auto",
) -> EngineBody:
    return EngineBody(
        InstanceId(number),
        ModelConfig(str(path), dtype="float32", max_model_len=64, quantization=quantization),  # type: ignore[arg-type]
        InstanceConfig(memory_bytes=8 << 20, granule_bytes=8 * KIB, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=24),
        backend=CudaBackend(torch.device("cpu"), build(), recorder),
    )


@pytest.mark.parametrize("how", ["fp8_block", "int4", "q8_0"])
def test_tokens_are_those_of_the_expanded_model_through_transitions(
    fake: FakeCuda, how: str, tmp_path: Path
) -> None:
    path, expected = save(tmp_path, how)
    recorder = TapeRecorder()
    with ExitStack() as stack:
        pair = [
            stack.enter_context(closing(open_body(path, number, recorder if number else None)))
            for number in range(2)
        ]
        assert recorder.num_recorded > 0
        recorder.is_closed = True
        plain_bytes = replace(pair[0].model, packed=None).layer_bytes
        assert pair[0].memory.layer_bytes == pair[0].spec.layer_bytes
        bits = 5.5 if how == "int4" else 8.8
        assert pair[0].memory.layer_bytes < plain_bytes * bits / 32
        before = []
        for body, keep in zip(pair, HALVES, strict=True):
            assert DirectEngine([(body, WHOLE)]).generate(PROMPTS, NUM_TOKENS) == expected
            for layer in range(NUM_LAYERS):
                data = np.empty(body.memory.layer_bytes, dtype=np.uint8)
                body.memory.read_layer(layer, 0, data)
                before.append(data)
            assert prepare_all(body.memory, keep) is None
            dropped = body.memory.drop(keep)
            # Two layers' quantised bytes become KV, but for a granule at the inner end.
            layers_bytes = 2 * body.memory.layer_bytes
            assert layers_bytes - 8 * KIB < dropped.moved_bytes <= layers_bytes + 8 * KIB
        stages = list(zip(pair, HALVES, strict=True))
        assert DirectEngine(stages).generate(PROMPTS, NUM_TOKENS, 5) == expected
        # One takes its missing layers from its peer, the other from the files.
        giver, taker = pair
        for body, missing in zip(pair, reversed(HALVES), strict=True):
            body.memory.reclaim(missing)
        for layer in range(*HALVES[0]):
            data = np.empty(giver.memory.layer_bytes, dtype=np.uint8)
            giver.memory.read_layer(layer, 0, data)
            taker.memory.write_layer(layer, 0, data)
        giver.load_layers(HALVES[1])
        for number, body in enumerate(pair):
            for layer in range(NUM_LAYERS):
                data = np.empty(body.memory.layer_bytes, dtype=np.uint8)
                body.memory.read_layer(layer, 0, data)
                assert (data == before[number * NUM_LAYERS + layer]).all()
            body.check()
            assert DirectEngine([(body, WHOLE)]).generate(PROMPTS, NUM_TOKENS, 5) == expected


def test_experts_are_expanded_and_the_rest_is_kept(fake: FakeCuda, tmp_path: Path) -> None:
    model = tiny_model("mixtral", 2)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", Quant.Q8_0)
    with closing(open_body(path)) as body, closing(open_body(path, 1, quantization="none")) as all_:
        (weights, *_) = body._backend.weights(body.memory, body.model).layers
        assert isinstance(weights.qkv, QuantisedMatrix)
        assert isinstance(weights.experts_down, torch.Tensor)
        one, other = (
            DirectEngine([(each, LayerRange(0, 2))]).generate(PROMPTS, 4) for each in (body, all_)
        )
        assert one == other


def test_what_a_device_cannot_keep_is_expanded_or_refused(tmp_path: Path) -> None:
    fake = FakeCuda()
    path, expected = save(tmp_path, "fp8_channel")
    fake.describe(capability=86)
    old = CudaBackend(torch.device("cpu"), build())
    assert old.kept.formats == KEPT_ON_DEVICES.formats - FP8_FORMATS
    refused = pytest.raises(ConfigError, match="they are FP8, and .* these are .*: Q8_0, Q4_0, INT")
    with refused:
        open_body(path, quantization="compressed-tensors")
    with closing(open_body(path)) as body:
        assert body.model.packed is None
        assert DirectEngine([(body, WHOLE)]).generate(PROMPTS, NUM_TOKENS) == expected
