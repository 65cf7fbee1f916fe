"""What ``config.json`` says of quantised weights: one published format is read, others refused."""

import math
from pathlib import Path
from typing import Any

from kunserve.core.config import ModelConfig
from kunserve.core.errors import UnsupportedModel
from kunserve.model.gguf.file import GgufTensor, read_gguf
from kunserve.model.json_file import read_json
from kunserve.model.packed import PANEL_ROWS, WeightFormat
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
_LAYOUTS = ("int-quantized", "pack-quantized")
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def check_quantization(path: Path, stated: Any) -> None:
    """Raise UnsupportedModel unless weights are plain, or int8 with a scale per row.

    ``stated`` is the value of ``quantization_config``. What is read is compressed-tensors' W8A8
    and W8A16: 8 bits, symmetric, by channel. Activations are rounded by us, however it was meant.
    """
    if not stated:
        return
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if not isinstance(stated, dict) or method != COMPRESSED_TENSORS:
        raise UnsupportedModel(
            f"{path}: weights quantised by {method} are not supported; use the original, "
            "int8 per channel by compressed-tensors, or a GGUF file"
        )
    layout, groups = stated.get("format"), stated.get("config_groups")
    if layout not in _LAYOUTS or not isinstance(groups, dict) or not groups:
        raise UnsupportedModel(
            f"{path}: compressed-tensors in the format {layout!r} are not supported, "
            f"only {' and '.join(_LAYOUTS)} of 8 bits"
        )
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise UnsupportedModel(f"{path}: compressed-tensors without 'weights' in a group")
        for key, wanted in _WEIGHTS.items():
            if weights.get(key) != wanted:
                raise UnsupportedModel(
                    f"{path}: compressed-tensors with {key} {weights.get(key)!r} are not "
                    f"supported, only {wanted!r}"
                )


def kept_quantization(source: ModelSource, config: ModelConfig, *, keeps: bool) -> str | None:
    """How weights are quantised in memory, as ``--quantization`` names it; None if they are not.

    ``keeps`` says whether the device computes with quantised weights. Reads headers only.
    """
    if not keeps or config.quantization == "none" or source.weights == "dummy":
        return None
    if source.is_gguf:
        tensors = read_gguf(source.path).tensors.values()
        return "gguf" if any(tensor.quant_type in GGUF_FORMATS for tensor in tensors) else None
    stated = read_json(source.path / "config.json").get("quantization_config")
    return COMPRESSED_TENSORS if stated else None


def kept_layer_bytes(source: ModelSource, spec: ModelSpec) -> float:
    """About what a layer's quantised weights take in memory: the mean over the model's layers.

    Reads headers only. What is not quantised counts in the model's dtype.
    """
    if not source.is_gguf:
        return float(spec.layer_params)  # int8
    num_bytes = 0.0
    for tensor in read_gguf(source.path).tensors.values():
        if tensor.name.startswith("blk."):
            num_bytes += _tensor_bytes(tensor, spec.dtype_bytes)
    return num_bytes / spec.num_layers


def _tensor_bytes(tensor: GgufTensor, dtype_bytes: int) -> float:
    num_columns, kind = tensor.shape[-1], GGUF_FORMATS.get(tensor.quant_type)
    num_rows = math.prod(tensor.shape[:-1])
    if kind is None or num_columns % kind.block_columns:
        return num_rows * num_columns * dtype_bytes
    return num_rows * kind.panel_bytes(num_columns) / PANEL_ROWS
