"""Packed tensors over the weights range, and filling them from a checkpoint."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import LayerRange
from kunserve.engine.attention import TORCH_DTYPES
from kunserve.engine.cpu.kernels.packed import PackedMatrix
from kunserve.engine.cpu.kernels.panels import PanelMatrix
from kunserve.engine.layer_weights import LayerWeights, ModelWeights
from kunserve.engine.weights.layout import Section, WeightLayout
from kunserve.engine.weights.packing import StoredRows, pack
from kunserve.engine.weights.pieces import EXPERT_PARTS, Piece, rows_of
from kunserve.engine.weights.readers import Reader
from kunserve.model.packed import PAIRED, PackedField
from kunserve.model.spec import ModelSpec
from kunserve.transport.bulk.movable_memory import WriteGate

_AT_ONCE_BYTES = 8 << 20
"""What passes a gate as one: a few milliseconds of a copy."""
_STAYS_PLAIN = "router"
"""It is small, and one kind of attention computes with it in torch."""


def packed_weights(
    layout: WeightLayout, spec: ModelSpec, whole: torch.Tensor, *, in_panels: bool
) -> ModelWeights:
    """Tensors as views of ``whole``, the bytes of the weights range; reads none of it.

    ``in_panels``: whether matrices lie there as the C kernels like them best. A ``WeightLoader``
    of these weights puts them there so.
    """

    def views(section: Section, offset: int) -> dict[str, Any]:
        found = _views(section, offset, spec, whole)
        if not in_panels:
            return found
        return {name: _in_panels(name, view, spec) for name, view in found.items()}

    ends = views(layout.ends, 0)
    layers = [
        LayerWeights(**views(layout.layer(layer), layout.layer_offset(layer)))
        for layer in range(spec.num_layers)
    ]
    embedding = ends["embedding"]
    return ModelWeights(embedding, layers, ends["final_norm"], ends.get("head", embedding))


def _in_panels(name: str, view: torch.Tensor | PackedMatrix, spec: ModelSpec) -> Any:
    if isinstance(view, PackedMatrix) or view.ndim != 2 or name == _STAYS_PLAIN:
        return view
    is_stack = spec.experts is not None and name in EXPERT_PARTS
    num_matrices = spec.experts.held if spec.experts is not None and is_stack else 1
    return PanelMatrix(view, name in PAIRED, num_matrices)


def _views(section: Section, offset: int, spec: ModelSpec, whole: torch.Tensor) -> dict[str, Any]:
    """A tensor or a ``PackedMatrix`` for each slot."""
    dtype = TORCH_DTYPES[spec.dtype]
    views: dict[str, Any] = {}
    for name, slot in section.slots.items():
        if slot.packed is not None:
            first = offset + slot.offset
            packed = whole[first : first + slot.packed.num_bytes]
            views[name] = PackedMatrix(packed, slot.packed)
            continue
        num_bytes = int(np.prod(slot.shape)) * spec.dtype_bytes
        first = offset + slot.offset
        views[name] = whole[first : first + num_bytes].view(dtype).view(slot.shape)
    return views


Put: TypeAlias = Callable[[int, npt.NDArray[np.uint8]], None]
"""Copies bytes to an offset of the weights range."""


Pack: TypeAlias = Callable[[PackedField, list[StoredRows]], npt.NDArray[np.uint8]]
"""As ``packing.pack``."""


class WeightLoader:
    """Fills a model's packed tensors from one checkpoint, a piece at a time."""

    def __init__(
        self,
        reader: Reader,
        layout: WeightLayout,
        spec: ModelSpec,
        weights: ModelWeights,
        put: Put | None = None,
        pack: Pack = pack,
    ) -> None:
        """With ``put`` the weights are not in host memory: they get there from it.

        ``pack`` makes the bytes of what stays quantised.
        """
        self._reader = reader
        self._layout = layout
        self._spec = spec
        self._weights = weights
        self._put = put
        self._pack = pack

    def check(self) -> None:
        """Raise ModelFiles unless every piece is there, before any time is spent on reading."""
        for layer in (None, *range(self._spec.num_layers)):
            section = self._layout.ends if layer is None else self._layout.layer(layer)
            for field, slot in section.slots.items():
                for name, first, end in rows_of(field, slot.shape[0], self._spec):
                    self._reader.check(Piece(layer, name), (end - first, *slot.shape[1:]))

    def load_ends(self) -> None:
        """Read what lies outside the layers: embedding, final norm, head."""
        self._load(None, 0, self._layout.ends, self._weights, None)

    def load_layers(self, layers: LayerRange, gate: WriteGate | None = None) -> None:
        """Read these layers, whose memory must be mapped.

        With a ``gate`` a tensor is read beside them first, and whatever writes there passes the
        gate: so their memory may become other memory while a disk hangs.
        """
        for layer in range(*layers):
            offset = self._layout.layer_offset(layer)
            section, held = self._layout.layer(layer), self._weights.layers[layer]
            self._load(layer, offset, section, held, gate)

    def _load(
        self,
        layer: int | None,
        offset: int,
        section: Section,
        held: ModelWeights | LayerWeights,
        gate: WriteGate | None,
    ) -> None:
        for field, slot in section.slots.items():
            there = getattr(held, field)
            if slot.packed is not None:
                packed = self._read_packed(layer, slot.packed, slot.shape[0])
                self._write(offset + slot.offset, packed, there.data, gate)
                continue
            matrix = there if isinstance(there, PanelMatrix) else None
            if matrix is not None:
                assert self._put is None, "only host memory has panels"
                there = matrix.data
            is_direct = gate is None and (self._put is None or self._reader.fills_devices)
            tensor = there if is_direct else torch.empty_like(there, device="cpu")
            for name, first, end in rows_of(field, slot.shape[0], self._spec):
                self._reader.read(Piece(layer, name), tensor[first:end])
            if matrix is not None:
                replace(matrix, data=tensor).put_into_panels()
            if not is_direct:
                self._write(offset + slot.offset, tensor, there, gate)
            elif tensor.is_cuda:
                # Whoever is told that a layer is loaded may copy it by another stream.
                torch.cuda.current_stream(tensor.device).synchronize()

    def _write(
        self, offset: int, tensor: torch.Tensor, there: torch.Tensor, gate: WriteGate | None
    ) -> None:
        """Copy a tensor from beside the weights range to ``there``, which is at ``offset``."""
        staged = _bytes_of(tensor)
        put = self._put
        if put is None:
            host = _bytes_of(there)

            def put(first: int, some: npt.NDArray[np.uint8]) -> None:
                host[first - offset : first - offset + some.nbytes] = some

        if gate is None:
            put(offset, staged)
            return
        for first in range(0, staged.nbytes, _AT_ONCE_BYTES):
            some = staged[first : first + _AT_ONCE_BYTES]
            gate(some.nbytes, functools.partial(put, offset + first, some))

    def _read_packed(self, layer: int | None, field: PackedField, num_rows: int) -> torch.Tensor:
        """The same bytes each time, so that what peers send and what files hold are alike."""
        pieces = [
            self._reader.read_stored(Piece(layer, name))
            for name, _, _ in rows_of(field.name, num_rows, self._spec)
        ]
        return torch.from_numpy(self._pack(field, pieces))


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return found
