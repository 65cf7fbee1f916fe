"""Layers are loaded from disk beside the loop, one after the other, and can be called off."""

import functools
import select
import threading

import pytest

from kunserve.cluster.instance.mover import LayerLoader, Loaded
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import LayerLoad
from kunserve.transport.bulk.movable_memory import WriteGate
from tests.conftest import wait_until


class Disk:
    """Layers of three parts each; a part of a slow one waits until it may be read."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []
        self.slow: dict[int, threading.Event] = {}
        """By layer: when its second part comes."""
        self.begun = threading.Event()
        """A slow part is waited for."""
        self.fails: set[int] = set()

    def load(self, layers: LayerRange, gate: WriteGate) -> None:
        for layer in range(*layers):
            for part in range(3):
                if part == 1 and layer in self.slow:
                    self.begun.set()
                    assert self.slow[layer].wait(60.0)
                if layer in self.fails:
                    raise OSError("no such file")
                gate(10, functools.partial(self.written.append, (layer, part)))

    def layers(self) -> list[int]:
        return [layer for layer, part in self.written if part == 2]


def test_layers_come_one_after_the_other_and_wake_the_loop() -> None:
    disk = Disk()
    loader = LayerLoader(disk.load)
    assert not loader.completed()
    loader.start(LayerRange(2, 5))
    loader.start(LayerRange(7, 8))
    ended: list[Loaded] = []
    while len(ended) < 2:
        assert select.select([loader.wakeup], [], [], 60.0)[0]
        ended += loader.completed()
    assert ended == [Loaded(LayerLoad(LayerRange(2, 5))), Loaded(LayerLoad(LayerRange(7, 8)))]
    assert disk.layers() == [2, 3, 4, 7] and loader.num_bytes == 4 * 30
    assert not loader.completed()
    loader.start(LayerRange(0, 1))
    wait_until(lambda: len(loader.completed()) == 1)


def test_calling_off_waits_for_no_disk_and_nothing_is_written_late() -> None:
    """The read hangs for good as far as the caller sees; what comes of it in the end is void."""
    disk = Disk()
    disk.slow[3] = threading.Event()
    loader = LayerLoader(disk.load)
    loader.start(LayerRange(2, 8))
    loader.start(LayerRange(8, 9))
    assert disk.begun.wait(60.0)
    loader.cancel()  # on this thread: it would hang here
    written = list(disk.written)
    assert written[-1] == (3, 0)
    loader.start(LayerRange(9, 10))
    loader.cancel()
    loader.start(LayerRange(10, 11))
    disk.slow.pop(3).set()
    wait_until(lambda: [x.what.layers for x in loader.completed()] == [LayerRange(10, 11)])
    assert disk.written == [*written, (10, 0), (10, 1), (10, 2)]


def test_a_disk_that_fails_is_noticed_if_anybody_waits_for_it() -> None:
    disk = Disk()
    disk.slow[0] = threading.Event()
    loader = LayerLoader(disk.load)
    loader.start(LayerRange(0, 1))
    assert disk.begun.wait(60.0)
    loader.cancel()
    disk.fails = {0}
    disk.slow.pop(0).set()
    loader.start(LayerRange(0, 1))
    wait_until(lambda: loader._failure is not None)
    loader.cancel()  # nobody has heard of it
    loader.start(LayerRange(1, 2))
    wait_until(lambda: len(loader.completed()) == 1)
    loader.start(LayerRange(0, 1))
    assert select.select([loader.wakeup], [], [], 60.0)[0]
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        while True:  # the wakeup may be of the last one
            loader.completed()
