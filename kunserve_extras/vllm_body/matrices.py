"""How a model's matrices lie and are multiplied by: as our kernels do, in vLLM's modules.

Where vLLM's own multiply, a row's bits depend on how many rows there are, and most of them keep a
copy of the weights that is nobody's to drop. Ours read what is in the arena and nothing else, and
a row's bits depend on the row alone, on every kind of processor.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from kunserve.engine.cpu.kernels.ops import Finish, linear, panel_linear
from kunserve.engine.cpu.kernels.panels import PanelMatrix
from kunserve_extras.vllm_body.repeats import do
from kunserve_extras.vllm_body.short_ways import as_rows

Room = Callable[[int, int], torch.Tensor]
"""Gives float32 [rows, width]."""


class Product(Protocol):
    """What a module calls with its rows, its weight and its bias."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x`` [.., k] times ``weight`` [n, k] transposed, and ``bias`` [n]."""
        ...


def is_known(weight: torch.Tensor) -> bool:
    """Whether our kernels multiply by such a matrix."""
    if weight.ndim != 2 or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    return weight.is_contiguous() and weight.shape[1] * weight.element_size() % 16 == 0


def put_in_panels(weight: torch.Tensor, finish: Finish) -> Product:
    """The matrix's bytes become panels where they lie; by what such a one is multiplied."""
    PanelMatrix(weight, finish.is_gated).put_into_panels()
    return partial(_by_panels, finish)


def _by_panels(
    finish: Finish, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    plain = weight.data  # vLLM's parameters take a detour through Python at every look
    rows, width = as_rows(x), len(plain) // 2 if finish.is_gated else len(plain)
    found = torch.empty(len(rows), width, dtype=x.dtype)
    do(panel_linear(rows, PanelMatrix(plain, finish.is_gated), bias, found, finish))
    return found if x.ndim == 2 else found.view(*x.shape[:-1], found.shape[1])


class HeadProduct:
    """By an output head, which may be the embedding too and so lies row by row.

    The logits are float32, not rounded to the model's type as vLLM's are.
    """

    def __init__(self) -> None:
        self.room: Room = torch.empty
        """What it gives is used until the next call."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See ``Product``."""
        out = self.room(len(x), len(weight))
        return linear(x.contiguous(), weight, bias, out=out, finish=Finish.FLOAT)
