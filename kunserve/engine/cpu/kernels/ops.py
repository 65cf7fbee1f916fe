"""Single kernels over torch tensors. ``Decoder`` runs whole stages; these are its pieces."""

import ctypes
import enum
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kunserve.engine.cpu.kernels.library import CBatch, kernel, library
from kunserve.engine.cpu.kernels.packed import PackedMatrix, rounded_bytes
from kunserve.engine.cpu.kernels.panels import PanelMatrix

_INT32 = np.dtype(np.int32)
_TwoInts = ctypes.c_int32 * 2
MOST_EXACT = 1 << 24
"""Integers below this are exact in float32."""
Matrix: TypeAlias = Any
"""A tensor, a ``PanelMatrix`` or a ``PackedMatrix``. Not said so, because who runs on a GPU has
tensors only."""
Call: TypeAlias = Callable[[], None]


class Finish(enum.IntEnum):
    """What ``linear`` does with a product before it stores it."""

    STORE = 0
    RESIDUAL = 1
    """Add it to what ``out`` holds."""
    SWIGLU = 2
    """``weight`` is [gate | up]; store silu(gate) * up."""
    FLOAT = 3
    """Store float32, unrounded."""
    GEGLU = 5
    """As SWIGLU, with GELU by tanh instead of SiLU."""

    @property
    def is_gated(self) -> bool:
        """Whether the product's columns are a gate's, then as many that it is multiplied by."""
        return self in (Finish.SWIGLU, Finish.GEGLU)


