"""Which tensors of a checkpoint stay quantised, and how."""

import dataclasses

from kunserve.core.config import ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.engine.weights.layout import end_shapes, layer_shapes, pack_sections
from kunserve.engine.weights.pieces import EXPERT_PARTS, Piece, rows_of
from kunserve.engine.weights.readers import Reader, open_reader
from kunserve.model.config import read_spec
from kunserve.model.packed import Kept, PackedField, PackedWeights, Run, WeightFormat
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec

_ALWAYS_PLAIN = ("router", "shared_gate_up", "shared_down")
"""Expanded however they are stored: they are small beside the experts."""


def shape_of(source: ModelSource, model: ModelConfig, kept: Kept) -> ModelSpec:
    """The model's shape, with its weights as they are to lie in memory; see ``quantised``.

    Nothing is read before it is known that the model fits, but how weights are stored.
    """
    spec = read_spec(source, model.dtype)
    if model.quantization == "none":
        return spec
    return quantised(spec, open_reader(source, spec, model.seed), model, kept)


def quantised(spec: ModelSpec, reader: Reader, config: ModelConfig, kept: Kept) -> ModelSpec:
    """The shape with its weights as they are to lie in memory.

    ``kept`` is what the device computes with. Raises ConfigError for weights that are not quantised
    in the way asked for, or that cannot stay so.
    """
    asked = config.quantization
    if asked == "none":
        return spec
    if asked not in ("auto", reader.quantization):
        stored = reader.quantization or "not quantised"
        raise ConfigError(f"--quantization {asked}, but the weights of {spec.name} are {stored}")
    found = with_packed(spec, reader, kept)
    if asked != "auto" and found.packed is None:
        known = ", ".join(kind.name for kind in sorted(kept.formats)) or "none"
        raise ConfigError(
            f"--quantization {asked}, but no matrix of {spec.name} can stay as it is: they are "
            f"{_stored_as(spec, reader)}, and of what is quantised these are computed with here: "
            f"{known}. With --quantization auto they are expanded"
        )
    return found


def _stored_as(spec: ModelSpec, reader: Reader) -> str:
    rows = rows_of("o", spec.hidden_size, spec)
    return ", ".join(
        sorted(
            {
                reader.format_of(Piece(layer, piece)).name
                for layer in range(spec.num_layers)
                for piece, _, _ in rows
            }
        )
    )


def with_packed(spec: ModelSpec, reader: Reader, kept: Kept) -> ModelSpec:
    """The shape of a model whose quantised weights stay so, as far as ``kept`` has them.

    What it has not is expanded to the model's dtype when it is loaded.
    """
    method = reader.quantization
    if method is None or not kept.formats:
        return spec
    ends = _fields(spec, reader, kept, None)
    layers = tuple(_fields(spec, reader, kept, layer) for layer in range(spec.num_layers))
    if not ends and not any(layers):
        return spec
    by_name = [{field.name: field for field in fields} for fields in layers]
    first = pack_sections(layer_shapes(spec), by_name, spec.dtype_bytes)[0]
    (outside,) = pack_sections(
        end_shapes(spec), [{field.name: field for field in ends}], spec.dtype_bytes
    )
    embedding_bytes = outside.slots["final_norm"].offset
    packed = PackedWeights(
        method=method,
        ends=ends,
        layers=layers,
        layer_bytes=first.num_bytes,
        embedding_bytes=embedding_bytes,
        head_bytes=outside.num_bytes - embedding_bytes,
    )
    return dataclasses.replace(spec, packed=packed)


def _fields(
    spec: ModelSpec, reader: Reader, kept: Kept, layer: int | None
) -> tuple[PackedField, ...]:
    shapes = end_shapes(spec) if layer is None else layer_shapes(spec)
    found = (
        _field(spec, reader, kept.formats, layer, name, shape)
        for name, shape in shapes.items()
        if kept.experts or name not in EXPERT_PARTS
    )
    return tuple(field for field in found if field is not None)


def _field(
    spec: ModelSpec,
    reader: Reader,
    kept: frozenset[WeightFormat],
    layer: int | None,
    name: str,
    shape: tuple[int, ...],
) -> PackedField | None:
    """One tensor, if all its pieces stay quantised."""
    if len(shape) < 2 or name in _ALWAYS_PLAIN:
        return None
    runs = []
    for piece, first, end in rows_of(name, shape[0], spec):
        kind = reader.format_of(Piece(layer, piece))
        if kind not in kept or shape[1] % kind.block_columns:
            return None
        runs.append(Run(kind, end - first))
    if name in ("gate_up", *EXPERT_PARTS):
        # Gate and up share panels, and the kernels know one format for all experts.
        if any(run.format != runs[0].format for run in runs):
            return None
        num_runs = 1 if spec.experts is None else spec.experts.number
        num_rows = shape[0] // num_runs // (1 if name == "experts_down" else 2)
        return PackedField(name, (Run(runs[0].format, num_rows),) * num_runs, shape[1])
    return PackedField(name, tuple(runs), shape[1])
