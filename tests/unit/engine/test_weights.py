import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors import safe_open
from safetensors.torch import save_file

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.weights.pieces import Piece
from kunserve.engine.weights.quants import dequantise, row_bytes
from kunserve.engine.weights.readers import DummyReader, GgufReader
from kunserve.model.config import read_spec
from kunserve.model.rope import Llama3Rope
from kunserve.model.source import ModelSource
from tests.direct_engine import DirectEngine, arenas_mapped
from tests.tiny_gguf import write_gguf
from tests.tiny_models import GEMMAS, SPARSE_KINDS, expected_tokens, save_tiny, tiny_model

SMALL = InstanceConfig(memory_bytes=4 << 20, granule_bytes=8192)
PROMPT = [5, 9, 130, 77, 31, 8]


def load(path: Path, **options: object) -> EngineBody:
    model = ModelConfig(model=str(path), **{"dtype": "float32", **options})  # type: ignore[arg-type]
    return EngineBody(InstanceId(0), model, SMALL)


def generate(path: Path, num: int = 8, prompt: list[int] = PROMPT) -> list[int]:
    body = load(path)
    try:
        layers = LayerRange(0, body.model.num_layers)
        return DirectEngine([(body, layers)]).generate([prompt], num)[0]
    finally:
        body.close()


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("llama", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("linear", "llama"),
        ("yarn", "qwen3"),
        ("granite", "granite"),
        ("phi3", "phi3"),
        ("ernie4_5", "ernie4_5"),
        ("mixtral", "llama"),
        ("olmoe", "olmoe"),
        ("qwen2_moe", "qwen2moe"),
        ("qwen3_moe", "qwen3moe"),
    ],
)
def test_gguf_gives_the_same_tokens(kind: str, architecture: str, tmp_path: Path) -> None:
    model = tiny_model(kind, 2)
    path = write_gguf(tmp_path / "model.gguf", model, architecture)
    assert generate(path) == expected_tokens(model, PROMPT, 8)


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_experts_stacked_in_one_tensor_and_one_by_one(kind: str, tmp_path: Path) -> None:
    bodies = [
        load(save_tiny(tmp_path / str(is_apart), kind, 2, save_original_format=is_apart))
        for is_apart in (False, True)
    ]
    names = [set(safe_open(path, "pt").keys()) for path in sorted(tmp_path.glob("*/*.safetensors"))]
    assert names[0].isdisjoint(name for name in names[1] if ".experts." in name)
    for layer in range(2):
        stacked, apart = (body.memory.layer_view(layer) for body in bodies)
        assert (stacked == apart).all()
    for body in bodies:
        body.close()


def test_experts_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mixtral", 2)
    config = tmp_path / "config.json"
    original = json.loads(config.read_text())
    config.write_text(json.dumps({**original, "num_local_experts": 6}))
    fails(tmp_path, r"'model\.layers\.0\.block_sparse_moe\.gate\.weight' has shape \(5, 64\)")
    config.write_text(json.dumps({**original, "intermediate_size": 64}))
    fails(
        tmp_path, r"experts\.0\.w1\.weight' has shape \(96, 64\), config\.json implies \(64, 64\)"
    )
    path = write_gguf(tmp_path / "model.gguf", tiny_model("olmoe", 2), "olmoe")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    fails(path, r"truncated inside tensor 'blk\.1\.ffn_down_exps\.weight'")
    path.write_bytes(whole.replace(b"blk.1.ffn_up_exps", b"blk.1.ffn_xx_exps"))
    fails(path, r"tensor 'blk\.1\.ffn_up_exps\.weight' is missing")


def test_gguf_of_layers_that_know_no_positions(tmp_path: Path) -> None:
    """Files do not say which: every fourth, as in llama.cpp."""
    model = tiny_model("smollm3", 5)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.use_rope = number != 3
    path = write_gguf(tmp_path / "model.gguf", model, "smollm3")
    assert generate(path) == expected_tokens(model, PROMPT, 8)


@pytest.mark.parametrize("kind", GEMMAS)
def test_gguf_of_gemma(kind: str, tmp_path: Path) -> None:
    """Beyond its windows. Norms lose nothing by the 1 that its files add, even in 8 bits."""
    model = tiny_model(kind, 3)
    for layer in model.model.layers:
        layer.self_attn.scaling = model.config.head_dim**-0.5  # these files do not say it
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    long = PROMPT * 6
    assert generate(path, prompt=long) == expected_tokens(model, long, 8)
    wanted = model.model.layers[1].post_feedforward_layernorm.weight
    found = torch.empty_like(wanted, dtype=torch.bfloat16)
    spec = read_spec(ModelSource("m", path, "gguf"), "bfloat16")
    GgufReader(path, spec).read(Piece(1, "mlp_out_norm"), found)
    assert torch.equal(found, wanted.bfloat16())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_with_images(prefix: str, tmp_path: Path) -> None:
    """As it is published: its tensors among others, its configuration within another one."""
    model = tiny_model("gemma3", 2)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps({**names, "text_config": config}))
    state = {
        name.replace("model.", prefix, 1): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith("model.")
    }
    state["vision_tower.patch.weight"] = torch.ones(3)
    save_file(state, tmp_path / "model.safetensors")
    assert generate(tmp_path) == expected_tokens(model, PROMPT, 8)


