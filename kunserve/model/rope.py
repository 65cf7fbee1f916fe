"""How a model's rotary embedding reaches further than it was trained for."""

import math
from typing import TypeAlias

from msgspec import Struct


class LinearRope(Struct, frozen=True, tag=True):
    """Every position divided by ``factor``."""

    factor: float


class Llama3Rope(Struct, frozen=True, tag=True):
    """Llama 3's: slow pairs are slowed down by ``factor``, quick ones are left alone."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class YarnRope(Struct, frozen=True, tag=True):
    """YaRN's (Peng et al., 2023): as Llama 3's, along a ramp over the pairs, and amplified."""

    factor: float
    original_max_position: int
    amplitude: float
    """By which cosines and sines are multiplied."""
    beta_fast: float = 32.0
    """Pairs that turn more often than this in the original context are left alone."""
    beta_slow: float = 1.0
    """Pairs that turn less often are slowed down by the whole factor."""
    rounds_ramp: bool = True
    """Whether the ramp begins and ends at whole pairs."""


RopeScaling: TypeAlias = LinearRope | Llama3Rope | YarnRope


def reach_of(scaling: RopeScaling | None, max_position: int) -> int:
    """Positions that the model can be asked for, if its files say ``max_position``."""
    match scaling:
        case LinearRope(factor):
            return int(max_position * factor)
        case YarnRope() as yarn:
            return max(max_position, int(yarn.original_max_position * yarn.factor))
    return max_position


def yarn_amplitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN's authors recommend (their equation 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
