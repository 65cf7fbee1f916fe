"""Packed tensors over the weights range, and filling them from a checkpoint."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.layout import LayerRange
from kunserve.core.model_spec import ModelSpec
from kunserve.engine.decoder import LayerWeights, ModelWeights
from kunserve.engine.weights.layout import Section, WeightLayout
from kunserve.engine.weights.pieces import Piece, rows_of
from kunserve.engine.weights.readers import Reader

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def packed_weights(
    layout: WeightLayout, spec: ModelSpec, memory: npt.NDArray[np.uint8]
) -> ModelWeights:
    """Tensors as views of ``memory`` (the weights range); reads none of it."""
    whole = torch.from_numpy(memory)
    ends = _views(layout.ends, 0, spec, whole)
    layers = [
        LayerWeights(**_views(layout.layer, layout.layer_offset(layer), spec, whole))
        for layer in range(spec.num_layers)
    ]
    embedding = ends["embedding"]
    return ModelWeights(embedding, layers, ends["final_norm"], ends.get("head", embedding))


def _views(
    section: Section, offset: int, spec: ModelSpec, whole: torch.Tensor
) -> dict[str, torch.Tensor]:
    dtype = _DTYPES[spec.dtype]
    views = {}
    for name, slot in section.slots.items():
        num_bytes = int(np.prod(slot.shape)) * spec.dtype_bytes
        first = offset + slot.offset
        views[name] = whole[first : first + num_bytes].view(dtype).view(slot.shape)
    return views


class WeightLoader:
    """Fills a model's packed tensors from one checkpoint, a piece at a time."""

    def __init__(
        self, reader: Reader, layout: WeightLayout, spec: ModelSpec, weights: ModelWeights
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._spec = spec
        self._weights = weights

    def check(self) -> None:
        """Raise ModelFiles unless every piece is there, before any time is spent on reading."""
        for layer in (None, *range(self._spec.num_layers)):
            section = self._layout.ends if layer is None else self._layout.layer
            for field, slot in section.slots.items():
                for name, first, end in rows_of(field, slot.shape[0], self._spec):
                    self._reader.check(Piece(layer, name), (end - first, *slot.shape[1:]))

    def load_ends(self) -> None:
        """Read what lies outside the layers: embedding, final norm, head."""
        for field in self._layout.ends.slots:
            self._reader.read(Piece(None, field), getattr(self._weights, field))

    def load_layers(self, layers: LayerRange) -> None:
        """Read these layers, whose memory must be mapped."""
        for layer in range(*layers):
            for name, destination in self._pieces(layer):
                self._reader.read(Piece(layer, name), destination)

    def _pieces(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        for field, slot in self._layout.layer.slots.items():
            tensor = getattr(self._weights.layers[layer], field)
            for name, first, end in rows_of(field, slot.shape[0], self._spec):
                yield name, tensor[first:end]