def test_gguf_with_llama3_rope(tmp_path: Path) -> None:
    model = tiny_model("llama3", 2)
    # GGUF does not say the original length: every Llama 3 has this one.
    rope = {**model.config.rope_parameters, "original_max_position_embeddings": 8192}
    model.config.rope_parameters = rope
    model = type(model)(model.config).eval()
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    body = load(path)
    assert body.model.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    body.close()
    assert generate(path) == expected_tokens(model, PROMPT, 8)


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1, Quant.Q8_0, Quant.Q5_1, Quant.BF16])
def test_dequantised_values_are_the_gguf_packages(quant: Quant) -> None:
    values = np.random.default_rng(0).normal(size=(70, 128)).astype(np.float32)
    raw = gguf.quants.quantize(values, quant)
    assert row_bytes(quant, 128) == raw.nbytes // 70
    expected = torch.from_numpy(gguf.quants.dequantize(raw, quant))
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.empty(70, 128, dtype=dtype)
        dequantise(raw.reshape(-1).view(np.uint8), quant, found)
        assert torch.equal(found, expected.to(dtype))


def test_an_unknown_quantisation_is_named(tmp_path: Path) -> None:
    assert row_bytes(10_000, 64) is None
    assert row_bytes(Quant.Q8_0, 33) is None


def test_a_quantised_file_serves(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("qwen3", 2), "qwen3", Quant.Q8_0)
    assert len(generate(path)) == 8


def test_dummy_weights_agree_between_instances(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", 3)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    first, second, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (7, 7, 8))
    for layer in range(3):
        assert (first.memory.layer_view(layer) == second.memory.layer_view(layer)).all()
        assert not (first.memory.layer_view(layer) == other.memory.layer_view(layer)).all()
    assert not (first.memory.layer_view(0) == first.memory.layer_view(1)).all()
    first.memory.layer_view(1)[:] = 0
    first.load_layers(LayerRange(1, 2))
    assert (first.memory.layer_view(1) == second.memory.layer_view(1)).all()
    for body in (first, second, other):
        body.close()


def test_dummy_values_fill_more_than_one_block() -> None:
    big = torch.empty(1100, 1000)
    DummyReader(0).read(Piece(None, "embedding"), big)
    assert 0.015 < float(big.std()) < 0.025
    assert not torch.equal(big[0], big[1])


def test_layers_are_loaded_again_from_disk(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama3", 3)
    body = load(tmp_path)
    before = body.memory.layer_view(2).copy()
    body.memory.drop(LayerRange(0, 1))
    body.memory.reclaim(LayerRange(1, 3))
    body.memory.layer_view(2)[:] = 0
    body.load_layers(LayerRange(1, 3))
    assert (body.memory.layer_view(2) == before).all()
    body.close()


class Closed(Exception):
    """Raised by a gate."""


class Gate:
    """Lets so many writes pass; None: all."""

    def __init__(self, num_left: int | None) -> None:
        self.num_left = num_left
        self.num_bytes = 0

    def __call__(self, num_bytes: int, write: Callable[[], None]) -> None:
        if self.num_left is not None:
            if not self.num_left:
                raise Closed
            self.num_left -= 1
        self.num_bytes += num_bytes
        write()


@pytest.mark.parametrize("kind", ["plain", "panels", "packed", "dummy"])
def test_layers_pass_a_gate_and_none_of_them_past_it(tmp_path: Path, kind: str) -> None:
    """They are the same then. Once the gate is closed nothing is written any more."""
    if kind == "packed":
        path = write_gguf(tmp_path / "m.gguf", tiny_model("qwen3", 3), "qwen3", Quant.Q8_0)
    else:
        path = save_tiny(tmp_path, "qwen2", 3)
    options = {"panels": {"dtype": "bfloat16"}, "dummy": {"load_format": "dummy"}}
    body = load(path, **options.get(kind, {}))
    views = [body.memory.shards[0].layer_view(layer) for layer in range(3)]
    before = [view.copy() for view in views]

    def load_through(gate: Gate) -> Gate:
        for view in views:
            view[:] = 0
        body.load_layers(LayerRange(0, 3), gate)
        return gate

    whole = load_through(Gate(None))
    assert all((view == was).all() for view, was in zip(views, before, strict=True))
    assert 0 < whole.num_bytes <= sum(view.nbytes for view in views)
    for num_writes in (0, 2):
        gate = Gate(num_writes)
        with pytest.raises(Closed):
            load_through(gate)
        written = sum(int(np.count_nonzero(view)) for view in views)
        assert written <= gate.num_bytes < whole.num_bytes, kind
        assert (gate.num_bytes > 0) == (num_writes > 0)
    body.close()


# Bad folders and files: each says which file and what is wrong.


def fails(path: Path, match: str, error: type[Exception] = ModelFiles) -> None:
    with pytest.raises(error, match=match):
        load(path).close()


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_file_that_is_changed_in_place_is_not_read_again(tmp_path: Path, is_gguf: bool) -> None:
    """A cut file would be a SIGBUS, a new tensor in it mixed weights."""
    if is_gguf:
        path = file = write_gguf(tmp_path / "model.gguf", tiny_model("llama", 2), "llama")
    else:
        path = save_tiny(tmp_path, "llama", 2)
        file = path / "model.safetensors"
    body = load(path)
    before = [body.memory.layer_view(layer).copy() for layer in range(2)]
    # Replaced as one should: the old content is read from the file that is open.
    new = tmp_path / "new"
    new.write_bytes(b"\0" * file.stat().st_size)
    old = tmp_path / "old"
    os.link(file, old)
    os.replace(new, file)
    body.load_layers(LayerRange(0, 2))
    assert all((body.memory.layer_view(layer) == before[layer]).all() for layer in range(2))
    os.replace(old, file)
    os.truncate(file, 1000)
    with pytest.raises(ModelFiles, match=f"{file.name}: changed while it is served"):
        body.load_layers(LayerRange(0, 2))
    file.unlink()
    body.close()


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "sub/x", ".."])
def test_an_index_that_names_a_file_elsewhere(tmp_path: Path, name: str) -> None:
    save_tiny(tmp_path, "llama", 2)
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(tmp_path, "which is not in its folder")


