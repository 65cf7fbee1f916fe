"""Quantised weights in packed panels: against the ``gguf`` package, plain numpy, and themselves."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ConfigError, UnsupportedModel
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.attention import StepBatch
from kunserve.engine.backend import CpuBackend
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.ends import Ends
from kunserve.engine.cpu.kernels.library import kernel, set_num_threads
from kunserve.engine.cpu.kernels.ops import Finish, gather, linear, rms_norm
from kunserve.engine.cpu.kernels.packed import PackedMatrix, rounded_bytes
from kunserve.engine.weights.packing import StoredRows, pack
from kunserve.model.packed import KEPT_ON_CPUS, PackedField, Run, WeightFormat
from tests.specs import model_spec
from tests.tiny_gguf import write_gguf
from tests.tiny_models import tiny_model
from tests.unit.engine.reference_attention import FedAlikeBackend

GGML = {
    WeightFormat.Q8_0: Quant.Q8_0,
    WeightFormat.Q4_0: Quant.Q4_0,
    WeightFormat.Q4_1: Quant.Q4_1,
    WeightFormat.Q4_K: Quant.Q4_K,
    WeightFormat.Q6_K: Quant.Q6_K,
}
FORMATS = sorted(KEPT_ON_CPUS.formats)
SCALES_AT = {
    Quant.Q8_0: (0,),
    Quant.Q4_0: (0,),
    Quant.Q4_1: (0, 2),
    Quant.Q4_K: (0, 2),
    Quant.Q6_K: (208,),
}


@pytest.fixture(autouse=True)
def one_thread():
    set_num_threads(1)
    yield
    set_num_threads(1)


def stored(kind: WeightFormat, rows: int, columns: int, seed: int = 0) -> StoredRows:
    """Any bytes, with scales that are ordinary numbers."""
    rng = np.random.default_rng(seed)
    if kind is WeightFormat.INT8:
        values = rng.integers(-127, 128, (rows, columns), dtype=np.int8)
        return StoredRows(values.view(np.uint8), rng.uniform(0.001, 0.01, rows).astype(np.float32))
    block, block_bytes = gguf.GGML_QUANT_SIZES[GGML[kind]]
    blocks = rng.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    for at in SCALES_AT[GGML[kind]]:
        size = 1e-4 if kind in (WeightFormat.Q4_K, WeightFormat.Q6_K) else 0.01
        scales = rng.normal(0, size, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    return StoredRows(blocks.reshape(rows, -1))


def values_of(kind: WeightFormat, rows: StoredRows) -> np.ndarray:
    """[rows, columns] float64."""
    if kind is WeightFormat.INT8:
        return rows.blocks.view(np.int8) * rows.scales[:, None].astype(np.float64)
    return gguf.quants.dequantize(rows.blocks, GGML[kind]).astype(np.float64)


def matrix(kind: WeightFormat, rows: StoredRows, columns: int, name: str = "o") -> PackedMatrix:
    field = PackedField(name, (Run(kind, len(rows.blocks)),), columns)
    return PackedMatrix(torch.from_numpy(pack(field, [rows])), field)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_steps(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """``x`` as multiples, not whole ones, of a step of each of its 32 columns; and the steps."""
    blocks = x.float().numpy().reshape(len(x), -1, 32)
    most = np.abs(blocks).max(axis=2, keepdims=True)
    by = np.divide(np.float32(127), most, where=most > 0, out=np.zeros_like(most))
    return blocks.astype(np.float64) * by, (most / np.float32(127)).astype(np.float64)


def rounded(x: torch.Tensor) -> np.ndarray:
    """What 8 bits for each 32 columns leave of ``x``, in float64."""
    multiples, steps = in_steps(x)
    return (np.rint(multiples) * steps).reshape(x.shape)


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """None lies half-way between two steps, where processors without fused products round once
    more, and so the other way.
    """
    x = random(*shape, dtype=dtype)
    multiples, _ = in_steps(x)
    is_between = np.abs(np.abs(multiples - np.rint(multiples)) - 0.5) < 1e-4
    x[torch.from_numpy(is_between.reshape(shape))] = 0
    return x


def close(actual: torch.Tensor, wanted: np.ndarray, relative: float) -> None:
    scale = max(1e-3, float(np.abs(wanted).max()))
    np.testing.assert_allclose(
        actual.double().numpy() / scale, wanted / scale, rtol=0, atol=relative
    )


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [16, 33])
def test_rows_are_what_the_gguf_package_reads(kind: WeightFormat, rows: int) -> None:
    raw = stored(kind, rows, 512)
    which = torch.tensor([rows - 1, 0, 7, 7, 15])
    found = gather(matrix(kind, raw, 512), which, torch.float32)
    wanted = values_of(kind, raw)[which.numpy()]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_rounded_rows(kind: WeightFormat, dtype: torch.dtype) -> None:
    """The only loss is the one that is meant: 8 bits of activations."""
    raw = stored(kind, 37, 256)
    x = random_rows(7, 256, dtype=dtype)
    product = rounded(x) @ values_of(kind, raw).T
    bias, past = random(37, dtype=dtype, seed=1), random(7, 37, dtype=dtype, seed=2)
    w = matrix(kind, raw, 256)
    precise = 1e-5 if dtype is torch.float32 else 1e-2
    close(linear(x, w, finish=Finish.FLOAT), product, 2e-6)
    close(linear(x, w, bias), product + bias.double().numpy(), precise)
    total = past.clone()
    linear(x, w, bias, total, Finish.RESIDUAL)
    close(total, past.double().numpy() + product + bias.double().numpy(), precise)
    # Rounding is worth its name: the plain product is near.
    exact = x.double().numpy() @ values_of(kind, raw).T
    close(linear(x, w, finish=Finish.FLOAT), exact, 0.03)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("inner", [8, 21])
def test_gate_and_up_share_panels(kind: WeightFormat, inner: int) -> None:
    gate, up = stored(kind, inner, 256), stored(kind, inner, 256, seed=1)
    field = PackedField("gate_up", (Run(kind, inner),), 256)
    w = PackedMatrix(torch.from_numpy(pack(field, [gate, up])), field)
    assert w.shape == (2 * inner, 256)
    x = random_rows(3, 256, dtype=torch.float32)
    bias = random(2 * inner, dtype=torch.float32, seed=1)
    both = [rounded(x) @ values_of(kind, raw).T for raw in (gate, up)]
    both = [part + bias.numpy()[i * inner : (i + 1) * inner] for i, part in enumerate(both)]
    wanted = both[0] / (1 + np.exp(-both[0])) * both[1]
    close(linear(x, w, bias, finish=Finish.SWIGLU), wanted, 1e-5)
    opened = torch.nn.functional.gelu(torch.from_numpy(both[0]), approximate="tanh").numpy()
    close(linear(x, w, bias, finish=Finish.GEGLU), opened * both[1], 1e-5)


def test_runs_of_several_formats() -> None:
    kinds, sizes = [WeightFormat.Q4_K, WeightFormat.Q8_0, WeightFormat.Q6_K], [64, 32, 32]
    raws = [
        stored(kind, size, 256, seed)
        for seed, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    ]
    field = PackedField("qkv", tuple(map(Run, kinds, sizes)), 256)
    w = PackedMatrix(torch.from_numpy(pack(field, raws)), field)
    x = random_rows(5, 256, dtype=torch.float32)
    wanted = np.concatenate([values_of(*pair) for pair in zip(kinds, raws, strict=True)])
    close(linear(x, w, finish=Finish.FLOAT), rounded(x) @ wanted.T, 2e-6)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_does_not_depend_on_its_batch(kind: WeightFormat) -> None:
    w = matrix(kind, stored(kind, 40, 512), 512)
    x = random(64, 512, dtype=torch.bfloat16)
    whole = linear(x, w, finish=Finish.FLOAT)
    for threads in (1, 3):
        set_num_threads(threads)
        for size in range(1, 65):
            first = 64 - size
            assert torch.equal(linear(x[first:], w, finish=Finish.FLOAT), whole[first:]), size


def test_a_row_does_not_depend_on_where_it_is_cut() -> None:
    """More rows than one block of the cache has."""
    columns = 2048
    w = matrix(WeightFormat.Q4_1, stored(WeightFormat.Q4_1, 16, columns), columns)
    x = random(300, columns, dtype=torch.bfloat16)
    whole = linear(x, w)
    for first, end in [(0, 300), (90, 97), (100, 290)]:
        assert torch.equal(linear(x[first:end], w), whole[first:end])


def test_a_part_of_the_head() -> None:
    raw = stored(WeightFormat.Q8_0, 83, 64)
    w, x = matrix(WeightFormat.Q8_0, raw, 64), random(2, 64, dtype=torch.float32)
    whole = linear(x, w)
    for first, end in [(0, 83), (16, 48), (64, 83), (32, 32)]:
        assert torch.equal(linear(x, w[first:end]), whole[:, first:end])


def test_a_packed_head_behind_the_layers_is_that_of_its_parts() -> None:
    dtype, spec = torch.bfloat16, model_spec(vocab_size=83, hidden_size=64)
    raw = stored(WeightFormat.Q8_0, 83, 64)
    head, norm = matrix(WeightFormat.Q8_0, raw, 64), random(64, dtype=dtype)
    hidden, embedding = random(5, 64, dtype=dtype), random(83, 64, dtype=dtype)
    ends = Ends(spec, embedding, norm, head)
    normed, rounding = (
        torch.empty_like(hidden),
        torch.empty(rounded_bytes(5, 64), dtype=torch.uint8),
    )
    for sampled in ([1, 4], [0, 1, 2, 3, 4]):
        logits = torch.empty(len(sampled), 83)
        room = normed.data_ptr(), rounding.data_ptr(), logits.data_ptr()
        rows = np.array(sampled, dtype=np.int32)
        made = ends.of_step(np.zeros(5, dtype=np.int32), rows, *room)
        kernel("kun_head", dtype)(hidden.data_ptr(), made)
        wanted = linear(rms_norm(hidden[sampled], norm, spec.rms_eps), head, finish=Finish.FLOAT)
        assert torch.equal(logits, wanted)
        assert ends.largest() == (wanted.amax(dim=1).tolist(), wanted.argmax(dim=1).tolist())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_not_finite_stays_in_its_row(kind: WeightFormat, bad: float) -> None:
    w = matrix(kind, stored(kind, 16, 256), 256)
    x = random(3, 256, dtype=torch.float32)
    whole = linear(x, w)
    x[1, 40] = bad
    spoilt = linear(x, w)
    assert not spoilt[1].isfinite().any()
    assert torch.equal(spoilt[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-32, 1e30])
def test_small_and_large_rows(size: float) -> None:
    raw = stored(WeightFormat.Q8_0, 16, 64)
    x = random(1, 64, dtype=torch.float32) * size
    found = linear(x, matrix(WeightFormat.Q8_0, raw, 64))
    wanted = x.double().numpy() @ values_of(WeightFormat.Q8_0, raw).T
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=max(1e-30, 0.2 * size))


# Whole models


def any_rows(kind: WeightFormat):
    """Writes a matrix as random blocks: the ``gguf`` package cannot quantise to every type."""

    def write(values: np.ndarray) -> np.ndarray:
        rows, columns = values.shape
        return stored(kind, rows, columns, seed=int(rows + columns)).blocks

    return write


def logits_of(
    path: Path, quantization: str, backend: CpuBackend | None = None
) -> tuple[np.ndarray, int]:
    """Of the last token of a prompt, and the bytes of the weights."""
    model = ModelConfig(model=str(path), dtype="float32", quantization=quantization)
    config = InstanceConfig(memory_bytes=24 << 20, granule_bytes=8192)
    body = EngineBody(InstanceId(0), model, config, backend=backend)
    try:
        tokens = np.array(PROMPT, dtype=np.int32)
        count = len(tokens)
        batch = StepBatch(
            token_ids=tokens,
            positions=np.arange(count, dtype=np.int32),
            tables=np.zeros((1, 1), dtype=np.int32),
            rows=np.zeros(1, dtype=np.int32),
            q_starts=np.array([0, count], dtype=np.int32),
            context_lens=np.array([count], dtype=np.int32),
            sample_rows=np.arange(count),
        )
        decoder = body._decoder
        logits = decoder.logits(batch, decoder.forward(batch, decoder.embed(batch)))
        return logits.numpy().copy(), body.account.weights_bytes
    finally:
        body.close()


PROMPT = [5, 9, 130, 77, 31, 8, 44, 45, 46]


def alike(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1])


@pytest.mark.parametrize("kind", list(GGML))
def test_a_kept_model_is_the_expanded_one_but_for_rounding(
    kind: WeightFormat, tmp_path: Path
) -> None:
    model = wide_model() if kind.block_columns == 256 else tiny_model("llama", 2)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", GGML[kind], any_rows(kind))
    plain, plain_bytes = logits_of(path, "none")
    kept, kept_bytes = logits_of(path, "auto")
    assert alike(plain, kept) > 0.99 and not np.array_equal(plain, kept)
    bits = 8.5 if kind is WeightFormat.Q8_0 else 6.7 if kind is WeightFormat.Q6_K else 5.0
    assert kept_bytes < plain_bytes * (bits / 32 + 0.02) + 2 * 8192
    reference, _ = logits_of(path, "gguf", FedAlikeBackend())
    assert np.array_equal(reference, kept)


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_1])
def test_quantised_experts_are_the_expanded_ones_but_for_rounding(
    quant: Quant, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("mixtral", 2), "llama", quant)
    plain, plain_bytes = logits_of(path, "none")
    kept, kept_bytes = logits_of(path, "auto")
    assert alike(plain, kept) > 0.98 and not np.array_equal(plain, kept)
    assert kept_bytes < plain_bytes * (0.32 if quant is Quant.Q8_0 else 0.22)
    reference, _ = logits_of(path, "gguf", FedAlikeBackend())
    assert np.array_equal(reference, kept)


def test_experts_whose_columns_are_no_blocks_are_expanded_alone(tmp_path: Path) -> None:
    """24 columns of each down; its rows are written as BF16, because Q8_0 has blocks of 32."""
    path = write_gguf(tmp_path / "m.gguf", tiny_model("qwen2_moe", 2), "qwen2moe", Quant.Q8_0)
    plain, plain_bytes = logits_of(path, "none")
    kept, kept_bytes = logits_of(path, "auto")
    assert alike(plain, kept) > 0.98 and 0.3 * plain_bytes < kept_bytes < 0.7 * plain_bytes
    reference, _ = logits_of(path, "gguf", FedAlikeBackend())
    assert np.array_equal(reference, kept)


def wide_model() -> transformers.PreTrainedModel:
    """Wide enough for blocks of 256."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).float().eval()


