"""Memory that every layer of a step writes anew."""

from dataclasses import dataclass

import torch

from kunserve.engine.attention import TORCH_DTYPES
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.ops.expert_room import ExpertRoom


def dense_size(spec: ModelSpec) -> int:
    """Inner width of the MLP that every token goes to: of a sparse model's shared expert."""
    if spec.experts is None:
        return spec.intermediate_size
    return spec.experts.shared_size or 0


@dataclass(frozen=True, slots=True)
class Scratch:
    """Rows of steps, [T, width] in the model's type."""

    normed: torch.Tensor
    qkv: torch.Tensor
    mixed: torch.Tensor
    """What attention gives."""
    gate_up: torch.Tensor
    gated: torch.Tensor
    experts: ExpertRoom | None

    @classmethod
    def of(
        cls, spec: ModelSpec, num_tokens: int, device: torch.device, *, has_sums: bool
    ) -> "Scratch":
        """New memory for steps of up to so many tokens; ``has_sums`` as in ``ExpertRoom``."""
        inner, dtype = dense_size(spec), TORCH_DTYPES[spec.dtype]
        room = None
        if spec.experts is not None:
            room = ExpertRoom.of(spec, num_tokens, device, has_sums=has_sums)

        def rows(width: int) -> torch.Tensor:
            return torch.zeros(num_tokens, width, dtype=dtype, device=device)

        return cls(
            rows(spec.hidden_size),
            rows(spec.qkv_size),
            rows(spec.q_size),
            rows(2 * inner),
            rows(inner),
            room,
        )

    def first(self, num_tokens: int) -> "Scratch":
        """That of the first tokens."""
        room = None if self.experts is None else self.experts.first(num_tokens)
        return Scratch(
            self.normed[:num_tokens],
            self.qkv[:num_tokens],
            self.mixed[:num_tokens],
            self.gate_up[:num_tokens],
            self.gated[:num_tokens],
            room,
        )

    @property
    def num_tokens(self) -> int:
        """So many at most."""
        return len(self.normed)

    @property
    def num_bytes(self) -> int:
        """All of it."""
        rows = self.normed, self.qkv, self.mixed, self.gate_up, self.gated
        of_experts = () if self.experts is None else self.experts.tensors
        return sum(tensor.nbytes for tensor in (*rows, *of_experts))
