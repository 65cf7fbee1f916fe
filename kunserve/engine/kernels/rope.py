"""Rotary position tables, as Hugging Face computes them, grown as positions are reached."""

import math

import torch

from kunserve.core.model_spec import ModelSpec

FIRST_POSITIONS = 2048
PIECE_POSITIONS = 4096


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

    def reserve(self, num_positions: int) -> None:
        """Work out this many positions now, so that no step has to: 65,000 take 120 ms."""
        known = self._table.shape[0]
        if num_positions <= known:
            return
        table = torch.empty(num_positions, 2, len(self._frequencies))
        table[:known] = self._table
        # A piece at a time, because the angles of all would double the memory.
        for first in range(known, num_positions, PIECE_POSITIONS):
            piece = table[first : first + PIECE_POSITIONS]
            positions = torch.arange(first, first + len(piece)).float()
            angles = torch.outer(positions, self._frequencies)
            piece[:, 0], piece[:, 1] = angles.cos(), angles.sin()
        self._table = table

    def table(self, num_positions: int) -> torch.Tensor:
        """The table, once it holds at least ``num_positions``. Another one may replace it later."""
        if self._table.shape[0] < num_positions:
            self.reserve(max(FIRST_POSITIONS, 1 << (num_positions - 1).bit_length()))
        return self._table

    def address(self, num_positions: int) -> int:
        """Where ``table`` starts."""
        return self.table(num_positions).data_ptr()

    @property
    def num_bytes(self) -> int:
        """In use now."""
        return self._table.nbytes