@pytest.mark.parametrize("in_words", [False, True])
def test_int8_by_channel_from_safetensors(in_words: bool, tmp_path: Path) -> None:
    """As compressed-tensors writes W8A8 (bytes) and W8A16 (words); the head stays as it is."""
    wide_model().save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if "_proj" in name]:
        values = tensors.pop(name).float()
        scales = values.abs().amax(1, keepdim=True) / 127
        whole = (values / scales).round().to(torch.int8)
        tensors[f"{name}_scale"] = scales.to(torch.bfloat16)
        if in_words:
            words = (whole.to(torch.int16) + 128).to(torch.uint8).view(torch.int32)
            tensors[f"{name}_packed"] = words
        else:
            tensors[name] = whole
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if in_words else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, plain_bytes = logits_of(tmp_path, "none")
    kept, kept_bytes = logits_of(tmp_path, "compressed-tensors")
    assert alike(plain, kept) > 0.99 and not np.array_equal(plain, kept)
    assert kept_bytes < 0.5 * plain_bytes
    weights["strategy"] = "group"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="strategy 'group'"):
        logits_of(tmp_path, "auto")


def test_a_quantisation_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama", 1), "llama", Quant.Q8_0)
    with pytest.raises(ConfigError, match="--quantization compressed-tensors, but .* are gguf"):
        logits_of(path, "compressed-tensors")
    wide_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--quantization gguf, but .* are not quantised"):
        logits_of(tmp_path, "gguf")


