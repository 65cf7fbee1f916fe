"""What a sparse MLP works in: memory that is taken once, so that recorded steps can use it."""

from dataclasses import dataclass, fields

import torch

from kunserve.engine.attention import TORCH_DTYPES
from kunserve.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """For T tokens, k experts of each. A pair is a token with one of them: number t k + place."""

    logits: torch.Tensor
    """[T, logits] float32: of each expert, and behind them of a shared one."""
    chosen: torch.Tensor
    """[T, k] int32, ascending."""
    shares: torch.Tensor
    """[T, k] float32, of those."""
    pairs: torch.Tensor
    """[T k] int32: those whose experts are held, ordered by expert, each expert's ascending."""
    starts: torch.Tensor
    """[held + 1] int32: where each held expert's begin in ``pairs``."""
    gated: torch.Tensor
    """[T k, inner], in the order of ``pairs``."""
    products: torch.Tensor
    """[T, k, hidden], what each expert makes of a token, by pair. Of experts that are not held,
    whatever was there."""
    sums: torch.Tensor
    """[T, hidden] float32, if they are added up over ranks; else of no rows."""

    @classmethod
    def of(
        cls, spec: ModelSpec, num_tokens: int, device: torch.device, *, has_sums: bool
    ) -> "ExpertRoom":
        """New memory for steps of up to so many tokens."""
        experts, dtype = spec.experts, TORCH_DTYPES[spec.dtype]
        assert experts is not None
        chosen, pairs = (num_tokens, experts.per_token), num_tokens * experts.per_token
        return cls(
            torch.zeros(num_tokens, experts.num_logits, device=device),
            torch.zeros(chosen, dtype=torch.int32, device=device),
            torch.zeros(chosen, device=device),
            torch.zeros(pairs, dtype=torch.int32, device=device),
            torch.zeros(experts.held + 1, dtype=torch.int32, device=device),
            torch.zeros(pairs, spec.intermediate_size, dtype=dtype, device=device),
            torch.zeros(*chosen, spec.hidden_size, dtype=dtype, device=device),
            torch.zeros(num_tokens if has_sums else 0, spec.hidden_size, device=device),
        )

    def first(self, num_tokens: int) -> "ExpertRoom":
        """That of the first tokens."""
        num_pairs = num_tokens * self.chosen.shape[1]
        return ExpertRoom(
            self.logits[:num_tokens],
            self.chosen[:num_tokens],
            self.shares[:num_tokens],
            self.pairs[:num_pairs],
            self.starts,
            self.gated[:num_pairs],
            self.products[:num_tokens],
            self.sums[:num_tokens],
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return tuple(getattr(self, field.name) for field in fields(self))


def expert_bytes(num_tokens: int, spec: ModelSpec) -> int:
    """What an ``ExpertRoom`` takes beyond what ``StepLimits.buffer_bytes`` counts: the products.

    That counts the routing of a CPU, which is more than this one, what is gated, and sums.
    """
    if spec.experts is None:
        return 0
    return num_tokens * spec.experts.per_token * spec.hidden_size * spec.dtype_bytes
