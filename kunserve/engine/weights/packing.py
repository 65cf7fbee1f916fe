"""From the rows that a checkpoint stores to packed panels, as csrc/panels.h says they lie."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kunserve.model.packed import BLOCK_COLUMNS, PANEL_ROWS, PackedField, WeightFormat

_SIGN = np.uint8(0x80)
"""Makes signed bytes unsigned, 128 larger."""
_LINE_BYTES = 64
Bytes: TypeAlias = npt.NDArray[np.uint8]


class StoredRows(NamedTuple):
    """A quantised matrix as a checkpoint has it."""

    blocks: Bytes
    """[rows, bytes] each row's blocks as GGML has them; for INT8 and FP8 a byte per value, for
    INT4 one for two, the first low."""
    scales: npt.NDArray[np.float32] | None = None
    """[rows] for INT8 and FP8, [rows, groups] where several columns share one."""


def pack(field: PackedField, pieces: Sequence[StoredRows]) -> Bytes:
    """The bytes of a packed tensor, from its runs; of gate and up, from both, or both as one.

    Of experts, from each one's.
    """
    if field.is_paired and len(pieces) == 1:
        pieces = _halved(*pieces)
    if field.is_paired:
        pieces = [_pair(*pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)]
    packed = [
        _panels(run.format, _padded(piece, PANEL_ROWS))
        for run, piece in zip(field.runs, pieces, strict=True)
    ]
    found: Bytes = np.concatenate([panels.reshape(-1) for panels in packed])
    assert found.nbytes == field.num_bytes, (found.nbytes, field)
    return found


def _padded(piece: StoredRows, multiple: int) -> StoredRows:
    """With rows of zeros behind it."""
    missing = -len(piece.blocks) % multiple
    scales = piece.scales
    return StoredRows(
        np.pad(piece.blocks, ((0, missing), (0, 0))),
        None if scales is None else np.pad(scales, (0, missing)),
    )


def _halved(both: StoredRows) -> list[StoredRows]:
    half, scales = len(both.blocks) // 2, both.scales
    return [
        StoredRows(both.blocks[rows], None if scales is None else scales[rows])
        for rows in (slice(0, half), slice(half, None))
    ]


def _pair(gate: StoredRows, up: StoredRows) -> StoredRows:
    """8 rows of one, then 8 of the other, and so on."""
    half = PANEL_ROWS // 2
    parts = [_padded(piece, half) for piece in (gate, up)]
    blocks = np.stack([part.blocks.reshape(-1, half, gate.blocks.shape[1]) for part in parts], 1)
    if gate.scales is None:
        return StoredRows(blocks.reshape(-1, gate.blocks.shape[1]))
    scales = np.stack(
        [part.scales.reshape(-1, half) for part in parts if part.scales is not None], 1
    )
    return StoredRows(blocks.reshape(-1, gate.blocks.shape[1]), scales.reshape(-1))


def _panels(kind: WeightFormat, rows: StoredRows) -> Bytes:
    """[panels, bytes]."""
    if kind is WeightFormat.INT8:
        assert rows.scales is not None
        columns = rows.blocks.shape[1]
        values = (rows.blocks ^ _SIGN).reshape(-1, columns // BLOCK_COLUMNS, BLOCK_COLUMNS)
        scales = rows.scales.astype(np.float32).view(np.uint8).reshape(-1, PANEL_ROWS * 4)
        lines = [_Lines(values.shape[1], scales)]
    else:
        lines, values = _SPLIT[kind](rows.blocks)
    words = np.ascontiguousarray(values).view(np.int32)  # [rows, blocks, steps]
    _, num_blocks, steps = words.shape
    words = words.reshape(-1, PANEL_ROWS, num_blocks, steps).transpose(0, 2, 3, 1)
    blocks = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), num_blocks, -1)
    panels = np.zeros((len(blocks), kind.panel_bytes(num_blocks * BLOCK_COLUMNS)), dtype=np.uint8)
    at = 0
    for block in range(num_blocks):
        for each in lines:
            number, left = divmod(block, each.num_blocks)
            if not left:
                line = each.scales[:, number * _LINE_BYTES :][:, :_LINE_BYTES]
                panels[:, at : at + line.shape[1]] = line
                at += _LINE_BYTES
        panels[:, at : at + blocks.shape[2]] = blocks[:, block]
        at += blocks.shape[2]
    assert at == panels.shape[1], (at, kind)
    return panels


class _Lines(NamedTuple):
    """Scales: each line of them stands before the first of the blocks that share it."""

    num_blocks: int
    """That share a line."""
    scales: Bytes
    """[panels, bytes] line after line. The last may be shorter."""


def _by_panel(*parts: npt.NDArray[np.generic]) -> Bytes:
    """[panels, bytes] of [rows, n] each: for each of n all first parts' rows, then the second's."""
    lanes = [part.reshape(-1, PANEL_ROWS, part.shape[1]).swapaxes(1, 2) for part in parts]
    together = np.ascontiguousarray(np.stack(lanes, axis=2))  # [panels, n, parts, rows]
    return together.view(np.uint8).reshape(len(together), -1)


def _halves(blocks: Bytes, at: int) -> npt.NDArray[np.uint16]:
    """[rows, blocks] the two bytes at ``at`` of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.uint16)[:, :, 0]


