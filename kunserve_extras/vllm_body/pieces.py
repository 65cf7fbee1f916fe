"""Parts of a model whose parameters are loaded, dropped and come back together."""

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from kunserve_extras.vllm_body.seats import Seats

_NOTHING = 0
_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class _Raw(NamedTuple):
    """A parameter as files fill it, before it gets the form in which it is computed with."""

    owner: nn.Module
    name: str
    """In its owner."""
    full_name: str
    parameter: nn.Parameter
    """The model's own: it knows how to be loaded."""
    shape: torch.Size
    dtype: torch.dtype
    first: torch.Tensor | None
    """What it is where files do not have it."""


class Piece:
    """A layer, or all modules outside the layers. Its parameters are nowhere until it is filled."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], prefix: str = "") -> None:
        """``modules`` by their names in the model; ``prefix`` is what the piece's begin with."""
        self._modules = modules
        self._prefix = prefix
        self._raw = [
            _Raw(
                owner,
                name,
                f"{path}.{name}",
                parameter,
                parameter.shape,
                parameter.dtype,
                parameter.data.clone() if parameter.ndim < 2 else None,
            )
            for path, owner in modules
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self.forget()

    @property
    def signature(self) -> tuple[tuple[str, torch.Size], ...]:
        """Pieces with the same are alike."""
        return tuple((raw.full_name.removeprefix(self._prefix), raw.shape) for raw in self._raw)

    @property
    def num_values(self) -> int:
        """Of all parameters as files fill them, tied ones once."""
        unique = {id(raw.parameter): raw.shape.numel() for raw in self._raw}
        return sum(unique.values())

    def owners(self) -> list[nn.Module]:
        """Modules with parameters of their own."""
        return list(dict.fromkeys(raw.owner for raw in self._raw))

    def make_raw(self) -> None:
        """New memory for every parameter, so that files can fill them."""
        made: set[int] = set()
        for raw in self._raw:
            raw.owner.register_parameter(raw.name, raw.parameter)
            if id(raw.parameter) not in made:
                made.add(id(raw.parameter))
                fresh = _own_pages(raw.shape, raw.dtype)
                raw.parameter.data = fresh if raw.first is None else fresh.copy_(raw.first)

    def parameters(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """As they are now, for ``put_back``."""
        return [
            (owner, name, parameter)
            for _, owner in self._modules
            for name, parameter in owner.named_parameters(recurse=False)
        ]

    @staticmethod
    def put_back(parameters: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        """They are the modules' again, whatever has taken their places."""
        for owner, name, parameter in parameters:
            owner.register_parameter(name, parameter)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters as they are now, tied ones once."""
        seen: set[int] = set()
        for path, owner in self._modules:
            for name, parameter in owner.named_parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{path}.{name}".removeprefix(self._prefix), parameter

    def forget(self) -> None:
        """Give up the memory of all parameters."""
        # A module that arranges them anew may have others in their places, over the same memory.
        for parameter in [raw.parameter for raw in self._raw] + [one for _, one in self.named()]:
            parameter.data = parameter.data.new_empty(_NOTHING)

    def sit(self, views: dict[str, torch.Tensor]) -> None:
        """The parameters are what lies there, now and whatever is written there later."""
        self.forget()
        for name, parameter in self.named():
            parameter.data = views[name]

    def seats(self) -> Seats:
        """Which its parameters take as they are now."""
        return Seats.of((name, parameter.data) for name, parameter in self.named())


def _own_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the system with the tensor: a heap would keep layers of it."""
    num_bytes = shape.numel() * dtype.itemsize
    if num_bytes < mmap.PAGESIZE:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, _OWN), dtype=dtype).view(shape)


def pieces_of(module: nn.Module, layers: nn.ModuleList) -> tuple[list[Piece], Piece]:
    """A piece for each layer, and one of what is outside."""
    paths = {id(one): path for path, one in module.named_modules()}
    inside: set[int] = set()
    found = []
    for layer in layers:
        prefix = f"{paths[id(layer)]}."
        named = list(layer.named_modules(prefix=paths[id(layer)]))
        inside.update(id(one) for _, one in named)
        found.append(Piece(named, prefix))
    outside = [(path, one) for path, one in module.named_modules() if id(one) not in inside]
    return found, Piece(outside)
