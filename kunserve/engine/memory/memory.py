"""What all memories of an instance have in common, whoever holds it: one process, or its ranks."""

from collections.abc import Sequence
from typing import Protocol

from kunserve.control.instance import body
from kunserve.core.snapshots import InstanceSpec
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.transport.bulk.movable_memory import MovableMemory


class Memory(body.Memory, MovableMemory, Protocol):
    """An instance's memory. The brain changes it between steps; movers read and fill it."""

    @property
    def spec(self) -> InstanceSpec:
        """What the whole instance is made of."""
        ...

    @property
    def shards(self) -> Sequence[InstanceMemory]:
        """What of it this process reaches, its own first. All ranks hold the same layers."""
        ...

    def check(self, ask_kernel: bool = False) -> None:
        """Assert that every granule is where the layers held say it must be."""
        ...

    def close(self) -> None:
        """Release everything. Tensors over this memory must not be touched any more."""
        ...
