"""Rotary position tables, as Hugging Face computes them, grown as positions are reached."""

import dataclasses
import math

import torch

from kunserve.model.rope import LinearRope, Llama3Rope, YarnRope
from kunserve.model.spec import ModelSpec

FIRST_POSITIONS = 2048
PIECE_POSITIONS = 4096


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians per position of each of the head_dim / 2 pairs, float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    match spec.rope_scaling:
        case None:
            return plain
        case LinearRope(factor):
            return plain / factor
        case Llama3Rope(factor, low, high, original):
            turns = original * plain / (2 * math.pi)  # of a pair in the original context
            kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            return plain * (kept + (1 - kept) / factor)
        case YarnRope() as yarn:
            kept = 1 - _ramp(spec, yarn)
            return plain * (kept + (1 - kept) / yarn.factor)


def _ramp(spec: ModelSpec, yarn: YarnRope) -> torch.Tensor:
    """How much each pair is slowed down, from 0 to 1."""

    def pair_that_turns(times: float) -> float:
        wavelength = yarn.original_max_position / times
        return (
            spec.head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(spec.rope_theta))
        )

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.rounds_ramp:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.head_dim - 1)
    pairs = torch.arange(spec.head_dim // 2, dtype=torch.float32)
    return ((pairs - first) / (max(last - first, 1e-3))).clamp(0.0, 1.0)


def amplitude(spec: ModelSpec) -> float:
    """By which cosines and sines are multiplied. Keys and queries are, so scores by its square."""
    yarn = spec.rope_scaling.amplitude if isinstance(spec.rope_scaling, YarnRope) else 1.0
    return yarn * math.sqrt(spec.attention_scale)


def rope_tables(spec: ModelSpec) -> "tuple[RopeTable, ...]":
    """The model's table, and behind it the other one that some layers have, if there is one."""
    if spec.num_ropes == 1:
        return (RopeTable(spec),)
    if spec.local_rope_theta is None:
        other = dataclasses.replace(spec, rope_scaling=LinearRope(math.inf))  # turns by 0
    else:
        other = dataclasses.replace(spec, rope_theta=spec.local_rope_theta, rope_scaling=None)
    return RopeTable(spec), RopeTable(other)


class RopeTable:
    """cos and sin of every position so far: float32 [positions, 2, head_dim / 2]."""

    def __init__(self, spec: ModelSpec) -> None:
        self._frequencies = inverse_frequencies(spec)
        self._amplitude = amplitude(spec)
        self._table = torch.empty(0, 2, spec.head_dim // 2)
        self._num_known, self._address = 0, self._table.data_ptr()

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
            if self._amplitude != 1.0:
                piece *= self._amplitude
        self._table = table
        self._num_known, self._address = num_positions, table.data_ptr()

    def table(self, num_positions: int) -> torch.Tensor:
        """The table, once it holds at least ``num_positions``. Another one may replace it later."""
        if self._table.shape[0] < num_positions:
            self.reserve(max(FIRST_POSITIONS, 1 << (num_positions - 1).bit_length()))
        return self._table

    def address(self, num_positions: int) -> int:
        """Where ``table`` starts. Behind a step nothing of torch is asked, because that is slow."""
        if num_positions > self._num_known:
            self.table(num_positions)
        return self._address

    @property
    def num_bytes(self) -> int:
        """In use now."""
        return self._table.nbytes