def test_projections_that_are_stored_as_one(tmp_path: Path) -> None:
    """Halves of gate and up part, and q, k and v are one run."""
    raw = stored(WeightFormat.Q4_1, 24, 64)
    field = PackedField("gate_up", (Run(WeightFormat.Q4_1, 12),), 64)
    halves = [StoredRows(raw.blocks[:12]), StoredRows(raw.blocks[12:])]
    assert (pack(field, [raw]) == pack(field, halves)).all()


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_layer_comes_back_from_the_file_with_the_same_bytes(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(kind, 3), "llama", Quant.Q4_1)
    config = InstanceConfig(memory_bytes=4 << 20, granule_bytes=4096)
    body = EngineBody(InstanceId(0), ModelConfig(model=str(path), quantization="auto"), config)
    assert body.model.packed is not None
    assert body.spec.layer_bytes == body.memory.layer_bytes < body.model.layer_params
    before = body.memory.layer_view(2).copy()
    units = body.spec.kv_units
    assert body.memory.drop(LayerRange(0, 1)).kv_units > units
    body.memory.reclaim(LayerRange(1, 3))
    body.memory.layer_view(2)[:] = 0
    body.load_layers(LayerRange(1, 3))
    assert (body.memory.layer_view(2) == before).all()
    body.check()
    body.close()


def test_what_the_kernels_do_not_know_is_expanded(tmp_path: Path) -> None:
    """Q5_1 has no format of its own."""
    path = write_gguf(tmp_path / "a.gguf", tiny_model("llama", 1), "llama", Quant.Q5_1)
    plain, plain_bytes = logits_of(path, "none")
    kept, kept_bytes = logits_of(path, "auto")
    assert np.array_equal(plain, kept) and plain_bytes == kept_bytes
