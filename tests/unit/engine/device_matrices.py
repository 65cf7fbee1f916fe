"""Quantised matrices of any values, as a device has them, and what they stand for."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant

from kunserve.engine.cpu.kernels.packed import PackedMatrix
from kunserve.engine.weights.packing import StoredRows
from kunserve.engine.weights.scaled import expand
from kunserve.model.packed import PackedField, Run, WeightFormat
from kunserve_extras.torch_body.quantised import FORMS, QuantisedMatrix, matrix_of, pack_rows

GGML = {WeightFormat.Q8_0: (Quant.Q8_0, 34), WeightFormat.Q4_0: (Quant.Q4_0, 18)}
_ONE = 0x38
"""Of e4m3."""


def stored(kind: WeightFormat, rows: int, columns: int, seed: int = 0) -> StoredRows:
    """As a checkpoint has them. Few bits of e4m3, so that sums of products are exact in float32."""
    draw = np.random.default_rng(seed)
    if kind in GGML:
        blocks = draw.integers(0, 256, (rows, columns // 32, GGML[kind][1]), dtype=np.uint8)
        scales = draw.uniform(0.001, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, :2] = scales[:, :, None].view(np.uint8)
        return StoredRows(blocks.reshape(rows, -1))
    form = FORMS[kind]
    size = (rows, columns // (form.group or columns))
    scales = draw.uniform(0.001, 0.01, size).astype(np.float32)
    if form.group is None:
        scales = scales[:, 0]
    if form.is_e4m3:
        signs = draw.integers(0, 2, (rows, columns), dtype=np.uint8) << 7
        return StoredRows(signs | draw.integers(_ONE, _ONE + 32, signs.shape, np.uint8), scales)
    shape = rows, columns * form.bits // 8
    return StoredRows(draw.integers(0, 256, shape, dtype=np.uint8), scales)


def values_of(kind: WeightFormat, rows: StoredRows, columns: int) -> torch.Tensor:
    """[rows, columns] float32, by what reads them for devices that keep nothing."""
    if kind in GGML:
        return torch.from_numpy(gguf.quants.dequantize(rows.blocks, GGML[kind][0]))
    found = torch.empty(len(rows.blocks), columns)
    expand(kind, rows, found)
    return found


def on_device(field: PackedField, pieces: list[StoredRows]) -> QuantisedMatrix:
    """In memory that is no larger than what is planned for it."""
    return matrix_of(PackedMatrix(torch.from_numpy(pack_rows(field, pieces)), field))


def matrix(kind: WeightFormat, rows: int, columns: int) -> tuple[QuantisedMatrix, torch.Tensor]:
    """One, and its values."""
    some = stored(kind, rows, columns)
    made = on_device(PackedField("o", (Run(kind, rows),), columns), [some])
    return made, values_of(kind, some, columns)
