"""Single kernels over torch tensors. ``Decoder`` runs whole stages; these are its pieces."""

import enum

import numpy as np
import torch

from kunserve.engine.kernels.library import kernel, library


class Finish(enum.IntEnum):
    """What ``linear`` does with a product before it stores it."""

    STORE = 0
    RESIDUAL = 1
    """Add it to what ``out`` holds."""
    SWIGLU = 2
    """``weight`` is [gate | up]; store silu(gate) * up."""
    FLOAT = 3
    """Store float32, unrounded."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    finish: Finish = Finish.STORE,
) -> torch.Tensor:
    """``x`` [m, k] times ``weight`` [n, k] transposed, into ``out`` [m, n].

    ``n`` is half the rows of ``weight`` for SWIGLU. ``k`` elements must fill whole 16 bytes.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if finish is Finish.SWIGLU else weight.shape[0]
    if out is None:
        assert finish is not Finish.RESIDUAL
        out = torch.empty(m, n, dtype=torch.float32 if finish is Finish.FLOAT else x.dtype)
    assert weight.shape[1] == k and out.shape == (m, n), (x.shape, weight.shape, out.shape)
    assert k * x.element_size() % 16 == 0 and x.dtype == weight.dtype, (k, x.dtype, weight.dtype)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    kernel("kun_linear", x.dtype)(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        n,
        k,
        finish,
    )
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``weight`` * ``x`` / rms(``x``) over the last dimension of ``x`` [rows, n]."""
    if out is None:
        out = torch.empty_like(x)
    rows, n = x.shape
    assert x.is_contiguous() and out.is_contiguous() and weight.shape == (n,)
    kernel("kun_rms_norm", x.dtype)(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, eps)
    return out


def argmax(logits: torch.Tensor) -> np.ndarray:
    """The lowest index of each row's maximum: ``logits`` float32 [n, vocab] -> int32 [n]."""
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    out = np.empty(logits.shape[0], dtype=np.int32)
    library().kun_argmax(logits.data_ptr(), out.ctypes.data, *logits.shape)
    return out
