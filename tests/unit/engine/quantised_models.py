"""Writes tiny models as fleets publish them: e4m3 and integers beside their scales."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

GROUP = 32
BLOCK = 128
PUBLISHED = ("fp8_channel", "fp8_tensor", "fp8_block", "int8", "int8_words", "int4")
"""Of which ``fp8_block`` and ``fp8_tensor`` state it as Qwen3-FP8 does, others by
compressed-tensors."""


def quantise_saved(folder: Path, how: str) -> dict[str, torch.Tensor]:
    """Quantise the projections of a saved model in place; the weights that it has from then on,
    in float32.
    """
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    expanded = {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        stored, expanded[name] = _QUANTISE[how.removesuffix("_words")](tensors.pop(name).float())
        if how == "int8_words":
            stored = _in_words(stored)
        tensors |= {name.removesuffix("weight") + one: value for one, value in stored.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = stated(how)
    (folder / "config.json").write_text(json.dumps(config))
    return expanded


def save_quantised(
    folder: Path, model: transformers.PreTrainedModel, how: str
) -> transformers.PreTrainedModel:
    """Save it quantised; gives the model with the weights that the files stand for."""
    model.save_pretrained(folder)
    model.load_state_dict(quantise_saved(folder, how), strict=False)
    return model


def stated(how: str) -> dict[str, Any]:
    """What ``config.json`` says of it."""
    if how in ("fp8_block", "fp8_tensor"):
        block = [BLOCK, BLOCK] if how == "fp8_block" else None
        return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}
    weights: dict[str, Any] = {"symmetric": True, "strategy": "channel", "num_bits": 8}
    weights["type"] = "float" if how == "fp8_channel" else "int"
    if how == "int4":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": GROUP, "actorder": "static"}
    layouts = {"fp8_channel": "float-quantized", "int8": "int-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.get(how, "pack-quantized"),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def _e4m3(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``scales`` of every number."""
    stored = (values / scales).to(torch.float8_e4m3fn)
    return stored, stored.float() * scales


def _fp8_channel(values: torch.Tensor) -> Stored:
    scales = values.abs().amax(1, keepdim=True) / 448
    stored, found = _e4m3(values, scales)
    return {"weight": stored, "weight_scale": scales}, found


def _fp8_tensor(values: torch.Tensor) -> Stored:
    scale = values.abs().max() / 448
    stored, found = _e4m3(values, scale)
    return {"weight": stored, "weight_scale": scale}, found


def _fp8_block(values: torch.Tensor) -> Stored:
    rows, columns = values.shape
    num_rows, num_columns = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(num_rows * BLOCK, num_columns * BLOCK)
    padded[:rows, :columns] = values
    most = padded.view(num_rows, BLOCK, num_columns, BLOCK).abs().amax((1, 3)) / 448
    each = most.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    stored, found = _e4m3(values, each)
    return {"weight": stored, "weight_scale_inv": most}, found


def _int8(values: torch.Tensor) -> Stored:
    scales = (values.abs().amax(1, keepdim=True) / 127).bfloat16()
    whole = (values / scales.float()).round().clamp(-128, 127)
    return {"weight": whole.to(torch.int8), "weight_scale": scales}, whole * scales.float()


def _in_words(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    words = (stored["weight"].to(torch.int16) + 128).to(torch.uint8).view(torch.int32)
    shape = torch.tensor(stored["weight"].shape)
    rest = {"weight_scale": stored["weight_scale"], "weight_shape": shape}
    return {"weight_packed": words} | rest


def _int4(values: torch.Tensor) -> Stored:
    rows, columns = values.shape
    groups = values.view(rows, -1, GROUP)
    scales = (groups.abs().amax(2, keepdim=True) / 7).bfloat16()
    whole = (groups / scales.float()).round().clamp(-8, 7)
    numbers = (whole.view(rows, -1, 8) + 8).to(torch.int64)
    words = (numbers << (4 * torch.arange(8))).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    stored = {
        "weight_packed": words,
        "weight_scale": scales.squeeze(2),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return stored, (whole * scales.float()).view(rows, columns)


_QUANTISE = {
    "fp8_channel": _fp8_channel,
    "fp8_tensor": _fp8_tensor,
    "fp8_block": _fp8_block,
    "int8": _int8,
    "int4": _int4,
}
