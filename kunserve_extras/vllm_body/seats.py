"""Where the parameters of a module lie in a piece of the weights range."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kunserve.engine.weights.layout import ALIGNMENT_BYTES


class Seat(NamedTuple):
    """One parameter: bytes from the start of the piece, and what is there."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Seats:
    """The parameters of one module, one behind the other."""

    seats: tuple[Seat, ...]
    num_bytes: int

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, torch.Tensor]]) -> "Seats":
        """In this order, each where a cache line begins. A tensor of two names has one seat."""
        found: list[Seat] = []
        end = 0
        for name, tensor in parameters:
            found.append(Seat(name, end, tuple(tensor.shape), tensor.dtype))
            end += -(-found[-1].num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(found), end)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in order."""
        return tuple(seat.name for seat in self.seats)

    def views(self, piece: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors over the bytes of the piece, [num_bytes or more] uint8, by name; no copies."""
        return {
            name: piece[offset : offset + torch.Size(shape).numel() * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for name, offset, shape, dtype in self.seats
        }
