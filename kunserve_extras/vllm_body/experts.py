"""Experts as our kernels multiply by them: what a token gets does not depend on who else is there.

vLLM's grouped products round otherwise in another batch. Here each expert's rows are multiplied as
any matrix's are, and a token's parts are added in the order of its own experts.
"""

import torch

from kunserve.engine.cpu.kernels.ops import Finish, linear
from kunserve.engine.cpu.kernels.panels import PanelMatrix

FINISHES = {"silu": Finish.SWIGLU, "gelu_tanh": Finish.GEGLU}
"""By the names that vLLM has for activations."""


def are_known(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether our kernels multiply by experts of these shapes: [experts, rows, columns] each."""
    return all(
        one.ndim == 3
        and one.dtype in (torch.bfloat16, torch.float32)
        and one.shape[2] * one.element_size() % 16 == 0
        for one in (gate_up, down)
    )


def _gate_up(weight: torch.Tensor) -> PanelMatrix:
    return PanelMatrix(weight.view(-1, weight.shape[2]), is_paired=True, num_matrices=len(weight))


def _down(weight: torch.Tensor) -> PanelMatrix:
    return PanelMatrix(weight.view(-1, weight.shape[2]), num_matrices=len(weight))


def put_experts_in_panels(gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """The matrices' bytes become panels where they lie."""
    _gate_up(gate_up).put_into_panels()
    _down(down).put_into_panels()


def add_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    finish: Finish,
) -> torch.Tensor:
    """Float32 [tokens, hidden]: of each row of ``x`` what its experts say, times its ``weights``.

    ``weights`` and ``ids`` are [tokens, experts of each].
    """
    num_tokens, per_token = ids.shape
    flat = ids.reshape(-1).long()
    order = flat.argsort(stable=True)
    rows = x.index_select(0, order // per_token)
    first, second = _gate_up(gate_up), _down(down)
    parts = torch.empty(len(flat), second.matrix(0).shape[0], dtype=torch.float32)
    begin = 0
    for expert, number in enumerate(torch.bincount(flat, minlength=len(gate_up)).tolist()):
        if number:
            some = slice(begin, begin + number)
            inner = linear(rows[some], first.matrix(expert), finish=finish)
            linear(inner, second.matrix(expert), out=parts[some], finish=Finish.FLOAT)
            begin += number
    by_token = torch.empty_like(parts)
    by_token[order] = parts
    by_token = by_token.view(num_tokens, per_token, -1)
    total = torch.zeros_like(by_token[:, 0])
    for number in range(per_token):
        total += by_token[:, number] * weights[:, number, None].float()
    return total
