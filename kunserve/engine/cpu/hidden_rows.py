"""Hidden states on their way between stages of CPUs: bytes at an address, which kernels read.

Behind a step's kernels every operation of torch is cold. A tensor made of bytes, and bytes made of
a tensor, take a tenth of a millisecond there, and both ends of every way would make them.
"""

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch


class HiddenRows:
    """Rows of hidden states, one behind the other, in memory of their own.

    None is left of a last stage's prompts that nobody samples. Nobody asks for a part of that.
    """

    __slots__ = ("address", "data", "num_rows")
    may_come_later = False
    """Whether a device waits for them by itself."""

    def __init__(self, data: bytearray | memoryview, num_rows: int) -> None:
        """``data`` may be written."""
        self.data = data if isinstance(data, memoryview) else memoryview(data)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(data)) if num_rows else 0
        self.num_rows = num_rows

    @classmethod
    def empty(cls, num_rows: int, row_bytes: int) -> "HiddenRows":
        """Rows to be filled."""
        return cls(bytearray(num_rows * row_bytes), num_rows)

    @classmethod
    def of_bytes(cls, data: bytes | bytearray | memoryview, row_bytes: int) -> "HiddenRows":
        """Rows from the wire, without a copy if they may be written."""
        view = memoryview(data)
        num_rows, rest = divmod(view.nbytes, row_bytes)
        assert rest == 0, (view.nbytes, row_bytes)
        return cls(bytearray(view) if view.readonly else view, num_rows)

    @classmethod
    def of_tensor(cls, rows: torch.Tensor) -> "HiddenRows":
        """The same memory."""
        assert rows.is_contiguous(), rows.shape
        return cls(rows.view(torch.uint8).numpy().data.cast("B"), len(rows))

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The same memory as [rows, hidden]."""
        self._assert_some()
        return torch.frombuffer(self.data, dtype=dtype).view(self.num_rows, -1)

    def await_all(self, look_up: Callable[[], None] | None = None) -> bool:
        """Return once they are there; False if they never will be. ``look_up``: while it waits."""
        return True

    def first(self, num_rows: int) -> "HiddenRows":
        """The same memory, of the first rows alone."""
        self._assert_some()
        row_bytes = self.data.nbytes // self.num_rows
        return HiddenRows(self.data[: num_rows * row_bytes], num_rows)

    def picked(self, which: npt.NDArray[np.int32]) -> "HiddenRows":
        """Copies of some rows, one at least."""
        self._assert_some()
        assert len(which), "no row is picked"
        rows = np.frombuffer(self.data, dtype=np.uint8).reshape(self.num_rows, -1)[which]
        return HiddenRows(rows.data.cast("B"), len(which))

    def _assert_some(self) -> None:
        assert self.num_rows, "there are no rows, and none says how wide it would be"


Hidden: TypeAlias = torch.Tensor | HiddenRows
"""What a stage gives and takes. GPUs, ranks and steps in several calls have tensors."""


def bytes_of(hidden: Hidden | npt.NDArray[np.float32]) -> memoryview:
    """As bytes for the wire, on a CPU without a copy."""
    if isinstance(hidden, HiddenRows):
        return hidden.data
    if isinstance(hidden, np.ndarray):
        return hidden.data.cast("B")
    assert hidden.is_contiguous()
    return hidden.cpu().view(torch.uint8).numpy().data.cast("B")


def rows_of(hidden: Hidden) -> HiddenRows:
    """As rows at an address."""
    return hidden if isinstance(hidden, HiddenRows) else HiddenRows.of_tensor(hidden)


def tensor_of(hidden: Hidden, dtype: torch.dtype) -> torch.Tensor:
    """As a tensor."""
    return hidden.tensor(dtype) if isinstance(hidden, HiddenRows) else hidden
