"""Dequantises GGML blocks straight into their destination, a cache's worth at a time."""

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt
import torch

QuantType = gguf.GGMLQuantizationType

_BLOCKS_AT_ONCE = 8192
"""Blocks of 32 elements: 1 MiB of float32, which stays in the second-level cache."""
_PLAIN = {
    QuantType.F32: torch.float32,
    QuantType.F16: torch.float16,
    QuantType.BF16: torch.bfloat16,
}


def row_bytes(quant_type: int, num_columns: int) -> int | None:
    """Bytes of one row of the tensor, or None if the type or the width is not known."""
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[QuantType(quant_type)]
    except (ValueError, KeyError):
        return None
    return None if num_columns % block else num_columns // block * block_bytes


def dequantise(data: npt.NDArray[np.uint8], quant_type: int, destination: torch.Tensor) -> None:
    """Decode ``data`` (raw bytes of all rows) into a contiguous ``destination``, rounding to it."""
    kind = QuantType(quant_type)
    if kind in _PLAIN:
        source = torch.from_numpy(data).view(_PLAIN[kind])
        destination.view(-1).copy_(source)
        return
    decode = _FAST.get(kind)
    if decode is not None:
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        raw = torch.from_numpy(data).view(-1, block_bytes)
        blocks = destination.view(-1, 32)
        for first in range(0, raw.shape[0], _BLOCKS_AT_ONCE):
            last = first + _BLOCKS_AT_ONCE
            decode(raw[first:last], blocks[first:last])
        return
    rows = data.reshape(destination.shape[0], -1)
    step = max(1, _BLOCKS_AT_ONCE * 32 // destination.shape[-1])
    for first in range(0, len(rows), step):
        values = gguf.quants.dequantize(rows[first : first + step], kind)
        destination[first : first + step].copy_(
            torch.from_numpy(values).view(destination[first : first + step].shape)
        )


def _halves(raw: torch.Tensor, first: int) -> torch.Tensor:
    """The float16 at byte ``first`` of each block as float32, [blocks, 1]."""
    return raw[:, first : first + 2].contiguous().view(torch.float16).float()


def _q4_0(raw: torch.Tensor, blocks: torch.Tensor) -> None:
    scale, packed = _halves(raw, 0), raw[:, 2:]
    blocks[:, :16] = (packed & 15).float().sub_(8).mul_(scale)
    blocks[:, 16:] = (packed >> 4).float().sub_(8).mul_(scale)


def _q4_1(raw: torch.Tensor, blocks: torch.Tensor) -> None:
    scale, minimum, packed = _halves(raw, 0), _halves(raw, 2), raw[:, 4:]
    blocks[:, :16] = (packed & 15).float().mul_(scale).add_(minimum)
    blocks[:, 16:] = (packed >> 4).float().mul_(scale).add_(minimum)


def _q8_0(raw: torch.Tensor, blocks: torch.Tensor) -> None:
    blocks[:] = raw[:, 2:].view(torch.int8).float().mul_(_halves(raw, 0))


_FAST: dict[int, Callable[[torch.Tensor, torch.Tensor], None]] = {
    QuantType.Q4_0: _q4_0,
    QuantType.Q4_1: _q4_1,
    QuantType.Q8_0: _q8_0,
}
"""The common types; the gguf package decodes the others, more slowly."""
