"""KV bytes that wait in host memory."""

import numpy as np
import pytest

from kunserve.core.ids import RequestId
from kunserve.transport.bulk.host_store import HostStore
from kunserve_lab.world.viewed_memory import ViewedMemory

R = RequestId("r")


class Units(ViewedMemory):
    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def unit_view(self, unit: int, num_units: int) -> np.ndarray:
        assert unit + num_units <= len(self._memory), unit
        return self._memory[unit : unit + num_units].reshape(-1)


def test_a_block_comes_back_elsewhere_and_is_kept_no_longer() -> None:
    memory = np.arange(60, dtype=np.uint8).reshape(20, 3)
    store = HostStore(Units(memory))
    before = memory.copy()
    store.put(R, 4, 2, 5)
    store.put(R, 5, 10, 5)
    memory[:] = 0
    assert store.num_bytes == 30
    store.take(R, 4, 13, 5)
    assert (memory[13:18] == before[2:7]).all() and not memory[:13].any()
    assert store.num_bytes == 15
    with pytest.raises(AssertionError, match="block 5 of r is in host memory already"):
        store.put(R, 5, 0, 5)
    store.forget(R)
    store.forget(RequestId("nobody"))
    assert store.num_bytes == 0
    with pytest.raises(KeyError):
        store.take(R, 5, 0, 5)


def test_a_block_that_cannot_be_placed_is_kept() -> None:
    memory = np.arange(60, dtype=np.uint8).reshape(20, 3)
    store = HostStore(Units(memory))
    store.put(R, 0, 2, 5)
    with pytest.raises(AssertionError):
        store.take(R, 0, 18, 5)
    assert store.num_bytes == 15
    store.take(R, 0, 13, 5)
    assert (memory[13:18] == memory[2:7]).all() and store.num_bytes == 0
