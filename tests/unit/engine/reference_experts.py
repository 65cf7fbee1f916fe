"""The sparse MLP plainly: an expert after the other, over the rows that chose it."""

from collections.abc import Callable

import torch

from kunserve.engine.cpu.kernels.ops import Finish, Matrix, linear
from kunserve.engine.cpu.kernels.packed import PackedMatrix
from kunserve.engine.cpu.kernels.panels import PanelMatrix
from kunserve.engine.layer_weights import LayerWeights
from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec


def choose(logits: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's experts, of equal ones the first, and their weights: [T, per_token]."""
    ranked = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    chosen = ranked[:, : experts.per_token]
    weights = logits.softmax(dim=-1).gather(1, chosen)
    if experts.normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights


def run_expert(x: torch.Tensor, gate_up: Matrix, down: Matrix) -> torch.Tensor:
    return linear(linear(x, gate_up, finish=Finish.SWIGLU), down, finish=Finish.FLOAT)


def add_experts(
    normed: torch.Tensor,
    hidden: torch.Tensor,
    weights: LayerWeights,
    spec: ModelSpec,
    run: Callable[[torch.Tensor, Matrix, Matrix], torch.Tensor] = run_expert,
) -> None:
    """Add to ``hidden`` [T, hidden] what the experts make of ``normed``."""
    experts = spec.experts
    assert experts is not None and weights.router is not None
    logits = normed.float() @ weights.router.float().t()
    chosen, shares = choose(logits[:, : experts.number], experts)
    sums = torch.zeros(hidden.shape)
    for expert in chosen.unique().tolist():
        rows, places = torch.where(chosen == expert)
        gate_up = _one_of(weights.experts_gate_up, expert, experts.held)
        down = _one_of(weights.experts_down, expert, experts.held)
        found = run(normed[rows], gate_up, down)
        sums[rows] += found.float() * shares[rows, places, None]
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        found = run(normed, weights.shared_gate_up, weights.shared_down)
        sums += found.float() * logits[:, experts.number :].sigmoid()
    hidden.add_(sums.to(hidden.dtype))


def _one_of(matrices: Matrix, expert: int, number: int) -> Matrix:
    """One expert's matrix."""
    if isinstance(matrices, PackedMatrix):
        return matrices.run(expert)
    if isinstance(matrices, PanelMatrix):
        return matrices.matrix(expert)
    return matrices.view(number, -1, matrices.shape[1])[expert]
