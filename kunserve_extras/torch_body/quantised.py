"""Matrices that stay quantised in a device's memory: row after row, and their scales behind them.

They take as many bytes as the CPU's panels of the same format, so all that plans memory knows one
size. An instance copies another one's, byte by byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kunserve.engine.cpu.kernels.packed import PackedMatrix
from kunserve.engine.layer_weights import LayerWeights, ModelWeights
from kunserve.engine.weights.packing import StoredRows
from kunserve.model.packed import INT4, PackedField, WeightFormat

Bytes = npt.NDArray[np.uint8]


class Form(NamedTuple):
    """What a product has to know of a format."""

    bits: int
    """8 to a byte; or 4: of each group of columns the first half low, the second high."""
    is_e4m3: bool
    group: int | None
    """Columns that share a scale; None: all."""
    scale: torch.dtype


_E4M3 = Form(8, True, None, torch.float32)
FORMS: dict[WeightFormat, Form] = {
    WeightFormat.INT8: Form(8, False, None, torch.float32),
    WeightFormat.Q8_0: Form(8, False, 32, torch.float16),
    WeightFormat.Q4_0: Form(4, False, 32, torch.float16),
    WeightFormat.FP8: _E4M3,
    WeightFormat.FP8_128: _E4M3._replace(group=128),
    **{kind: Form(4, False, group, torch.float32) for group, kind in INT4.items()},
}


class Part(NamedTuple):
    """Rows of one format."""

    form: Form
    num_columns: int
    values: torch.Tensor
    """[rows, bytes] uint8."""
    scales: torch.Tensor
    """[groups, rows]."""

    @property
    def num_rows(self) -> int:
        """Of the matrix."""
        return len(self.values)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.form.group or self.num_columns

    def rows(self, which: torch.Tensor) -> "Part":
        """These rows, copied."""
        return self._replace(
            values=self.values.index_select(0, which), scales=self.scales.index_select(1, which)
        )

    def widened(self) -> torch.Tensor:
        """[rows, columns] float32: what each number stands for."""
        rows, grouped = self.num_rows, (self.num_rows, -1, self.group)
        if self.form.is_e4m3:
            values = self.values.view(torch.float8_e4m3fn).float()
        elif self.form.bits == 8:
            values = self.values.view(torch.int8).float()
        else:
            pairs = self.values.view(rows, -1, 1, self.group // 2)
            values = torch.cat((pairs & 15, pairs >> 4), dim=2).float() - 8.0
        scales = self.scales.t().float().unsqueeze(2)
        return (values.view(grouped) * scales).view(rows, -1)


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """Weights over memory that somebody else owns."""

    data: torch.Tensor
    """[bytes] of all parts."""
    parts: tuple[Part, ...]
    """Consecutive rows: one where all are of one format."""

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns], as of the tensor that it stands for."""
        return sum(part.num_rows for part in self.parts), self.parts[0].num_columns

    def gathered(self, which: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """These rows [n, columns], newly allocated. Only of a matrix of one part."""
        (part,) = self.parts
        return part.rows(which).widened().to(dtype)


class _Place(NamedTuple):
    """Where a part lies."""

    kind: WeightFormat
    num_rows: int
    runs: int
    """Of the field."""
    offset: int


def _places(field: PackedField) -> list[_Place]:
    """Runs of a field; those of one format that follow each other together."""
    found: list[_Place] = []
    offset, paired = 0, field.is_paired
    for run in field.runs:
        rows = run.num_rows * (2 if paired else 1)
        if found and found[-1].kind is run.format:
            last = found[-1]
            found[-1] = last._replace(num_rows=last.num_rows + rows, runs=last.runs + 1)
        else:
            found.append(_Place(run.format, rows, 1, offset))
        panels = run.num_panels(is_paired=paired)
        offset += panels * run.format.panel_bytes(field.num_columns)
    return found


def matrix_of(packed: PackedMatrix) -> QuantisedMatrix:
    """The same bytes as a device reads them."""
    data, columns = packed.data, packed.field.num_columns
    parts = []
    for kind, num_rows, _, offset in _places(packed.field):
        form = FORMS[kind]
        at = offset + num_rows * columns * form.bits // 8
        groups = columns // (form.group or columns)
        end = at + groups * num_rows * form.scale.itemsize
        values = data[offset:at].view(num_rows, -1)
        parts.append(Part(form, columns, values, data[at:end].view(form.scale).view(groups, -1)))
    return QuantisedMatrix(data, tuple(parts))


def weights_of(weights: ModelWeights) -> ModelWeights:
    """All packed matrices as a device reads them."""
    for held in _all_of(weights):
        for name in held.__slots__:
            if isinstance(matrix := getattr(held, name), PackedMatrix):
                setattr(held, name, matrix_of(matrix))
    return weights


def _all_of(weights: ModelWeights) -> list[ModelWeights | LayerWeights]:
    return [weights, *weights.layers]


def has_quantised(weights: ModelWeights) -> bool:
    """Whether any matrix stays quantised."""
    return any(_kinds_of(held) for held in _all_of(weights))


def layers_of_each_kind(weights: ModelWeights) -> list[int]:
    """The first layer of each kind: others are computed by the same kernels as one of these."""
    found: dict[tuple[object, ...], int] = {}
    for layer, held in enumerate(weights.layers):
        found.setdefault(_kinds_of(held), layer)
    return list(found.values())


def _kinds_of(held: ModelWeights | LayerWeights) -> tuple[object, ...]:
    matrices = ((name, getattr(held, name)) for name in held.__slots__)
    return tuple(
        (name, *((part.form, part.num_rows) for part in matrix.parts))
        for name, matrix in matrices
        if isinstance(matrix, QuantisedMatrix)
    )


def pack_rows(field: PackedField, pieces: Sequence[StoredRows]) -> Bytes:
    """The bytes of a quantised tensor from its pieces, which are its rows from the first on."""
    packed = np.zeros(field.num_bytes, dtype=np.uint8)
    places, left = _places(field), list(pieces)
    for place in places:
        # Gate and up are two pieces of one run, or one piece where files have them as one.
        count = len(left) if len(places) == 1 else place.runs
        taken, left = left[:count], left[count:]
        parts = [_rows_of(place.kind, piece) for piece in taken]
        values = np.concatenate([part[0] for part in parts])
        scales = np.concatenate([part[1] for part in parts], axis=1)
        assert values.shape[0] == place.num_rows, (values.shape, field)
        at = place.offset
        for some in (values, np.ascontiguousarray(scales)):
            raw = some.reshape(-1).view(np.uint8)
            packed[at : at + raw.nbytes] = raw
            at += raw.nbytes
    return packed


def _rows_of(kind: WeightFormat, piece: StoredRows) -> tuple[Bytes, npt.NDArray[np.generic]]:
    """Values [rows, bytes], and scales [groups, rows]."""
    rows = len(piece.blocks)
    if piece.scales is None:
        block_bytes = 34 if kind is WeightFormat.Q8_0 else 18
        blocks = piece.blocks.reshape(rows, -1, block_bytes)
        halves = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
        return np.ascontiguousarray(blocks[:, :, 2:]).reshape(rows, -1), halves.T
    scales = piece.scales.reshape(rows, -1).T.astype(np.float32)
    if FORMS[kind].bits == 8:
        return piece.blocks, scales
    group = kind.block_columns
    numbers = np.stack((piece.blocks & 15, piece.blocks >> 4), axis=2)
    halves_of = numbers.reshape(rows, -1, 2, group // 2)
    return (halves_of[:, :, 0] | halves_of[:, :, 1] << 4).reshape(rows, -1), scales
