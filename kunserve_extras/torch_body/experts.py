"""The sparse MLP in torch, on any device: what csrc/experts.h does.

Nothing of it asks the host which experts compute, so its steps are recorded as others are.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

from kunserve.engine.layer_weights import LayerWeights
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.table import Ops
from kunserve_extras.torch_body.scratch import Scratch

AddUp: TypeAlias = Callable[[torch.Tensor], None]
"""Makes a tensor of each rank the sum of them all. Every rank calls it at the same places."""


def add_experts(
    hidden: torch.Tensor,
    weights: LayerWeights,
    spec: ModelSpec,
    ops: Ops,
    scratch: Scratch,
    first_expert: int = 0,
    add_up: AddUp | None = None,
) -> None:
    """Add to ``hidden`` [T, hidden] what the experts make of ``scratch.normed``, of as many rows.

    A token's experts are summed in the order of their numbers, in float32, a shared one last.
    Experts before ``first_expert``, and behind those whose weights are held, are other ranks';
    ``add_up`` makes the sum that of all ranks. What ``normed`` holds is lost.
    """
    x, room = scratch.normed, scratch.experts
    assert spec.experts is not None and room is not None and weights.router is not None
    ops.route(x, weights.router, first_expert, room)
    ops.run_experts(x, weights.experts_gate_up, weights.experts_down, first_expert, room)
    shared = None
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        torch.mm(x, weights.shared_gate_up.t(), out=scratch.gate_up)
        ops.gate_mul(scratch.gate_up, scratch.gated)
        shared = torch.mm(scratch.gated, weights.shared_down.t(), out=x)
    if add_up is None:
        ops.sum_experts(first_expert, room, shared, hidden)
        return
    ops.sum_experts(first_expert, room, shared, None)
    add_up(room.sums)
    hidden.add_(room.sums.to(hidden.dtype))
