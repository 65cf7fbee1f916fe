"""What ``config.json`` says of quantised weights: which published formats are read."""

import math
from pathlib import Path
from typing import Any

from kunserve.core.config import ModelConfig
from kunserve.core.errors import UnsupportedModel
from kunserve.model.gguf.file import GgufTensor, read_gguf
from kunserve.model.json_file import read_json
from kunserve.model.packed import INT4, PANEL_ROWS, Kept, WeightFormat
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec

GGUF_FORMATS = {
    2: WeightFormat.Q4_0,
    3: WeightFormat.Q4_1,
    8: WeightFormat.Q8_0,
    12: WeightFormat.Q4_K,
    14: WeightFormat.Q6_K,
}
"""GGML's numbers of the types that stay quantised. Others are expanded when they are loaded."""
COMPRESSED_TENSORS = "compressed-tensors"
FP8 = "fp8"
"""As Qwen3-FP8 is: e4m3, with scales by block or for the whole tensor."""
FP8_BLOCK = 128
"""Rows, and columns, that share a scale."""
_COLUMNS = 4096
"""Of a typical matrix, for an estimate."""
_GGUF_EXPERTS = "_exps."
"""In the names of matrices of experts."""
_LAYOUTS = ("int-quantized", "pack-quantized", "float-quantized")
_READ = "int8 per channel, e4m3 per channel, tensor or block of 128, and int4 by groups"


def check_quantization(path: Path, stated: Any) -> None:
    """Raise UnsupportedModel unless weights are plain, or quantised in a way that is read.

    ``stated`` is the value of ``quantization_config``. Activations are rounded by us, or not at
    all, however it was meant.
    """
    stated_formats(path, stated)


def stated_formats(path: Path, stated: Any) -> frozenset[WeightFormat]:
    """How matrices are stored; none: all are plain. Raises UnsupportedModel."""
    if not stated:
        return frozenset()
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if isinstance(stated, dict) and method == FP8:
        return frozenset({_fp8_format(path, stated)})
    if not isinstance(stated, dict) or method != COMPRESSED_TENSORS:
        raise UnsupportedModel(
            f"{path}: weights quantised by {method} are not supported; use the original, one by "
            f"compressed-tensors ({_READ}), or a GGUF file"
        )
    layout, groups = stated.get("format"), stated.get("config_groups")
    if layout not in _LAYOUTS or not isinstance(groups, dict) or not groups:
        raise UnsupportedModel(
            f"{path}: compressed-tensors in the format {layout!r} are not supported, "
            f"only {', '.join(_LAYOUTS)}"
        )
    found = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise UnsupportedModel(f"{path}: compressed-tensors without 'weights' in a group")
        found.add(_group_format(path, weights))
    return frozenset(found)


def _group_format(path: Path, weights: dict[str, Any]) -> WeightFormat:
    """Of compressed-tensors' description of one group of modules."""
    kind, strategy = (weights.get("type"), weights.get("num_bits")), weights.get("strategy")
    known: dict[Any, dict[str, WeightFormat | None]] = {
        ("int", 8): {"channel": WeightFormat.INT8},
        ("float", 8): {
            "channel": WeightFormat.FP8,
            "tensor": WeightFormat.FP8,
            "block": WeightFormat.FP8_128,
        },
        ("int", 4): {"group": INT4.get(weights.get("group_size") or 0)},
    }
    found = known.get(kind, {}).get(str(strategy))
    block = weights.get("block_structure") or [FP8_BLOCK, FP8_BLOCK]
    is_read = weights.get("symmetric") is True and block == [FP8_BLOCK, FP8_BLOCK]
    if found is None or not is_read or weights.get("actorder") == "group":
        said = ("type", "num_bits", "strategy", "group_size", "symmetric", "actorder")
        told = ", ".join(f"{key} {weights[key]!r}" for key in said if weights.get(key) is not None)
        raise UnsupportedModel(
            f"{path}: compressed-tensors with {told} are not supported, only symmetric ones: "
            f"{_READ} of {', '.join(map(str, sorted(INT4)))}"
        )
    return found


def _fp8_format(path: Path, stated: dict[str, Any]) -> WeightFormat:
    block, kind = stated.get("weight_block_size"), stated.get("fmt", "e4m3")
    if block not in (None, [FP8_BLOCK, FP8_BLOCK]) or kind not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModel(
            f"{path}: fp8 in blocks of {block} and the format {kind!r} is not supported, only e4m3 "
            f"in blocks of {FP8_BLOCK} x {FP8_BLOCK} or with a scale for each tensor"
        )
    return WeightFormat.FP8 if block is None else WeightFormat.FP8_128


def kept_quantization(source: ModelSource, config: ModelConfig, kept: Kept) -> str | None:
    """How weights are quantised in memory, as ``--quantization`` names it; None if they are not.

    ``kept`` is what the device computes with. Reads headers only.
    """
    if not kept.formats or config.quantization == "none" or source.weights == "dummy":
        return None
    if source.is_gguf:
        tensors = read_gguf(source.path).tensors.values()
        kinds = {GGUF_FORMATS.get(tensor.quant_type) for tensor in tensors}
        return None if kinds.isdisjoint(kept.formats) else "gguf"
    stated = _stated(source)
    is_kept = not stated_formats(source.path, stated).isdisjoint(kept.formats)
    return str(stated["quant_method"]) if is_kept else None


def _stated(source: ModelSource) -> Any:
    return read_json(source.path / "config.json").get("quantization_config")


def kept_layer_bytes(source: ModelSource, spec: ModelSpec, kept: Kept) -> float:
    """About what a layer's quantised weights take in memory: the mean over the model's layers.

    Reads headers only. What is not quantised counts in the model's dtype.
    """
    if not source.is_gguf:
        kinds = stated_formats(source.path, _stated(source)) & kept.formats
        largest = max(kind.panel_bytes(_COLUMNS) for kind in kinds)
        plain = 0
        if spec.experts is not None and not kept.experts:
            plain = spec.experts.held * spec.mlp_params
        quantised_bytes = (spec.layer_params - plain) * largest / (PANEL_ROWS * _COLUMNS)
        return plain * spec.dtype_bytes + quantised_bytes
    num_bytes = 0.0
    for tensor in read_gguf(source.path).tensors.values():
        if tensor.name.startswith("blk."):
            num_bytes += _tensor_bytes(tensor, spec.dtype_bytes, kept)
    return num_bytes / spec.num_layers


def _tensor_bytes(tensor: GgufTensor, dtype_bytes: int, kept: Kept) -> float:
    num_columns, kind = tensor.shape[-1], GGUF_FORMATS.get(tensor.quant_type)
    num_rows = math.prod(tensor.shape[:-1])
    is_expanded = _GGUF_EXPERTS in tensor.name and not kept.experts
    if is_expanded or kind not in kept.formats or num_columns % kind.block_columns:
        return num_rows * num_columns * dtype_bytes
    return num_rows * kind.panel_bytes(num_columns) / PANEL_ROWS
