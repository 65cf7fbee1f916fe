"""KV in host memory: where a body keeps what was swapped out of its KV range."""

import numpy as np

from kunserve.core.ids import RequestId
from kunserve.transport.bulk.movable_memory import Bytes, UnitMemory


class HostStore:
    """Implements ``HostKv``: what is asked for is done at once, as a CPU's cores would do both."""

    is_copying = False

    def __init__(self, memory: UnitMemory) -> None:
        self._memory = memory
        self._blocks: dict[RequestId, dict[int, Bytes]] = {}

    @property
    def num_bytes(self) -> int:
        """In use now."""
        return sum(data.nbytes for blocks in self._blocks.values() for data in blocks.values())

    def put(self, request_id: RequestId, block: int, unit: int, num_units: int) -> None:
        """Copy a block out of KV memory."""
        blocks = self._blocks.setdefault(request_id, {})
        assert block not in blocks, f"block {block} of {request_id} is in host memory already"
        data = np.empty(num_units * self._memory.unit_bytes, dtype=np.uint8)
        self._memory.read_units([(unit, num_units)], data)
        blocks[block] = data

    def take(self, request_id: RequestId, block: int, unit: int, num_units: int) -> None:
        """Copy a block back into KV memory, and keep it no longer."""
        blocks = self._blocks[request_id]
        self._memory.write_units([(unit, num_units)], blocks[block])
        del blocks[block]
        if not blocks:
            del self._blocks[request_id]

    def forget(self, request_id: RequestId) -> None:
        """The request is gone. Unknown ones are no mistake."""
        self._blocks.pop(request_id, None)

    def begin(self) -> None:
        """See ``HostKv``."""

    def wait(self) -> None:
        """See ``HostKv``."""

    def close(self) -> None:
        """See ``HostKv``."""
