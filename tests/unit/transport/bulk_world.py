"""Instances' memories for the bulk mover's tests: arrays whose every byte is recognisable."""

import numpy as np

from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import KvPull
from kunserve.transport.bulk.wire import Bytes, Int32Array
from kunserve_lab.world.viewed_memory import ViewedMemory

UNIT_BYTES = 96
LAYER_BYTES = 1000
NUM_LAYERS = 6


class Memory(ViewedMemory):
    """KV units and layers of one instance."""

    def __init__(self, num_units: int, seed: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        shape = (num_units * UNIT_BYTES, NUM_LAYERS * LAYER_BYTES)
        self.kv, self.weights = (
            np.zeros(n, np.uint8) if seed is None else rng.integers(1, 256, n, np.uint8)
            for n in shape
        )

    layer_bytes = LAYER_BYTES
    unit_bytes = UNIT_BYTES

    def unit_view(self, unit: int, num_units: int) -> Bytes:
        assert unit >= 0 and (unit + num_units) * UNIT_BYTES <= len(self.kv), (unit, num_units)
        return self.kv[unit * UNIT_BYTES : (unit + num_units) * UNIT_BYTES]

    def layer_view(self, layer: int) -> Bytes:
        assert 0 <= layer < NUM_LAYERS, layer
        return self.weights[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]

    def block(self, entry: int, layers: LayerRange) -> Bytes:
        """One block's bytes over some layers."""
        return self.unit_view(entry + layers.first, layers.num_layers)


def entries(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def piece(
    request: str, src: int, layers: tuple[int, int], blocks: tuple[int, int], transition: int = 1
) -> KvPull:
    return KvPull(
        TransitionId(transition), RequestId(request), InstanceId(src), LayerRange(*layers), *blocks
    )
