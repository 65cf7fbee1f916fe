"""Matrices that lie beside their scales in safetensors: expanded exactly, or kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file

from kunserve.core.config import ModelConfig
from kunserve.core.errors import ConfigError, ModelFiles, UnsupportedModel
from kunserve.engine.weights.formats import shape_of
from kunserve.engine.weights.pieces import Piece
from kunserve.engine.weights.readers import SafetensorsReader
from kunserve.model.config import read_spec
from kunserve.model.packed import KEPT_ON_CPUS, KEPT_ON_DEVICES, Kept, WeightFormat
from kunserve.model.quantization import kept_layer_bytes, kept_quantization
from kunserve.model.source import resolve_model
from tests.tiny_gguf import write_gguf
from tests.tiny_models import save_tiny, tiny_model
from tests.unit.engine.quantised_models import PUBLISHED, quantise_saved, save_quantised

KIND = {
    "fp8_channel": WeightFormat.FP8,
    "fp8_tensor": WeightFormat.FP8,
    "fp8_block": WeightFormat.FP8_128,
    "int8": WeightFormat.INT8,
    "int8_words": WeightFormat.INT8,
    "int4": WeightFormat.INT4_32,
}


def reader_of(folder: Path) -> SafetensorsReader:
    return SafetensorsReader(folder, read_spec(resolve_model(str(folder), "auto"), "float32"))


@pytest.mark.parametrize("how", PUBLISHED)
@pytest.mark.parametrize("kind", ["qwen2", "phi3"])
def test_each_published_format_stands_for_its_values(how: str, kind: str, tmp_path: Path) -> None:
    """Also where projections lie in one tensor. Blocks of 128 reach over the last rows."""
    wanted = quantise_saved(save_tiny(tmp_path, kind, 1), how)
    reader = reader_of(tmp_path)
    assert reader.quantization == (
        "fp8" if how in ("fp8_block", "fp8_tensor") else "compressed-tensors"
    )
    pieces = ("qkv", "gate_up") if kind == "phi3" else ("q", "k", "v", "gate", "up")
    for name in (*pieces, "o", "down"):
        piece = Piece(0, name)
        values = wanted[piece.hf_name]
        reader.check(piece, tuple(values.shape))
        found = torch.empty_like(values)
        reader.read(piece, found)
        assert torch.equal(found, values) and reader.format_of(piece) is KIND[how]
    assert reader.format_of(Piece(None, "embedding")) is WeightFormat.PLAIN


@pytest.mark.parametrize("how", PUBLISHED)
@pytest.mark.parametrize("kept", [KEPT_ON_CPUS, KEPT_ON_DEVICES])
def test_what_stays_follows_from_who_computes(how: str, kept: Kept, tmp_path: Path) -> None:
    """``kept_quantization`` says at the start what the loader does later, from headers."""
    save_quantised(tmp_path, tiny_model("llama", 2, hidden_size=128, intermediate_size=256), how)
    source, model = resolve_model(str(tmp_path), "auto"), ModelConfig(quantization="auto")
    spec, told = shape_of(source, model, kept), kept_quantization(source, model, kept)
    stays = KIND[how] in kept.formats
    assert (spec.packed is not None) == stays
    assert told == (reader_of(tmp_path).quantization if stays else None)
    if stays:
        guess = kept_layer_bytes(source, read_spec(source, "bfloat16"), kept)
        assert spec.layer_bytes == pytest.approx(guess, rel=0.06)
        return
    asked = ModelConfig(quantization=reader_of(tmp_path).quantization)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"they are {KIND[how].name}, and .*: Q8_0, Q4_0, "):
        shape_of(source, asked, kept)


@pytest.mark.parametrize("how", ["fp8_channel", "q8_0"])
def test_experts_that_a_device_expands_count_as_they_lie_then(how: str, tmp_path: Path) -> None:
    """Else the start would let in a sparse model that no instance can hold."""
    kept, model = KEPT_ON_DEVICES, ModelConfig(quantization="auto", dtype="float32")
    if how == "q8_0":
        path = write_gguf(tmp_path / "m.gguf", tiny_model("mixtral", 2), "llama", Quant.Q8_0)
    else:
        path = tmp_path
        quantise_saved(save_tiny(path, "qwen3_moe", 2), how)
    source = resolve_model(str(path), "auto")
    spec, plain = shape_of(source, model, kept), read_spec(source, "float32")
    guess = kept_layer_bytes(source, plain, kept)
    assert spec.packed is not None and guess == pytest.approx(spec.layer_bytes, rel=0.06)
    assert kept_layer_bytes(source, plain, kept._replace(experts=True)) < 0.7 * guess


@pytest.mark.parametrize(
    ("how", "changes", "message"),
    [
        ("int4", {"group_size": 48}, "group_size 48"),
        ("int4", {"symmetric": False}, "symmetric False"),
        ("int4", {"actorder": "group"}, "actorder 'group'"),
        ("int4", {"strategy": "channel"}, "strategy 'channel'"),
        ("fp8_channel", {"num_bits": 4}, "num_bits 4"),
        ("fp8_channel", {"block_structure": [64, 64]}, "only symmetric ones"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    how: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    quantise_saved(save_tiny(tmp_path, "llama", 1), how)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message):
        reader_of(tmp_path)


def test_scales_of_no_format_are_told(tmp_path: Path) -> None:
    quantise_saved(save_tiny(tmp_path, "llama", 1), "fp8_channel")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = Piece(0, "o").hf_name
    tensors[f"{name}_scale"] = torch.ones(3, 2)
    save_file(tensors, file)
    with pytest.raises(ModelFiles, match=r"scales of \(3, 2\): neither one, nor one for each row"):
        reader_of(tmp_path).format_of(Piece(0, "o"))
