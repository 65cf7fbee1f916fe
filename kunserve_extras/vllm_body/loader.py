"""Fills a model's parameters from the tensors of a Hugging Face folder, a piece at a time."""

import functools
import re
from collections.abc import Iterator

import torch
from torch import nn

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.core.layout import LayerRange
from kunserve.engine.backend import CpuBackend
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.wrap import wrap
from kunserve.engine.weights.pieces import Piece as Wanted
from kunserve.engine.weights.readers import DummyReader, SafetensorsReader
from kunserve.transport.bulk.movable_memory import WriteGate
from kunserve_extras.vllm_body.pieces import Piece, pieces_of
from kunserve_extras.vllm_body.release import Model
from kunserve_extras.vllm_body.seats import Seats

_AT_ONCE_BYTES = 8 << 20
"""What passes a gate as one."""


def layer_of(name: str) -> int | None:
    """Of which layer a tensor is, by its name in a file; None: it is outside of them."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


class Parameters:
    """A model's parameters: where each will lie, which is known before there is memory."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers, self.ends = pieces_of(model.module, model.layers)
        self._modules: list[list[nn.Module]] = [[layer] for layer in model.layers]
        seats: dict[object, Seats] = {}
        for piece, modules in zip(self.layers, self._modules, strict=True):
            if piece.signature not in seats:
                seats[piece.signature] = self._tried(piece, modules)
        self.layer_seats = [seats[piece.signature] for piece in self.layers]
        self.end_seats = self._tried(self.ends, self.ends.owners())

    def _tried(self, piece: Piece, modules: list[nn.Module]) -> Seats:
        """The seats of a piece once it is loaded: some modules arrange their weights anew."""
        piece.make_raw()
        self.model.finish(modules)
        found = piece.seats()
        piece.forget()
        return found

    @property
    def layer_bytes(self) -> int:
        """Of the largest layer: all get as much."""
        return max(seats.num_bytes for seats in self.layer_seats)

    def parts_of(self, layer: int | None) -> tuple[Piece, Seats, list[nn.Module]]:
        """A layer, or with None what is outside; where it lies; what is told that it is loaded."""
        if layer is None:
            return self.ends, self.end_seats, self.ends.owners()
        return self.layers[layer], self.layer_seats[layer], self._modules[layer]


class ParameterLoader:
    """Implements ``Loader``. A piece is read and arranged beside the arena, then put there."""

    def __init__(
        self,
        parameters: Parameters,
        reader: SafetensorsReader | DummyReader,
        memory: InstanceMemory,
    ) -> None:
        self._parameters = parameters
        self._reader = reader
        self._memory = memory
        self._names: dict[int | None, list[str]] = {}
        for name in reader.names if isinstance(reader, SafetensorsReader) else ():
            self._names.setdefault(layer_of(name), []).append(name)

    def check(self) -> None:
        """See ``Loader``. Of tensors that lack in a piece their number tells when it is loaded."""
        if isinstance(self._reader, DummyReader):
            return
        for layer in (None, *range(len(self._parameters.layers))):
            if layer not in self._names:
                where = "outside the layers" if layer is None else f"of layer {layer}"
                raise ModelFiles(f"{self._parameters.model.name}: no tensor {where} in the folder")

    def load_ends(self) -> None:
        """See ``Loader``."""
        self._load(None, None)

    def load_layers(self, layers: LayerRange, gate: WriteGate | None = None) -> None:
        """See ``Loader``."""
        for layer in range(*layers):
            self._load(layer, gate)

    def _load(self, layer: int | None, gate: WriteGate | None) -> None:
        parameters = self._parameters
        piece, seats, modules = parameters.parts_of(layer)
        views = seats.views(self._bytes_of(layer))
        before = piece.parameters()
        try:
            piece.make_raw()
            self._fill(piece, layer)
            parameters.model.finish(modules)
            if piece.seats() != seats:
                raise UnsupportedModel(
                    f"{parameters.model.name} arranges layer {layer} otherwise than at the start"
                )
            for name, parameter in piece.named():
                _put(parameter.data, views[name], gate)
        except BaseException:
            # The memory may not be written any more, say. Next time a peer may fill it.
            piece.put_back(before)
            raise
        finally:
            if piece.seats().names == seats.names:
                piece.sit(views)

    def _fill(self, piece: Piece, layer: int | None) -> None:
        """Raw parameters get what files say, or what all instances make up alike."""
        if isinstance(self._reader, DummyReader):
            for name, parameter in piece.named():
                if parameter.ndim > 1 or name.endswith("bias"):  # norms are as the model made them
                    self._reader.read(Wanted(layer, name), parameter.data)
            return
        reader, num_values = self._reader, 0

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_values
            for name in self._names[layer]:
                tensor = reader.tensor(name)
                num_values += tensor.numel()
                yield name, tensor

        model = self._parameters.model
        loaded = model.load(tensors())
        if not loaded or (layer is not None and num_values < piece.num_values):
            raise ModelFiles(
                f"{model.name}: tensors are missing: {num_values} values of "
                f"{piece.num_values} in layer {layer}"
            )

    def _bytes_of(self, layer: int | None) -> torch.Tensor:
        """A piece of the weights range, mapped or not."""
        layout = self._memory.layout
        offset, num_bytes = 0, layout.ends.num_bytes
        if layer is not None:
            offset, num_bytes = layout.layer_offset(layer), layout.layer_bytes
        return wrap(self._memory.weights.base_address + offset, num_bytes, CpuBackend.device)


def _put(data: torch.Tensor, there: torch.Tensor, gate: WriteGate | None) -> None:
    """Copy; what is behind a gate passes it in parts."""
    if gate is None:
        there.copy_(data)
        return
    source, target = (one.reshape(-1).view(torch.uint8) for one in (data, there))
    for first in range(0, len(source), _AT_ONCE_BYTES):
        some = slice(first, first + _AT_ONCE_BYTES)
        gate(len(source[some]), functools.partial(target[some].copy_, source[some]))