def linear(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    finish: Finish = Finish.STORE,
    rounded: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` [m, k] times ``weight`` [n, k] transposed, into ``out`` [m, n].

    ``n`` is half the rows of ``weight`` where it is gated. ``k`` elements must fill whole 16 bytes.
    ``rounded`` is memory for ``x`` of 8 bits, where ``weight`` is packed.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if finish.is_gated else weight.shape[0]
    if out is None:
        assert finish is not Finish.RESIDUAL
        out = torch.empty(m, n, dtype=torch.float32 if finish is Finish.FLOAT else x.dtype)
    assert weight.shape[1] == k and out.shape == (m, n), (x.shape, weight.shape, out.shape)
    assert x.is_contiguous() and out.is_contiguous()
    bias_at = None if bias is None else bias.data_ptr()
    if isinstance(weight, PackedMatrix):
        assert weight.field.is_paired == finish.is_gated, (weight.field, finish)
        if rounded is None:
            rounded = torch.empty(rounded_bytes(m, k), dtype=torch.uint8)
        assert rounded.nbytes >= rounded_bytes(m, k) and rounded.is_contiguous(), rounded.shape
        kernel("kun_packed_linear", x.dtype)(
            x.data_ptr(),
            weight.as_c(),
            bias_at,
            out.data_ptr(),
            m,
            n,
            k,
            finish,
            rounded.data_ptr(),
        )
        return out
    if isinstance(weight, PanelMatrix):
        panel_linear(x, weight, bias, out, finish)()
        return out
    assert k * x.element_size() % 16 == 0 and x.dtype == weight.dtype, (k, x.dtype, weight.dtype)
    assert weight.is_contiguous()
    kernel("kun_linear", x.dtype)(
        x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr(), m, n, k, finish
    )
    return out


def panel_linear(
    x: torch.Tensor,
    weight: PanelMatrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    finish: Finish,
) -> Call:
    """``linear`` as a call that can be made again and again, while all of them lie there."""
    (m, k), n = x.shape, out.shape[1]
    assert weight.shape == (n * 2 if finish.is_gated else n, k), (x.shape, weight.shape, n)
    assert weight.is_paired == finish.is_gated and weight.data.is_contiguous(), finish
    assert len(out) == m and x.is_contiguous() and out.is_contiguous(), (x.shape, out.shape)
    assert k * x.element_size() % 16 == 0 and x.dtype == weight.dtype, (k, x.dtype, weight.dtype)
    bias_at = None if bias is None else bias.data_ptr()
    at = x.data_ptr(), weight.data.data_ptr(), bias_at, out.data_ptr()
    return partial(kernel("kun_panel_linear", x.dtype), *at, m, n, k, finish, weight.num_panels)


def gather(weight: Matrix, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """These rows of ``weight`` in ``dtype``, newly allocated."""
    if not isinstance(weight, PackedMatrix):
        return pick_rows(weight, rows.to(torch.int32).numpy())
    which = rows.to(torch.int64).contiguous()
    out = torch.empty(len(which), weight.shape[1], dtype=dtype)
    if len(which):
        assert int(which.min()) >= 0 and int(which.max()) < weight.shape[0], weight.shape
    kernel("kun_gather", dtype)(
        weight.as_c(), which.data_ptr(), out.data_ptr(), len(which), weight.shape[1]
    )
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """(``weight`` + ``offset``) * ``x`` / rms(``x``) over the last dimension of ``x`` [rows, n]."""
    if out is None:
        out = torch.empty_like(x)
    norm_into(x, weight, eps, out, offset)()
    return out


def norm_into(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, offset: int = 0
) -> Call:
    """``rms_norm`` as a call that can be made again and again, while all of them lie there."""
    rows, n = x.shape
    assert x.is_contiguous() and out.is_contiguous() and weight.shape == (n,)
    at = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    return partial(kernel("kun_rms_norm", x.dtype), *at, rows, n, eps, offset)


def pick_rows(weight: Matrix, rows: npt.NDArray[np.int32]) -> torch.Tensor:
    """These rows of a ``weight`` that is not quantised, newly allocated."""
    num_rows, width = weight.shape
    memory, num_panels = weight, 0
    if isinstance(weight, PanelMatrix):
        memory, num_panels = weight.data, weight.num_panels
    assert rows.dtype == _INT32 and rows.flags.c_contiguous and memory.is_contiguous(), rows.dtype
    out = torch.empty(len(rows), width, dtype=weight.dtype)
    sizes = num_rows, num_panels, width * out.element_size()
    picked = rows.ctypes.data, len(rows), out.data_ptr()
    if not library().kun_pick_rows(memory.data_ptr(), *sizes, *picked):
        raise IndexError(f"rows {rows.tolist()} of {num_rows}")
    return out


def lowest_and_highest(batch: CBatch, block_size: int) -> tuple[int, int]:
    """Of the block table entries that sequences use; the other way round if they use none."""
    bounds = _TwoInts()
    at = batch.tables, batch.rows, batch.context_lens
    library().kun_entry_bounds(*at, batch.num_seqs, batch.max_blocks, block_size, bounds)
    return bounds[0], bounds[1]


def largest(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Of each row of float32 ``logits`` [n, vocab]: the largest, and the lowest index that has it.

    A row with a NaN gives that.
    """
    num_rows, width = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and width < MOST_EXACT
    pairs = (ctypes.c_float * (2 * num_rows))()
    library().kun_largest(logits.data_ptr(), pairs, num_rows, width, 0)
    return pairs[::2], list(map(int, pairs[1::2]))


def largest_pairs(logits: torch.Tensor, first: int) -> torch.Tensor:
    """The same as float32 [n, 2], value and index, where the first column has index ``first``."""
    num_rows, width = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert first + width < MOST_EXACT, (first, width)
    pairs = torch.empty(num_rows, 2)
    library().kun_largest(logits.data_ptr(), pairs.data_ptr(), num_rows, width, first)
    return pairs


def argmax(logits: torch.Tensor) -> np.ndarray:
    """The lowest index of each row's maximum: ``logits`` float32 [n, vocab] -> int32 [n]."""
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    out = np.empty(logits.shape[0], dtype=np.int32)
    library().kun_argmax(logits.data_ptr(), out.ctypes.data, *logits.shape)
    return out
