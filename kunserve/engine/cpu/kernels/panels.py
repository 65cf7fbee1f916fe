"""Matrices in the model's dtype that lie in panels. csrc/panel_tile.h says how.

A panel has the bytes of its 16 rows, so a matrix has one size and one place either way, and is put
into panels where it lies. Rows that fill no panel stay as they are, behind the panels.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kunserve.engine.cpu.kernels.library import library
from kunserve.model.packed import PANEL_ROWS

PANEL_FORMAT = 7
"""The kernels' number for such a matrix, beside those of ``WeightFormat``."""


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """A matrix over memory that somebody else owns; or several, one behind the other (experts)."""

    data: torch.Tensor
    """[rows, columns], contiguous: its bytes are panels, not these rows."""
    is_paired: bool = False
    """Whether a panel is 8 rows of the first half over 8 of the second: of a gate, and of up."""
    num_matrices: int = 1
    num_rows: int | None = None
    """Of a part that ends within a panel; ``data`` has all of its rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns], as of the tensor that it stands for."""
        rows, columns = self.data.shape
        return rows if self.num_rows is None else self.num_rows, columns

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.data.dtype

    @property
    def num_panels(self) -> int:
        """With which it begins, where it is one matrix."""
        assert self.num_matrices == 1
        return self.data.shape[0] // PANEL_ROWS

    @property
    def row_bytes(self) -> int:
        """Of one of its rows."""
        return self.data.shape[1] * self.data.element_size()

    def __getitem__(self, rows: slice) -> "PanelMatrix":
        """Consecutive rows, from the first of a panel on; no copy."""
        first, end, step = rows.indices(self.shape[0])
        assert step == 1 and first % PANEL_ROWS == 0, rows
        assert not self.is_paired and self.num_matrices == 1
        num_rows = max(0, end - first)
        with_panel = first + -(-num_rows // PANEL_ROWS) * PANEL_ROWS
        return PanelMatrix(self.data[first:with_panel], num_rows=num_rows)

    def matrix(self, index: int) -> "PanelMatrix":
        """One of several; no copy."""
        data = self.data.view(self.num_matrices, -1, self.data.shape[1])[index]
        return PanelMatrix(data, self.is_paired)

    def put_into_panels(self) -> None:
        """Call it once all rows of ``data`` have been read. Takes this thread alone.

        Rows move inside of ``data``: beside it there is a panel, and a byte for each row.
        """
        assert self.data.is_contiguous() and self.row_bytes % 16 == 0, self.data.shape
        num_rows, rest = divmod(self.data.shape[0], self.num_matrices)
        assert rest == 0 and not (self.is_paired and num_rows % 2), self
        room = np.empty(library().kun_arranging_bytes(num_rows, self.row_bytes), dtype=np.uint8)
        sizes = self.num_matrices, num_rows, self.row_bytes, int(self.is_paired)
        library().kun_to_panels(self.data.data_ptr(), *sizes, room.ctypes.data)


def in_panels(rows: torch.Tensor, *, is_paired: bool = False, num_matrices: int = 1) -> PanelMatrix:
    """A copy of plain ``rows`` in panels, for tests and benchmarks: engines load in place."""
    matrix = PanelMatrix(rows.clone(), is_paired, num_matrices)
    matrix.put_into_panels()
    return matrix
