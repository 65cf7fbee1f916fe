"""Rotary position tables, as Hugging Face computes them, grown as positions are reached."""

import math

import torch

from kunserve.core.model_spec import ModelSpec

FIRST_POSITIONS = 2048


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians per position of each of the head_dim / 2 pairs, float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    if spec.rope_scaling is None:
        return plain
    factor, low, high, original = spec.rope_scaling
    turns = original * plain / (2 * math.pi)  # how often a pair turns in the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (blend + (1 - blend) / factor)


class RopeTable:
    """cos and sin of every position so far: float32 [positions, 2, head_dim / 2]."""

    def __init__(self, spec: ModelSpec) -> None:
        self._frequencies = inverse_frequencies(spec)
        self._table = torch.empty(0, 2, spec.head_dim // 2)

    def address(self, num_positions: int) -> int:
        """Where the table starts, once it holds at least ``num_positions``. May move later."""
        if self._table.shape[0] < num_positions:
            size = max(FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            angles = torch.outer(torch.arange(size).float(), self._frequencies)
            self._table = torch.stack((angles.cos(), angles.sin()), dim=1).contiguous()
        return self._table.data_ptr()
