"""Parameters lie in their seats, are raw while files fill them, and tied ones have one seat."""

import pytest
import torch
from torch import nn

from kunserve.engine.weights.layout import ALIGNMENT_BYTES
from kunserve_extras.vllm_body.pieces import pieces_of
from kunserve_extras.vllm_body.seats import Seats


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, bias=False)
        self.up = nn.Linear(6, 10)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.embedding = nn.Embedding(20, 6)
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.embedding.weight


def test_seats_follow_each_other_and_begin_at_a_cache_line() -> None:
    tensors = [("a", torch.ones(3)), ("b", torch.ones(5, 7, dtype=torch.bfloat16))]
    seats = Seats.of(tensors)
    assert [seat.offset for seat in seats.seats] == [0, ALIGNMENT_BYTES]
    assert seats.num_bytes == 3 * ALIGNMENT_BYTES
    views = seats.views(torch.zeros(seats.num_bytes, dtype=torch.uint8))
    assert {name: (view.shape, view.dtype) for name, view in views.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in tensors
    }


def test_layers_are_alike_and_the_rest_is_one_piece() -> None:
    model = Tied()
    layers, ends = pieces_of(model, model.layers)
    assert layers[0].signature == layers[1].signature
    assert [name for name, _ in layers[1].signature] == ["norm.weight", "up.weight", "up.bias"]
    assert [name for name, _ in ends.signature] == ["embedding.weight", "head.weight"]
    assert ends.num_values == 20 * 6
    assert not sum(parameter.numel() for parameter in model.parameters())


def test_a_piece_is_filled_beside_its_seats() -> None:
    model = Tied()
    first, _ = pieces_of(model, model.layers)[0]
    first.make_raw()
    seats = first.seats()
    memory = torch.full((seats.num_bytes,), 0xFF, dtype=torch.uint8)
    views = seats.views(memory)
    first.sit(views)
    weight = model.layers[0].up.weight
    for _ in range(2):  # a second time it is filled as the first time
        first.make_raw()
        assert (model.layers[0].norm.weight == 1).all(), "what files lack is as the model made it"
        weight.data.fill_(2.0)
        assert memory.eq(0xFF).all(), "nothing is written where the layer may not be any more"
        first.sit(views)
        assert weight.data_ptr() == views["up.weight"].data_ptr()


def test_a_parameter_that_was_replaced_is_raw_again() -> None:
    model = Tied()
    first, _ = pieces_of(model, model.layers)[0]
    first.make_raw()
    raw = model.layers[0].up.weight
    model.layers[0].up.weight = nn.Parameter(torch.ones(5, 12))
    assert dict(first.named())["up.weight"].shape == (5, 12)
    first.make_raw()
    assert model.layers[0].up.weight is raw and raw.shape == (10, 6)


def test_tied_parameters_share_a_seat() -> None:
    model = Tied()
    _, ends = pieces_of(model, model.layers)
    ends.make_raw()
    assert model.head.weight is model.embedding.weight
    assert [seat.name for seat in ends.seats().seats] == ["embedding.weight"]
    ends.sit(ends.seats().views(torch.zeros(20 * 6 * 4, dtype=torch.uint8)))
    assert not model.head.weight.any()


@pytest.mark.parametrize("which", ["layer", "ends"])
def test_what_is_forgotten_has_no_memory(which: str) -> None:
    model = Tied()
    layers, ends = pieces_of(model, model.layers)
    piece = layers[0] if which == "layer" else ends
    piece.make_raw()
    piece.forget()
    assert {tensor.numel() for _, tensor in piece.named()} == {0}


def test_a_load_that_was_called_off_leaves_the_seats() -> None:
    model = Tied()
    first, _ = pieces_of(model, model.layers)[0]
    first.make_raw()
    model.layers[0].up.weight = nn.Parameter(torch.ones(5, 12))  # as it is computed with
    seats = first.seats()
    views = seats.views(torch.zeros(seats.num_bytes, dtype=torch.uint8))
    first.sit(views)
    before = first.parameters()
    first.make_raw()
    first.put_back(before)
    first.sit(views)
    assert model.layers[0].up.weight.data_ptr() == views["up.weight"].data_ptr()
    assert first.seats() == seats