def test_a_truncated_safetensors_file(tmp_path: Path) -> None:
    file = save_tiny(tmp_path, "llama", 2) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    fails(tmp_path, r"model\.safetensors: truncated or corrupt")


def test_a_safetensors_file_that_is_none(tmp_path: Path) -> None:
    file = save_tiny(tmp_path, "llama", 2) / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    fails(tmp_path, r"model\.safetensors: truncated or corrupt")


def test_no_weights(tmp_path: Path) -> None:
    (save_tiny(tmp_path, "llama", 2) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    fails(tmp_path, r"holds no \.safetensors file \(it has pytorch_model\.bin")


def test_a_missing_shard(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", 2, max_shard_size="100KB")
    next(iter(sorted(tmp_path.glob("model-00002*")))).unlink()
    fails(tmp_path, r"model-00002.*: cannot be read: No such file")


def test_an_index_that_names_a_tensor_in_the_wrong_shard(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", 2, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    name = "model.norm.weight"
    content["weight_map"][name] = next(f for f in files if f != content["weight_map"][name])
    index.write_text(json.dumps(content))
    fails(tmp_path, rf"tensor '{name}' is missing")


def test_a_missing_tensor_and_a_wrong_shape(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", 2)
    config = tmp_path / "config.json"
    original = json.loads(config.read_text())
    config.write_text(json.dumps({**original, "num_hidden_layers": 3}))
    fails(tmp_path, r"tensor 'model\.layers\.2\.input_layernorm\.weight' is missing")
    config.write_text(json.dumps({**original, "intermediate_size": 64}))
    fails(tmp_path, r"has shape \(96, 64\), config\.json implies \(64, 64\)")


def test_a_truncated_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("qwen3", 2), "qwen3")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    fails(path, r"model\.gguf: truncated inside tensor")
    path.write_bytes(whole[:200])
    fails(path, r"model\.gguf: truncated or corrupt GGUF header")
    path.write_bytes(b"")
    fails(path, r"model\.gguf: truncated or corrupt GGUF header")
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    fails(path, "not a GGUF file")
    path.write_bytes(whole[:4] + struct.pack("<I", 99) + whole[8:])
    fails(path, "version 99")


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("qwen3", 2), "falcon")
    message = "'falcon' is not supported; supported are ernie4_5, gemma2, gemma3, granite, llama"
    fails(path, message, UnsupportedModel)


def test_a_failed_load_releases_its_memory(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", 2)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 3}))
    before = arenas_mapped()
    with pytest.raises(ModelFiles):
        load(tmp_path)
    assert arenas_mapped() == before
