"""Layers at few rows without their Python: what one does is written down once, then repeated.

A layer is a dozen kernels, and some hundred calls of Python around them. At few rows those take a
fifth of a step and more. The first step of so many rows runs a layer's code while it is watched:
each operation is kept with the tensors that it had, and the next such step does the same on the
same memory. What cannot be repeated so is left to the layer's code, for good.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode

FEW_ROWS = 32
"""Of a step whose layers are repeated: beyond, the kernels take far longer than what is saved."""
_ALIGNMENT_BYTES = 64
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("_reshape_alias", "_unsafe_view", "view", "as_strided", "alias", "detach"),
        *("chunk", "split", "split_with_sizes", "unbind", "select", "slice", "narrow"),
        *("expand", "squeeze", "unsqueeze", "t", "transpose"),
    )
)
_MAKES = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty")
)
_GIVES: dict[str, Callable[..., object]] = {
    "aten::add": torch.add,
    "aten::mul": torch.mul,
    "aten::cat": torch.cat,
}
"""Operations with a result of their own, and what writes it into memory that is there."""
_CHANGES = frozenset(("aten::copy_", "aten::add_", "aten::mul_"))
_RESULTS = frozenset(
    f"aten::{name}"
    for name in (
        *("native_layer_norm", "mean", "pow", "rsqrt", "sub", "neg"),
        *("gelu", "relu", "sigmoid", "silu", "tanh"),
    )
)
_COPIES = frozenset(("aten::clone", "aten::_to_copy"))
_OTHER = object()
"""A kind of argument that is not looked into."""
Call = Callable[[], object]
_Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Known:
    """Operations that may be repeated beside those that torch has, by their names in its schemas.

    What they read are their arguments alone.
    """

    changes: frozenset[str]
    """They change an argument."""
    results: frozenset[str]
    """They have results of their own."""

    @classmethod
    def of(cls, changes: Iterable[str] = (), results: Iterable[str] = ()) -> "Known":
        """Those, and torch's."""
        return cls(_CHANGES.union(changes), _RESULTS.union(results))


