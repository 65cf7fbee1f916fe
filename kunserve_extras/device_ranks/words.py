"""What rank 0 says to ranks with a device each, beside what it says to all (``ranks.control``)."""

from dataclasses import dataclass
from typing import Any

from kunserve.core.layout import LayerRange
from kunserve_extras.device_ranks.sums import SumsBy


@dataclass(frozen=True, slots=True)
class OpenSums:
    """Meet in a process group. With it comes the file by which ranks find each other."""

    by: SumsBy


@dataclass(frozen=True, slots=True)
class Prepare:
    """Do what may fail of a change to these layers; the answer is a refusal, or None."""

    layers: LayerRange


@dataclass(frozen=True, slots=True)
class CopyUnits:
    """Copy inside of the memory: (from, to, number) of units."""

    copies: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class MoveUnits:
    """Copy units to the window, or from it."""

    unit_runs: tuple[tuple[int, int], ...]
    is_in: bool


@dataclass(frozen=True, slots=True)
class MoveLayer:
    """Copy bytes of a layer's weights to the window, or from it."""

    layer: int
    parts: tuple[tuple[int, int], ...]
    """Of each rank: where they begin, and how many."""
    is_in: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Read these layers from files."""

    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Check:
    """See ``InstanceMemory.check``; the answer tells what lies where."""

    ask_kernel: bool


WORDS: tuple[type[Any], ...] = (OpenSums, Prepare, CopyUnits, MoveUnits, MoveLayer, Load, Check)
