"""Whether kernels with AMX tiles may run in this process, and compute what is right."""

import ctypes
import functools
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

_FLOAT = 3
"""``Finish.FLOAT``: sums as they are."""
_ROWS, _PANEL_ROWS, _COLUMNS = 75, 40, 1000
"""Some whole tiles of everything, and some that end early."""


@functools.cache
def why_not(path: Path) -> str | None:
    """What speaks against the library at ``path``, if anything does. Linux is asked for the tiles.

    Takes about a millisecond. Call it once the processor is known to have what ``path`` needs.
    """
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError as error:
        return f"they cannot be loaded ({error})"
    if refused := kernels.kun_allow_amx():
        return f"Linux refuses this process the tiles ({os.strerror(refused)})"
    # Small whole numbers have the same sums in any order, so a right answer has the same bits.
    rows, w = _whole_numbers(_ROWS), _whole_numbers(_PANEL_ROWS)
    found = np.full((_ROWS, _PANEL_ROWS), np.nan, dtype=np.float32)
    sizes = (ctypes.c_int64(size) for size in (_ROWS, _PANEL_ROWS, _COLUMNS))
    arrays = (_bfloat16(rows), _bfloat16(w), None, found)
    at = [None if array is None else ctypes.c_void_p(array.ctypes.data) for array in arrays]
    kernels.kun_linear_bf16(*at, *sizes, _FLOAT)
    is_right = np.array_equal(found, rows @ w.T)
    return None if is_right else "a product of small whole numbers came out wrong"


def _whole_numbers(rows: int) -> npt.NDArray[np.float32]:
    numbers = np.random.default_rng(rows).integers(-4, 5, (rows, _COLUMNS))
    return numbers.astype(np.float32)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each: whole numbers as small as these lose nothing."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