class Rooms:
    """Memory of repeated layers. Two rooms in turn: a layer reads what the one before it wrote.

    Steps of all sizes share it, because there is one step at a time.
    """

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes`` for each room, and as many for rows that come from elsewhere."""
        self._memory = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(3)]

    def room(self, layer: int) -> torch.Tensor:
        """What layer number ``layer`` writes."""
        return self._memory[layer % 2]

    @property
    def buffer_bytes(self) -> int:
        """Of all."""
        return sum(one.nbytes for one in self._memory)

    @property
    def entry(self) -> torch.Tensor:
        """Where a layer gets rows that no layer has written."""
        return self._memory[2]


class _Shelf:
    """A room that is given out from its start on."""

    def __init__(self, room: torch.Tensor) -> None:
        self._room = room
        self._end = 0

    def take(self, like: torch.Tensor) -> torch.Tensor | None:
        """A tensor like this one, if it can be had here."""
        begin, num_bytes = self._end, like.nbytes
        end = begin + -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if end > len(self._room) or not like.is_contiguous():
            return None
        self._end = end
        return self._room[begin : begin + num_bytes].view(like.dtype).view(like.shape)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Writer(TorchDispatchMode):  # type: ignore[misc]
    """Watches a layer's code, and gives it memory that is there in the next step too.

    What cannot be repeated is done all the same, because code may have begun what it must end.
    """

    def __init__(self, room: torch.Tensor, storages: set[int], known: Known) -> None:
        """``storages`` are those that may be read."""
        super().__init__()
        self.calls: list[Call] = []
        self.refusal: str | None = None
        self._shelf = _Shelf(room)
        self._storages = storages
        self._known = known
        self._is_doing = False

    def do(self, call: Call) -> object:
        """Now, and each time that the layer is repeated."""
        before, self._is_doing = self._is_doing, True
        try:
            found = call()
        finally:
            self._is_doing = before
        self.calls.append(call)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        call = partial(func, *args, **(kwargs or {}))
        if self._is_doing or self.refusal is not None:
            return call()
        name = func._schema.name
        for one in trees.tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor) and _storage(one) not in self._storages:
                self.refusal = f"{name} of what may be elsewhere in the next step"
                return call()
        if name in _VIEWS:
            return call()
        if name in self._known.changes:
            return self.do(call)
        found = call()
        if name not in _MAKES | _COPIES | self._known.results and name not in _GIVES:
            self.refusal = name
            return found
        leaves, structure = trees.tree_flatten(found)
        places = [place for place in map(self._shelf.take, leaves) if place is not None]
        if len(places) < len(leaves):
            self.refusal = f"{name} of {tuple(leaves[0].shape)} finds no room"
            return found
        if name in _COPIES:
            self.do(partial(places[0].copy_, args[0]))
        elif name in _GIVES:
            self.do(partial(_GIVES[name], *args, out=places[0], **(kwargs or {})))
        elif name not in _MAKES:
            assert not func._schema.is_mutable, func
            self.do(partial(_once_more, call, places))
        return trees.tree_unflatten(places, structure)


def _once_more(call: Call, places: list[torch.Tensor]) -> None:
    for place, one in zip(places, trees.tree_leaves(call()), strict=True):
        place.copy_(one)


_writer: _Writer | None = None
"""The one at work, of the step that this process computes."""


def do(call: Call) -> None:
    """Do what no dispatcher of torch sees: now, and each time that the layer is repeated.

    The addresses in ``call`` are those of tensors that were made in the layer.
    """
    if _writer is None:
        call()
    else:
        _writer.do(call)


@dataclass(frozen=True, slots=True)
class _Written:
    inputs: tuple[torch.Tensor, ...]
    """Where the layer reads what it is given."""
    calls: tuple[Call, ...]
    outputs: Any


class RepeatedLayer:
    """In place of a layer's ``forward``."""

    def __init__(
        self, layer: nn.Module, number: int, rooms: Rooms, known: Known | None = None
    ) -> None:
        self._layer = layer
        self._plain: Callable[..., Any] = layer.forward
        self._rooms = rooms
        self._room, self._before = rooms.room(number), rooms.room(number + 1)
        self._known = Known.of() if known is None else known
        self._written: dict[_Key, _Written] = {}
        self.is_plain = False
        """Whether its code runs every time."""
        self.refusal: str | None = None
        """Why it cannot be repeated."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        everything = (*args, *kwargs.values())
        given = [one for one in everything if isinstance(one, torch.Tensor)]
        if self.is_plain or not all(0 < len(one) <= FEW_ROWS for one in given if one.ndim):
            return self._plain(*args, **kwargs)
        key: _Key = (tuple(kwargs), *map(self._place, everything))
        if _OTHER in key:
            return self._refuse("a layer is given what is not looked into", args, kwargs)
        written = self._written.get(key)
        if written is None:
            return self._write(key, args, kwargs)
        for place, one in zip(written.inputs, given, strict=True):
            if place is not one:
                place.copy_(one)
        for call in written.calls:
            call()
        return written.outputs

    def _refuse(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.is_plain, self.refusal = True, why
        return self._plain(*args, **kwargs)

    def _place(self, given: Any) -> Hashable:
        """What must be alike for a repetition: shapes, and where the layer before has written."""
        if isinstance(given, torch.Tensor):
            is_room = _storage(given) == self._before.data_ptr()
            return given.shape, given.dtype, given.data_ptr() if is_room else None
        return given if given is None or isinstance(given, (bool, int, float, str)) else _OTHER

    def _write(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer's code, watched; what it gives."""
        global _writer
        entry = _Shelf(self._rooms.entry)
        arguments, structure = trees.tree_flatten((args, kwargs))
        inputs: list[torch.Tensor] = []
        for index, given in enumerate(arguments):
            here = given
            if isinstance(given, torch.Tensor) and _storage(given) != self._before.data_ptr():
                here = entry.take(given)
                if here is None:
                    return self._refuse("what a layer is given finds no room", args, kwargs)
                here.copy_(given)
            if isinstance(given, torch.Tensor):
                arguments[index] = here
                inputs.append(here)
        own = (*self._layer.parameters(), *self._layer.buffers())
        rooms = self._room, self._before, self._rooms.entry
        storages = {_storage(one.data) for one in own} | {_storage(room) for room in rooms}
        args, kwargs = trees.tree_unflatten(arguments, structure)
        writer = _writer = _Writer(self._room, storages, self._known)
        try:
            with writer:
                outputs = self._plain(*args, **kwargs)
        finally:
            _writer = None
        leaves = [one for one in trees.tree_leaves(outputs) if isinstance(one, torch.Tensor)]
        if writer.refusal is None and any(_storage(one) != self._room.data_ptr() for one in leaves):
            writer.refusal = "a result that the layer did not write"
        if writer.refusal is None:
            self._written[key] = _Written(tuple(inputs), tuple(writer.calls), outputs)
            return outputs
        self.is_plain, self.refusal = True, writer.refusal
        # They may lie where the next layer is given what comes from elsewhere.
        return trees.tree_map_only(torch.Tensor, torch.Tensor.clone, outputs)
