"""A rank's part of each tensor of a checkpoint."""

from dataclasses import dataclass

import torch

from kunserve.engine.weights.expert_pieces import of_expert
from kunserve.engine.weights.layout import end_shapes, layer_shapes
from kunserve.engine.weights.packing import StoredRows
from kunserve.engine.weights.pieces import EXPERT_PREFIX, Piece, rows_of
from kunserve.engine.weights.readers import Reader, SafetensorsReader
from kunserve.model.packed import WeightFormat
from kunserve.model.sharding import first_expert, first_kv_head, spec_of_rank, vocab_of_rank
from kunserve.model.spec import ModelSpec

_ADDED_ONCE = ("o_bias", "down_bias")
"""Of sums over ranks: the first one adds them, and the others add zeros."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows and columns of a stored tensor; what they leave of the destination is zeros."""

    rows: tuple[tuple[int, int], ...] | None = None
    """Runs of rows, one after the other; None: all."""
    columns: tuple[int, int] | None = None

    def of(self, stored: torch.Tensor) -> list[torch.Tensor]:
        """The runs, without a copy."""
        if self.columns is not None:
            stored = stored[:, slice(*self.columns)]
        return [stored] if self.rows is None else [stored[slice(*run)] for run in self.rows]


class ShardReader:
    """Implements ``Reader`` for one rank, over the reader of a whole model."""

    fills_devices = False
    quantization = None
    """What is quantised is expanded when it is read."""

    def __init__(self, whole: Reader, spec: ModelSpec, rank: int, num_ranks: int) -> None:
        """``spec`` is the whole model's."""
        self._whole = whole
        self._shapes = _stored_shapes(spec)
        self._parts = _parts_of(spec, rank, num_ranks)
        self._first_expert = first_expert(spec_of_rank(spec, num_ranks).experts, rank)

    def format_of(self, piece: Piece) -> WeightFormat:
        """Nothing stays quantised."""
        return WeightFormat.PLAIN

    def read_stored(self, piece: Piece) -> StoredRows:
        """Nothing stays quantised."""
        raise AssertionError(piece)

    def check(self, piece: Piece, shape: tuple[int, ...]) -> None:
        """Raise ModelFiles unless the whole piece is there."""
        piece = of_expert(piece, self._first_expert)
        self._whole.check(piece, self._shapes[piece.name])

    def read(self, piece: Piece, destination: torch.Tensor) -> None:
        """Fill the destination with this rank's part."""
        piece = of_expert(piece, self._first_expert)
        part = self._parts.get(piece.name)
        if part is None:
            self._whole.read(piece, destination)
            return
        if part.rows == ():
            destination.zero_()
            return
        stored = self._stored(piece, destination.dtype)
        done = 0
        for run in part.of(stored):
            destination[done : done + len(run)].copy_(run)
            done += len(run)
        destination[done:].zero_()

    def _stored(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        """The whole piece: where it lies in its file, if it can be read there."""
        found = self._whole.view(piece) if isinstance(self._whole, SafetensorsReader) else None
        if found is None:
            found = torch.empty(self._shapes[piece.name], dtype=dtype)
            self._whole.read(piece, found)
        return found


def _stored_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Of every piece that a checkpoint of the whole model has."""
    found = {}
    for fields in (end_shapes(spec), layer_shapes(spec)):
        for field, shape in fields.items():
            for name, first, end in rows_of(field, shape[0], spec):
                found[name] = (end - first, *shape[1:])
    return found


def _parts_of(spec: ModelSpec, rank: int, num_ranks: int) -> dict[str, _Part]:
    """Of every piece that is parted; the others are each rank's as they are."""
    mine = spec_of_rank(spec, num_ranks)
    q = (rank * mine.q_size, (rank + 1) * mine.q_size)
    k_first = first_kv_head(spec, rank, num_ranks) * spec.head_dim
    kv = (k_first, k_first + mine.kv_size)
    inner = (rank * mine.intermediate_size, (rank + 1) * mine.intermediate_size)
    vocab = vocab_of_rank(spec, rank, num_ranks)
    vocab_rows = (vocab.first, vocab.end)
    fused = (q, _shifted(kv, spec.q_size), _shifted(kv, spec.q_size + spec.kv_size))
    parts = {
        "embedding": _Part(rows=(vocab_rows,)),
        "head": _Part(rows=(vocab_rows,)),
        "o": _Part(columns=q),
        "down": _Part(columns=inner),
    }
    for suffix in ("", "_bias"):
        parts |= {
            f"q{suffix}": _Part(rows=(q,)),
            f"k{suffix}": _Part(rows=(kv,)),
            f"v{suffix}": _Part(rows=(kv,)),
            f"qkv{suffix}": _Part(rows=fused),
            f"gate{suffix}": _Part(rows=(inner,)),
            f"up{suffix}": _Part(rows=(inner,)),
            f"gate_up{suffix}": _Part(rows=(inner, _shifted(inner, spec.intermediate_size))),
        }
    if spec.has_whole_qk_norm:
        parts |= {"q_norm": _Part(rows=(q,)), "k_norm": _Part(rows=(kv,))}
    if spec.experts is not None and spec.experts.shared_size is not None:
        width = spec.experts.shared_size // num_ranks
        shared = (rank * width, (rank + 1) * width)
        parts |= {f"shared_{name}": _Part(rows=(shared,)) for name in ("gate", "up")}
        parts["shared_down"] = _Part(columns=shared)
    if spec.experts is not None and not spec.experts.is_spread:
        for expert in range(spec.experts.number):
            of_one = {"gate": _Part(rows=(inner,)), "up": _Part(rows=(inner,))}
            of_one["down"] = _Part(columns=inner)
            parts |= {f"{EXPERT_PREFIX}{expert}.{name}": part for name, part in of_one.items()}
    if rank:
        parts |= {name: _Part(rows=()) for name in _ADDED_ONCE}
    return parts


def _shifted(run: tuple[int, int], by: int) -> tuple[int, int]:
    return run[0] + by, run[1] + by
