"""Where each tensor lies in the packed weights range.

    | embedding, final norm, head | pad | layer 0 | layer 1 | ... | layer L-1 | pad |

Layers follow each other without padding to granules, so a run of them loses at most one granule
at its inner end. Their first byte is on a granule boundary and nothing follows the last one, so
that the outer ends of the run lose nothing: ``InstanceSpec.units_when_holding`` relies on it
where a middle stage drops two runs.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kunserve.core.layout import LayerRange
from kunserve.core.model_spec import ModelSpec

ALIGNMENT_BYTES = 64


class Slot(NamedTuple):
    """One tensor: bytes from the start of its section, and its shape."""

    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Tensors packed one after the other."""

    slots: dict[str, Slot]
    num_bytes: int


def _pack(shapes: dict[str, tuple[int, ...]], dtype_bytes: int) -> Section:
    slots = {}
    end = 0
    for name, shape in shapes.items():
        slots[name] = Slot(end, shape)
        num_elements = 1
        for size in shape:
            num_elements *= size
        end = _align(end + num_elements * dtype_bytes, ALIGNMENT_BYTES)
    return Section(slots, end)


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def end_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensors outside the layers."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (spec.vocab_size, spec.hidden_size),
        "final_norm": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer, projections that share an input fused by rows."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "qkv": (spec.qkv_size, hidden),
        "o": (hidden, spec.q_size),
        "post_norm": (hidden,),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    if spec.attention_bias:
        shapes["qkv_bias"] = (spec.qkv_size,)
    if spec.output_bias:
        shapes["o_bias"] = (hidden,)
    if spec.qk_norm:
        shapes["q_norm"] = (spec.head_dim,)
        shapes["k_norm"] = (spec.head_dim,)
    if spec.mlp_bias:
        shapes["gate_up_bias"] = (2 * inner,)
        shapes["down_bias"] = (hidden,)
    return shapes


class WeightLayout:
    """The packed weights range of one model, in bytes from its start."""

    def __init__(self, spec: ModelSpec, granule_bytes: int) -> None:
        self.num_layers = spec.num_layers
        self.granule_bytes = granule_bytes
        self.ends = _pack(end_shapes(spec), spec.dtype_bytes)
        self.layer = _pack(layer_shapes(spec), spec.dtype_bytes)
        self.layers_offset = _align(self.ends.num_bytes, granule_bytes)
        self.num_bytes = _align(
            self.layers_offset + self.num_layers * self.layer.num_bytes, granule_bytes
        )

    @property
    def num_granules(self) -> int:
        """Granules of one whole copy."""
        return self.num_bytes // self.granule_bytes

    def layer_offset(self, layer: int) -> int:
        """Where a layer begins; ``num_layers`` gives the end of the last one."""
        return self.layers_offset + layer * self.layer.num_bytes

    def granules_of(self, layers: LayerRange) -> tuple[int, int]:
        """[first, end) slots of the granules that hold any byte of these layers."""
        assert 0 <= layers.first < layers.end <= self.num_layers, layers
        first = self.layer_offset(layers.first) // self.granule_bytes
        end = -(-self.layer_offset(layers.end) // self.granule_bytes)
        return first, end
