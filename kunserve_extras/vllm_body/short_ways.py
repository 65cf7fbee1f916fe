"""A layer's small operations in few calls: at few rows calls take longer than their arithmetic."""

from collections.abc import Callable

import torch

from kunserve.engine.cpu.kernels.ops import norm_into
from kunserve_extras.vllm_body.repeats import do


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [.., n] as contiguous [rows, n]; itself where it is that."""
    return x if x.ndim == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()


def normed(
    weight: torch.Tensor, eps: float, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``x`` [.., n] by its root mean square, times ``weight`` [n]; with ``residual`` the sum's.

    Then also the sum, which is rounded to the model's type before it is normalised.
    """
    total = x if residual is None else x + residual
    rows = as_rows(total)
    found = torch.empty_like(rows)
    do(norm_into(rows, weight, eps, found))
    found = found if total.ndim == 2 else found.view(total.shape)
    return found if residual is None else (found, total)


def gated(operation: Callable[[torch.Tensor, torch.Tensor], None], x: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of ``x`` [.., 2 n] times the second, by ``operation`` on both."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    operation(out, x)
    return out
