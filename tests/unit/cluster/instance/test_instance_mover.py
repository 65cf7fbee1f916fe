"""Layers are loaded from disk beside the loop, one after the other, and can be called off."""

import select
import threading

import pytest

from kunserve.cluster.instance.mover import LayerLoader
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import LayerLoad
from tests.conftest import wait_until


def test_layers_come_one_after_the_other_and_wake_the_loop() -> None:
    filled: list[LayerRange] = []
    loader = LayerLoader(filled.append)
    assert not loader.completed()
    loader.start(LayerRange(2, 5))
    assert select.select([loader.wakeup], [], [], 60.0)[0]
    (loaded,) = loader.completed()
    assert loaded.what == LayerLoad(LayerRange(2, 5)) and loaded.ok
    assert filled == [LayerRange(2, 3), LayerRange(3, 4), LayerRange(4, 5)]
    assert not loader.completed()


def test_once_cancelled_nothing_is_written_or_told() -> None:
    begun, may_end = threading.Event(), threading.Event()
    filled: list[LayerRange] = []

    def load(layers: LayerRange) -> None:
        begun.set()
        assert may_end.wait(60.0)
        filled.append(layers)

    loader = LayerLoader(load)
    loader.start(LayerRange(0, 8))
    assert begun.wait(60.0)
    canceller = threading.Thread(target=loader.cancel)
    canceller.start()
    may_end.set()  # the layer being filled ends first
    canceller.join(60.0)
    num_filled = len(filled)
    loader.start(LayerRange(9, 10))
    wait_until(lambda: LayerRange(9, 10) in filled)
    assert len(filled) == num_filled + 1 < 8
    wait_until(lambda: [loaded.what.layers for loaded in loader.completed()] == [LayerRange(9, 10)])


def test_a_disk_that_fails_is_noticed() -> None:
    def load(layers: LayerRange) -> None:
        raise OSError("no such file")

    loader = LayerLoader(load)
    loader.start(LayerRange(0, 1))
    assert select.select([loader.wakeup], [], [], 60.0)[0]
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        loader.completed()
