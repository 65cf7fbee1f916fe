"""Where each tensor lies in the packed weights range.

    | embedding, final norm, head | pad | layer 0 | layer 1 | ... | layer L-1 | pad |

Layers follow each other without padding to granules, so a run of them loses at most one granule
at its inner end. Their first byte is on a granule boundary and nothing follows the last one, so
that the outer ends of the run lose nothing: ``InstanceSpec.units_when_holding`` relies on it
where a middle stage drops two runs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kunserve.core.layout import LayerRange
from kunserve.model.packed import PackedField
from kunserve.model.spec import ModelSpec

ALIGNMENT_BYTES = 64


class Slot(NamedTuple):
    """One tensor: bytes from the start of its section, and its shape."""

    offset: int
    shape: tuple[int, ...]
    packed: PackedField | None = None
    """How it lies there if not as ``shape`` of the model's dtype."""


@dataclass(frozen=True, slots=True)
class Section:
    """Tensors packed one after the other."""

    slots: dict[str, Slot]
    num_bytes: int


Shapes = dict[str, tuple[int, ...]]


def pack_sections(
    shapes: Shapes, packed: Sequence[Mapping[str, PackedField]], dtype_bytes: int
) -> list[Section]:
    """A section for each of ``packed``, the fields of it that stay quantised.

    A tensor begins at one place in all of them, behind the largest of those before it.
    """
    slots: list[dict[str, Slot]] = [{} for _ in packed]
    end = 0
    for name, shape in shapes.items():
        largest = 0
        for found, fields in zip(slots, packed, strict=True):
            field = fields.get(name)
            found[name] = Slot(end, shape, field)
            plain = math.prod(shape) * dtype_bytes
            largest = max(largest, plain if field is None else field.num_bytes)
        end = _align(end + largest, ALIGNMENT_BYTES)
    return [Section(found, end) for found in slots]


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def end_shapes(spec: ModelSpec) -> Shapes:
    """Tensors outside the layers."""
    shapes: Shapes = {
        "embedding": (spec.vocab_size, spec.hidden_size),
        "final_norm": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_shapes(spec: ModelSpec) -> Shapes:
    """Tensors of one layer, projections that share an input fused by rows."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: Shapes = {
        "input_norm": (hidden,),
        "qkv": (spec.qkv_size, hidden),
        "o": (hidden, spec.q_size),
        "post_norm": (hidden,),
    }
    if spec.experts is None:
        shapes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    else:
        held = spec.experts.held
        shapes |= {
            "router": (spec.experts.num_logits, hidden),
            "experts_gate_up": (held * 2 * inner, hidden),
            "experts_down": (held * hidden, inner),
        }
        if (shared := spec.experts.shared_size) is not None:
            shapes |= {"shared_gate_up": (2 * shared, hidden), "shared_down": (hidden, shared)}
    if spec.attention_bias:
        shapes["qkv_bias"] = (spec.qkv_size,)
    if spec.output_bias:
        shapes["o_bias"] = (hidden,)
    if spec.qk_norm:
        q_norm, k_norm = spec.qk_norm_sizes
        shapes |= {"q_norm": (q_norm,), "k_norm": (k_norm,)}
    if spec.has_output_norms:
        shapes["attention_out_norm"] = (hidden,)
        shapes["mlp_out_norm"] = (hidden,)
    if spec.mlp_bias:
        shapes["gate_up_bias"] = (2 * inner,)
        shapes["down_bias"] = (hidden,)
    return shapes


class WeightLayout:
    """The packed weights range of one model, in bytes from its start."""

    def __init__(self, spec: ModelSpec, granule_bytes: int) -> None:
        self.num_layers = spec.num_layers
        self.granule_bytes = granule_bytes
        packed = spec.packed
        ends = () if packed is None else packed.ends
        layers = (None,) if packed is None else packed.layers
        (self.ends,) = pack_sections(end_shapes(spec), [_by_name(ends)], spec.dtype_bytes)
        self._layers = pack_sections(
            layer_shapes(spec), [_by_name(fields or ()) for fields in layers], spec.dtype_bytes
        )
        if spec.sizes is not None:
            self.ends = Section({}, spec.embedding_bytes + spec.head_bytes)
            self._layers = [Section({}, spec.layer_bytes)]
        self.layer_bytes = self._layers[0].num_bytes
        self.layers_offset = _align(self.ends.num_bytes, granule_bytes)
        self.num_bytes = _align(
            self.layers_offset + self.num_layers * self.layer_bytes, granule_bytes
        )

    @property
    def num_granules(self) -> int:
        """Granules of one whole copy."""
        return self.num_bytes // self.granule_bytes

    def layer(self, layer: int) -> Section:
        """What lies where in one layer."""
        assert 0 <= layer < self.num_layers, layer
        return self._layers[layer if len(self._layers) > 1 else 0]

    def layer_offset(self, layer: int) -> int:
        """Where a layer begins; ``num_layers`` gives the end of the last one."""
        return self.layers_offset + layer * self.layer_bytes

    def granules_of(self, layers: LayerRange) -> tuple[int, int]:
        """[first, end) slots of the granules that hold any byte of these layers."""
        assert 0 <= layers.first < layers.end <= self.num_layers, layers
        first = self.layer_offset(layers.first) // self.granule_bytes
        end = -(-self.layer_offset(layers.end) // self.granule_bytes)
        return first, end


def _by_name(fields: Iterable[PackedField]) -> dict[str, PackedField]:
    return {field.name: field for field in fields}
