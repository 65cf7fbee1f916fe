"""Quantised matrices that lie in safetensors beside their scales: formats and values."""

from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch

from kunserve.core.errors import ModelFiles
from kunserve.engine.weights.packing import StoredRows
from kunserve.model.packed import INT4, WeightFormat
from kunserve.model.quantization import FP8_BLOCK

SCALES = ("_scale", "_scale_inv")
"""What names of scales append to a weight's: by compressed-tensors, and by blocks (DeepSeek's)."""
WORDS = "_packed"
"""Of integers, in words of 32 bits."""
_SHAPE = "_shape"
_INT8_A_WORD, _INT4_A_WORD = 4, 8
_DTYPES = ("F64", "F32", "F16", "BF16")


class ScaledFile:
    """The matrices of one checkpoint that have scales."""

    def __init__(
        self,
        names: Container[str],
        header: Callable[[str], Any],
        tensor: Callable[[str], torch.Tensor],
    ) -> None:
        """``header`` and ``tensor`` give what is stored under a name."""
        self._names = names
        self._header = header
        self._tensor = tensor

    def scale_of(self, name: str) -> str | None:
        """The name of a weight's scales, if it has any."""
        return next((name + end for end in SCALES if name + end in self._names), None)

    def format_of(self, name: str) -> WeightFormat:
        """Raises ModelFiles for scales that fit no format."""
        scale = self.scale_of(name)
        if scale is None:
            return WeightFormat.PLAIN
        scales = tuple(self._header(scale).get_shape())
        if name + WORDS in self._names:
            return self._words_format(name, scales)
        stored = self._header(name)
        rows, columns = stored.get_shape()
        if stored.get_dtype() == "I8":
            return WeightFormat.INT8
        if stored.get_dtype() == "F8_E4M3":
            if scales == (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)):
                return WeightFormat.FP8_128
            if scales in ((), (1,), (1, 1), (rows,), (rows, 1)):
                return WeightFormat.FP8
        raise ModelFiles(
            f"tensor {name!r} of {rows} x {columns} in {stored.get_dtype()} has scales of "
            f"{scales}: neither one, nor one for each row or block of {FP8_BLOCK} x {FP8_BLOCK}"
        )

    def _words_format(self, name: str, scales: tuple[int, ...]) -> WeightFormat:
        num_words = self._header(name + WORDS).get_shape()[1]
        if name + _SHAPE not in self._names:
            return WeightFormat.INT8
        columns = int(self._tensor(name + _SHAPE)[1])
        if -(-columns // _INT8_A_WORD) == num_words:
            return WeightFormat.INT8
        kind = INT4.get(columns // scales[-1])
        if kind is None or num_words * _INT4_A_WORD != columns or columns % scales[-1]:
            raise ModelFiles(
                f"tensor {name!r} of {columns} columns has {num_words} words and {scales[-1]} "
                f"scales a row; 4 bits are read in groups of {', '.join(map(str, sorted(INT4)))}"
            )
        return kind

    def expected(
        self, name: str, shape: tuple[int, ...]
    ) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
        """What must be there for a weight of this shape: names, shapes and types."""
        scale, kind = self.scale_of(name), self.format_of(name)
        assert scale is not None
        rows, columns = shape
        found = tuple(self._header(scale).get_shape())
        types: tuple[str, ...] = ()
        match kind:
            case WeightFormat.INT8:
                found, types, a_word = (rows, 1), ("I8",), _INT8_A_WORD
            case WeightFormat.FP8 | WeightFormat.FP8_128:
                types, a_word = ("F8_E4M3",), 1
            case _:
                found, a_word = (rows, columns // kind.block_columns), _INT4_A_WORD
        wanted = [(scale, found, _DTYPES)]
        if name + WORDS in self._names:
            return [*wanted, (name + WORDS, (rows, -(-columns // a_word)), ("I32",))]
        return [*wanted, (name, shape, types)]

    def rows(self, name: str) -> StoredRows:
        """A weight that has scales."""
        scale, kind = self.scale_of(name), self.format_of(name)
        assert scale is not None
        scales = self._tensor(scale).float()
        if name + WORDS in self._names:
            # Several values to a word, the first lowest, each 128 or 8 too large.
            values = self._tensor(name + WORDS).contiguous().view(torch.uint8).numpy()
            if kind is not WeightFormat.INT8:
                return StoredRows(values, scales.numpy())
            return StoredRows(values ^ np.uint8(0x80), scales.view(-1).numpy())
        stored = self._tensor(name).contiguous().view(torch.uint8)
        rows = len(stored)
        if kind is WeightFormat.FP8_128:
            scales = scales.repeat_interleave(FP8_BLOCK, dim=0)[:rows]
            return StoredRows(stored.numpy(), scales.contiguous().numpy())
        return StoredRows(stored.numpy(), scales.reshape(-1).expand(rows).contiguous().numpy())


def expand(kind: WeightFormat, rows: StoredRows, destination: torch.Tensor) -> None:
    """Fill ``destination`` [rows, columns] with the values of ``ScaledFile.rows``."""
    assert rows.scales is not None
    num_rows, columns = destination.shape
    stored, scales = torch.from_numpy(rows.blocks), torch.from_numpy(rows.scales)
    if kind in INT4.values():
        pairs = torch.stack((stored & 15, stored >> 4), dim=2)
        values = pairs.view(num_rows, -1).float() - 8
    elif kind is WeightFormat.INT8:
        values = stored.view(torch.int8)[:, :columns].float()
    else:
        values = stored.view(torch.float8_e4m3fn).float()
    if scales.dim() == 2:
        scales = scales.repeat_interleave(kind.block_columns, dim=1)[:, :columns]
    else:
        scales = scales[:, None]
    destination.copy_(values * scales)
