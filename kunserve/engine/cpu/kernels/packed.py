"""Matrices in packed panels, as tensors' neighbours. csrc/panels.h says how they lie."""

from dataclasses import dataclass

import torch

from kunserve.engine.cpu.kernels.library import CPacked
from kunserve.model.packed import BLOCK_COLUMNS, PANEL_ROWS, PackedField, Run

_ROUNDED_BYTES = 64
"""Of each block of a row of activations."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Quantised weights over memory that somebody else owns."""

    data: torch.Tensor
    """[bytes] of all panels."""
    field: PackedField

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns], as of the tensor that it stands for."""
        num_rows = sum(run.num_rows for run in self.field.runs)
        return num_rows * (2 if self.field.is_paired else 1), self.field.num_columns

    @property
    def formats(self) -> tuple[int, ...]:
        """Of each run, by the kernels' numbers."""
        return tuple(int(run.format) for run in self.field.runs)

    def __getitem__(self, rows: slice) -> "PackedMatrix":
        """Consecutive rows of a matrix of one run, from the first of a panel on; no copy."""
        first, end, step = rows.indices(self.shape[0])
        (run,) = self.field.runs
        assert step == 1 and first % PANEL_ROWS == 0 and not self.field.is_paired, rows
        field = self.field._replace(runs=(Run(run.format, max(0, end - first)),))
        offset = first // PANEL_ROWS * run.format.panel_bytes(field.num_columns)
        return PackedMatrix(self.data[offset : offset + field.num_bytes], field)

    def run(self, index: int) -> "PackedMatrix":
        """One run, as the matrix of one expert; no copy."""
        runs = self.field.runs
        fields = [self.field._replace(runs=part) for part in (runs[:index], runs[index:][:1])]
        first = fields[0].num_bytes
        return PackedMatrix(self.data[first : first + fields[1].num_bytes], fields[1])

    def as_c(self) -> CPacked:
        """The kernels' view; valid while ``data`` lives."""
        assert self.data.is_contiguous() and self.data.nbytes == self.field.num_bytes, self.field
        runs = self.field.runs
        packed = CPacked(panels=self.data.data_ptr(), runs=len(runs))
        for i, run in enumerate(runs):
            packed.formats[i], packed.rows[i] = run
        return packed


def rounded_bytes(num_rows: int, num_columns: int) -> int:
    """What ``num_rows`` rows of activations take once they are rounded to 8 bits."""
    return num_rows * -(-num_columns // BLOCK_COLUMNS) * _ROUNDED_BYTES
