"""Which batches the steps of a GPU day are timed with, on cards of different sizes."""

import pytest

from benchmarks.gpu_phases.speed import fitting


@pytest.mark.parametrize(
    ("most", "batches"),
    [
        (300, (1, 32, 256)),
        (256, (1, 32, 256)),
        (255, (1, 32, 128)),
        (33, (1, 32)),
        (20, (1, 16)),
        (1, (1,)),
        (0, ()),
    ],
)
def test_the_largest_batch_is_what_the_memory_holds(most: int, batches: tuple[int, ...]) -> None:
    assert fitting((1, 32, 256), most) == batches
