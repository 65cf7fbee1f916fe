"""Where files have the matrices of experts: as tensors of their own, or stacked in one.

A piece ``experts.3.gate`` is the gate of expert 3.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kunserve.engine.weights.pieces import EXPERT_PREFIX, Piece
from kunserve.model.spec import ModelSpec

_HF_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


class Place(NamedTuple):
    """Where a file has a piece: a tensor, or rows of one matrix of a stacked tensor."""

    name: str
    stack: tuple[int, ...] = ()
    """Shape of the stacked tensor; empty where the piece is a tensor of its own."""
    expert: int = 0
    first: int = 0
    """Row of the expert's matrix."""
    end: int = 0


def hf_places(piece: Piece, spec: ModelSpec) -> list[Place]:
    """Where a Hugging Face checkpoint may have a piece, the usual place first."""
    if spec.experts is None or piece.layer is None:
        return [Place(piece.hf_name)]
    layer = f"model.layers.{piece.layer}"
    if piece.name == "router":
        places = [Place(piece.hf_name), Place(f"{layer}.block_sparse_moe.gate.weight")]
    elif piece.name.startswith(EXPERT_PREFIX):
        expert, part = _parsed(piece)
        experts = f"{layer}.mlp.experts"
        mixtral = f"{layer}.block_sparse_moe.experts.{expert}.{_MIXTRAL_NAMES[part]}.weight"
        fused = "down_proj" if part == "down" else "gate_up_proj"
        places = [
            Place(f"{experts}.{expert}.{_HF_NAMES[part]}.weight"),
            Place(mixtral),
            *_stacked(f"{experts}.{fused}", spec, expert, part),
        ]
    else:
        return [Place(piece.hf_name)]
    if spec.architecture == "MixtralForCausalLM":
        places[:2] = places[1::-1]
    return places


def gguf_places(piece: Piece, spec: ModelSpec) -> list[Place]:
    """Where a GGUF file may have a piece, the usual place first."""
    if piece.name == "shared_router":
        return [Place(piece.gguf_name, (spec.hidden_size,), 0, 0, 1)]
    if spec.experts is None or not piece.name.startswith(EXPERT_PREFIX):
        return [Place(piece.gguf_name)]
    expert, part = _parsed(piece)
    layer, number = f"blk.{piece.layer}", spec.experts.number
    hidden, inner = spec.hidden_size, spec.intermediate_size
    rows, columns = (hidden, inner) if part == "down" else (inner, hidden)
    own = Place(f"{layer}.ffn_{part}_exps.weight", (number, rows, columns), expert, 0, rows)
    fused = _stacked(f"{layer}.ffn_gate_up_exps.weight", spec, expert, part)
    return [own] if part == "down" else [own, *fused]


def of_expert(piece: Piece, first: int) -> Piece:
    """The same piece of the expert that is so many further on; others as they are."""
    if first == 0 or not piece.name.startswith(EXPERT_PREFIX):
        return piece
    expert, part = _parsed(piece)
    return Piece(piece.layer, f"{EXPERT_PREFIX}{first + expert}.{part}")


def _parsed(piece: Piece) -> tuple[int, str]:
    _, expert, part = piece.name.split(".")
    return int(expert), part


def _stacked(name: str, spec: ModelSpec, expert: int, part: str) -> Iterator[Place]:
    """Gate and up as halves of one matrix for each expert, or all matrices of down."""
    assert spec.experts is not None
    number, hidden, inner = spec.experts.number, spec.hidden_size, spec.intermediate_size
    if part == "down":
        yield Place(name, (number, hidden, inner), expert, 0, hidden)
    else:
        first = inner if part == "up" else 0
        yield Place(name, (number, 2 * inner, hidden), expert, first, first + inner)
