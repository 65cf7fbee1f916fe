"""Layers that are repeated, beside the same layers whose code runs every time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from kunserve_extras.vllm_body.repeats import FEW_ROWS, RepeatedLayer, Rooms, do

WIDTH = 4
NUM_LAYERS = 5
Values = list[torch.Tensor]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of a kernel that torch does not see."""
    found = torch.empty(len(x), WIDTH)
    do(lambda: found.copy_(torch.tanh(x @ weight)))
    return found


def swapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = x.split(WIDTH // 2, dim=1)
    return torch.cat((right, left), dim=1)


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x


KNOWN: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    torch.add,
    torch.mul,
    lambda x, y: x * 0.5 + 1,
    lambda x, y: x.t().contiguous().t().contiguous(),
    lambda x, y: y.new_empty(y.shape).copy_(x),
    swapped,
    in_place,
]


class Layer(nn.Module):
    """Some known operations in an order of its own; like a decoder's in what it takes and gives."""

    def __init__(self, program: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.program = program
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("table", torch.rand(64, WIDTH))

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.empty_like(hidden)
        do(lambda: torch.index_select(self.table, 0, positions, out=at))
        values = [hidden, at, hidden if residual is None else residual]
        for which, first, second in self.program:
            values.append(KNOWN[which](values[first % len(values)], values[second % len(values)]))
        found = product(values[-1].contiguous(), self.weight)
        return found, found + values[2]


def run(
    layers: list[Any], positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    for layer in layers:
        hidden, residual = layer(positions, hidden, residual=residual)
    return hidden, residual


def both(layers: list[nn.Module], num_bytes: int = 1 << 16) -> tuple[list[Any], list[Any]]:
    """Their code, and what repeats them."""
    rooms = Rooms(num_bytes)
    repeated = [RepeatedLayer(layer, number, rooms) for number, layer in enumerate(layers)]
    return [layer.forward for layer in layers], repeated


def steps(rows: list[int], firsts: list[int]) -> Iterator[tuple[int, list[Any]]]:
    """What is given: in a later stage rows of another one's, a residual with them."""
    for number, (num_rows, first) in enumerate(zip(rows, firsts, strict=False)):
        torch.manual_seed(number)
        given: list[Any] = [torch.randint(64, (num_rows,)), torch.rand(num_rows, WIDTH), None]
        if first:
            given[2] = torch.rand(num_rows, WIDTH)
        yield first, given


def copies(given: list[Any]) -> list[Any]:
    return [one if one is None else one.clone() for one in given]


@hypothesis.given(
    programs=st.lists(
        st.lists(
            st.tuples(st.integers(0, len(KNOWN) - 1), st.integers(0, 9), st.integers(0, 9)),
            max_size=5,
        ),
        min_size=NUM_LAYERS,
        max_size=NUM_LAYERS,
    ),
    rows=st.lists(st.sampled_from([1, 2, 3, FEW_ROWS, FEW_ROWS + 1]), min_size=4, max_size=9),
    firsts=st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=9, max_size=9),
)
def test_repeated_layers_give_the_same_bits(
    programs: list[list[tuple[int, int, int]]], rows: list[int], firsts: list[int]
) -> None:
    torch.manual_seed(0)
    plain, repeated = both([Layer(program) for program in programs])
    for first, given in steps(rows, firsts):
        expected = run(plain[first:], *copies(given))
        found = run(repeated[first:], *copies(given))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    assert all(layer.refusal is None for layer in repeated)


def test_code_runs_once_for_each_number_of_rows() -> None:
    seen: list[int] = []

    class Counted(Layer):
        def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
            seen.append(len(hidden))
            return super().forward(positions, hidden, residual)

    _, repeated = both([Counted([]), Counted([])])
    many = FEW_ROWS + 1
    for _, given in steps([2, 5, 2, 5, many, 2, many], [0] * 7):
        run(repeated, *given)
    assert seen == [2, 2, 5, 5, many, many, many, many]


ELSEWHERE = torch.zeros(1, WIDTH)
REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a result with no known place": lambda x: torch.sin(x),
    "a change that is not known": lambda x: (x + 1).sin_(),
    "a number that is looked at": lambda x: x + float(x.sum()),
    "a tensor that is nobody's": lambda x: x + ELSEWHERE,
    "what it was given": lambda x: x,
    "a view of what it was given": lambda x: x[:, :],
}


class Odd(nn.Module):
    def __init__(self, code: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, positions: Any, hidden: torch.Tensor, residual: Any) -> Any:
        hidden = self.code(hidden)
        return hidden, hidden + 0 if residual is None else hidden + residual


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_repeated_runs_as_code(what: str) -> None:
    plain, repeated = both([Layer([]), Odd(REFUSED[what]), Layer([])])
    for number, (_, given) in enumerate(steps([2, 2, 3, 2], [0] * 4)):
        ELSEWHERE.fill_(number)
        expected, found = run(plain, *copies(given)), run(repeated, *copies(given))
        assert all(map(torch.equal, found, expected))
    assert [layer.refusal is None for layer in repeated] == [True, False, True]


class Swapping(nn.Module):
    """What it gives is what it was given, so it lies where nothing of a layer's may lie."""

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        return residual, hidden


def test_what_a_layer_passes_on_is_not_where_the_next_one_is_given_it() -> None:
    plain, repeated = both([Swapping(), Layer([]), Layer([])])
    for number in range(3):
        torch.manual_seed(number)
        given = torch.randint(64, (2,)), *torch.rand(2, 2, WIDTH)
        assert torch.equal(run(repeated, *given)[0], run(plain, *given)[0])
    assert repeated[0].refusal is not None


def test_rows_that_change_places_in_a_room() -> None:
    rooms = Rooms(1 << 12)
    layer = Layer([])
    repeated = RepeatedLayer(layer, 1, rooms)
    one, other = rooms.room(0)[:128].view(torch.float32).view(2, 4, WIDTH)
    positions = torch.arange(4)
    for first, second in [(one, other), (other, one)] * 2:
        one.uniform_()
        other.uniform_()
        expected = layer.forward(positions, first.clone(), second.clone())
        assert all(map(torch.equal, repeated(positions, first, second), expected))


def test_a_room_that_is_too_small() -> None:
    plain, repeated = both([Layer([]), Layer([])], num_bytes=64 * 4)
    for _, given in steps([1, 6, 1], [0] * 3):
        assert torch.equal(run(repeated, *given)[0], run(plain, *given)[0])
    assert all("no room" in str(layer.refusal) for layer in repeated)


def test_what_else_a_layer_is_given_is_no_part_of_a_repetition() -> None:
    """Numbers and names are: another one is another layer's code."""

    class Scaled(nn.Module):
        def forward(self, hidden: torch.Tensor, scale: Any) -> torch.Tensor:
            return hidden * (scale if isinstance(scale, float) else scale[0])

    rooms = Rooms(1 << 12)
    layer, rows = RepeatedLayer(Scaled(), 0, rooms), torch.ones(2, WIDTH)
    for scale in (2.0, 3.0, 2.0):
        assert torch.equal(layer(rows, scale), rows * scale)
    assert layer.refusal is None
    assert torch.equal(layer(rows, [5.0]), rows * 5)
    assert "not looked into" in str(layer.refusal)


def test_an_error_of_a_layer_is_its_own() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    _, (layer,) = both([Odd(fails)])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            layer(None, torch.ones(1, WIDTH), None)
    do(partial(ELSEWHERE.fill_, 1))  # nobody watches any more
