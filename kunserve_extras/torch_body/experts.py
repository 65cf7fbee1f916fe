"""The sparse MLP in torch, on any device: what csrc/experts.h does, an expert at a time."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from kunserve.engine.cpu.kernels.ops import Matrix
from kunserve.engine.cpu.kernels.packed import PackedMatrix
from kunserve.engine.cpu.kernels.panels import PanelMatrix
from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec

RunExpert: TypeAlias = Callable[[torch.Tensor, Matrix, Matrix], torch.Tensor]
"""Gives what the expert with these gate and up rows and this down matrix makes of some rows."""
AddUp: TypeAlias = Callable[[torch.Tensor], None]
"""Makes a tensor of each rank the sum of them all. Every rank calls it at the same places."""


class ExpertWeights(Protocol):
    """A layer's tensors, of which these are there."""

    router: torch.Tensor | None
    experts_gate_up: Matrix
    experts_down: Matrix
    shared_gate_up: Matrix
    shared_down: Matrix


def expert_bytes(num_tokens: int, spec: ModelSpec) -> int:
    """What ``add_experts`` takes beside its arguments, if all tokens choose one expert."""
    if spec.experts is None:
        return 0
    inner = max(spec.intermediate_size, spec.experts.shared_size or 0)
    rows = num_tokens * spec.hidden_size * (2 * spec.dtype_bytes + 5 * 4)
    gated = num_tokens * 3 * inner * spec.dtype_bytes
    logits = num_tokens * spec.experts.num_logits * 6 * 4
    return rows + gated + logits + spec.experts.num_logits * spec.hidden_size * 4


def choose(logits: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's experts, of equal ones the first, and their weights: [T, per_token]."""
    ranked = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    chosen = ranked[:, : experts.per_token]
    weights = logits.softmax(dim=-1).gather(1, chosen)
    if experts.normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights


def add_experts(
    normed: torch.Tensor,
    hidden: torch.Tensor,
    weights: ExpertWeights,
    spec: ModelSpec,
    run_expert: RunExpert,
    first_expert: int = 0,
    add_up: AddUp | None = None,
) -> None:
    """Add to ``hidden`` [T, hidden] what the experts make of ``normed``.

    A token's experts are summed in the order of their numbers, in float32, a shared one last.
    Experts before ``first_expert``, and behind those whose weights are held, are other ranks';
    ``add_up`` makes the sum that of all ranks.
    """
    experts = spec.experts
    assert experts is not None and weights.router is not None
    logits = normed.float() @ weights.router.float().t()
    chosen, shares = choose(logits[:, : experts.number], experts)
    sums = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in chosen.unique().tolist():
        own = expert - first_expert
        if own not in range(experts.held):
            continue
        rows, places = torch.where(chosen == expert)
        gate_up = _one_of(weights.experts_gate_up, own, experts.held)
        down = _one_of(weights.experts_down, own, experts.held)
        found = run_expert(normed[rows], gate_up, down)
        sums[rows] += found.float() * shares[rows, places, None]
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        found = run_expert(normed, weights.shared_gate_up, weights.shared_down)
        sums += found.float() * logits[:, experts.number :].sigmoid()
    if add_up is not None:
        add_up(sums)
    hidden.add_(sums.to(hidden.dtype))


def _one_of(matrices: Matrix, expert: int, number: int) -> Matrix:
    """One expert's matrix."""
    if isinstance(matrices, PackedMatrix):
        return matrices.run(expert)
    if isinstance(matrices, PanelMatrix):
        return matrices.matrix(expert)
    return matrices.view(number, -1, matrices.shape[1])[expert]