def _cut(rows: Bytes, block_bytes: int) -> Bytes:
    return rows.reshape(len(rows), -1, block_bytes)


def _q8_0(rows: Bytes) -> tuple[list[_Lines], Bytes]:
    blocks = _cut(rows, 34)
    return [_Lines(2, _by_panel(_halves(blocks, 0)))], blocks[:, :, 2:] ^ _SIGN


def _q4_0(rows: Bytes) -> tuple[list[_Lines], Bytes]:
    blocks = _cut(rows, 18)
    return [_Lines(2, _by_panel(_halves(blocks, 0)))], blocks[:, :, 2:]


def _q4_1(rows: Bytes) -> tuple[list[_Lines], Bytes]:
    blocks = _cut(rows, 20)
    return [_Lines(1, _by_panel(_halves(blocks, 0), _halves(blocks, 2)))], blocks[:, :, 4:]


def _nibbles(values: Bytes) -> Bytes:
    """[rows, blocks, 32] values -> [rows, blocks, 16]: the first half low, the second high."""
    high: Bytes = values[:, :, 16:] << np.uint8(4)
    return (values[:, :, :16] & np.uint8(15)) | high


def _q4_k(rows: Bytes) -> tuple[list[_Lines], Bytes]:
    """144 bytes of 256 values: scale, minimum, 6 bits each for 8 blocks of both, nibbles."""
    blocks = _cut(rows, 144)
    small, packed = blocks[:, :, 4:16], blocks[:, :, 16:]
    low, high, rest = small[:, :, :4], small[:, :, 4:8], small[:, :, 8:]
    scales = np.concatenate((low & 63, (rest & 15) | (low >> 6 << 4)), axis=2)
    minima = np.concatenate((high & 63, (rest >> 4) | (high >> 6 << 4)), axis=2)
    pairs = packed.reshape(*packed.shape[:2], 4, 1, 32)  # two blocks share 32 bytes
    values = np.concatenate((pairs & 15, pairs >> 4), axis=3).reshape(len(rows), -1, BLOCK_COLUMNS)
    big = _by_panel(_halves(blocks, 0), _halves(blocks, 2))
    little = _by_panel(scales.reshape(len(rows), -1), minima.reshape(len(rows), -1))
    return [_Lines(8, big), _Lines(2, little)], _nibbles(values)


def _q6_k(rows: Bytes) -> tuple[list[_Lines], Bytes]:
    """210 bytes of 256 values: low nibbles, high pairs of bits, a scale per 16 values, a scale."""
    blocks = _cut(rows, 210)
    shape = (*blocks.shape[:2], 2)
    low = blocks[:, :, :128].reshape(*shape, 2, 32)
    pairs = blocks[:, :, 128:192].reshape(*shape, 1, 32)
    nibbles = np.concatenate((low & 15, low >> 4), axis=3)  # [rows, superblocks, 2, 4, 32]
    bits = np.concatenate([pairs >> 2 * i & 3 for i in range(4)], axis=3)
    nibbles = nibbles.reshape(len(rows), -1, BLOCK_COLUMNS)
    steps = bits.reshape(len(rows), nibbles.shape[1], 2, 4, 4)
    high = np.bitwise_or.reduce([steps[:, :, :, i] << 2 * i for i in range(4)])
    scales = blocks[:, :, 192:208].reshape(len(rows), -1, 2)
    little = _by_panel(scales[:, :, 0], scales[:, :, 1])
    values = np.concatenate((_nibbles(nibbles), high.reshape(*nibbles.shape[:2], 8)), axis=2)
    return [_Lines(16, _by_panel(_halves(blocks, 208))), _Lines(2, little)], values


_SPLIT: dict[WeightFormat, Callable[[Bytes], tuple[list[_Lines], Bytes]]] = {
    WeightFormat.Q8_0: _q8_0,
    WeightFormat.Q4_0: _q4_0,
    WeightFormat.Q4_1: _q4_1,
    WeightFormat.Q4_K: _q4_k,
    WeightFormat.Q6_K: _q6_k,
}
"""Scales, and values [rows, blocks, bytes], of GGML's rows."""
