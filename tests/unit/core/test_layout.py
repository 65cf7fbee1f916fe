"""Ranges of layers."""

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.layout import LayerRange

RANGES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ends: LayerRange(*ends))


@given(RANGES, RANGES)
def test_what_is_left_without_another_range(whole: LayerRange, other: LayerRange) -> None:
    parts = whole.without(other)
    left = [layer for part in parts for layer in range(*part)]
    assert left == [layer for layer in range(*whole) if layer not in range(*other)]
    assert all(part.num_layers for part in parts)
