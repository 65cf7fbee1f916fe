"""Rows of the output head for every stage of a pipeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.layout import VocabRange
from kunserve.core.snapshots import HeadShape
from kunserve.policy.drop.head_split import PANEL_ROWS, split_head

SMOLLM2 = HeadShape(49_152, 8.0)


def rows(*layers: int, head: HeadShape = SMOLLM2) -> list[int]:
    return [share.num_rows for share in split_head(layers, head)]


def test_equal_stages_compute_equal_parts() -> None:
    assert split_head((15, 15), SMOLLM2) == (VocabRange(0, 24_576), VocabRange(24_576, 49_152))


def test_the_shorter_stage_computes_more_of_the_head() -> None:
    assert rows(16, 14) == [18_432, 30_720]  # 3 layers' worth, and 5
    assert rows(8, 8, 7, 7) == [9_216, 9_216, 15_360, 15_360]


def test_the_leader_computes_less_because_it_plans_too() -> None:
    assert rows(15, 15, head=HeadShape(49_152, 8.0, 1.0)) == [21_504, 27_648]  # 3.5 layers' worth


def test_a_stage_that_is_too_long_already_computes_nothing_of_it() -> None:
    assert rows(20, 5, 5) == [0, 24_576, 24_576]
    assert rows(5, 20, 5) == [24_576, 0, 24_576]
    assert rows(5, 5, 20) == [24_576, 24_576, 0]


@pytest.mark.parametrize("num_rows", [1, PANEL_ROWS - 1, PANEL_ROWS, PANEL_ROWS + 1])
def test_a_tiny_vocabulary_is_computed_once(num_rows: int) -> None:
    assert sum(rows(2, 2, head=HeadShape(num_rows, 0.5))) == num_rows


@given(
    layers=st.lists(st.integers(1, 80), min_size=1, max_size=8),
    num_rows=st.integers(1, 300_000),
    cost_layers=st.floats(0.01, 40.0),
    leader_layers=st.floats(0.0, 3.0),
)
def test_every_row_is_computed_once_and_stages_come_out_even(
    layers: list[int], num_rows: int, cost_layers: float, leader_layers: float
) -> None:
    shares = split_head(layers, HeadShape(num_rows, cost_layers, leader_layers))
    assert len(shares) == len(layers)
    position = 0
    for share in shares:
        assert share.first == position <= share.end
        assert share.num_rows == 0 or share.first % PANEL_ROWS == 0
        position = share.end
    assert position == num_rows
    lengths = [
        own + share.num_rows / num_rows * cost_layers
        for own, share in zip(layers, shares, strict=True)
    ]
    lengths[0] += leader_layers
    one_panel = 2 * PANEL_ROWS / num_rows * cost_layers
    work = [layers[0] + leader_layers, *layers[1:]]
    ideal = max(max(work), (sum(work) + cost_layers) / len(work))
    assert max(lengths) <= ideal + one_panel + 1e-6
