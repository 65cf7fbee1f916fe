"""Block tables of a step where KV of layers with a window is a ring (``core.kv_blocks``)."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kunserve.core.kv_blocks import KvBlocks
from kunserve.engine.attention import StepBatch


class RingTables:
    """Spreads a request's blocks over its context: an entry for every ``block_size`` tokens.

    Kernels then know nothing of rings: layers with a window have one table, the others another.
    """

    def __init__(self, blocks: KvBlocks) -> None:
        self._blocks = blocks
        nothing = np.zeros(0, dtype=np.int32)
        self._local: npt.NDArray[np.int32] = nothing
        """By place in the context: which of the request's blocks, for layers with a window."""
        self._global: npt.NDArray[np.int32] = nothing
        """The same for the others; and in the place of which layer, so many before them."""
        self._before: npt.NDArray[np.int32] = nothing

    def spread(self, batch: StepBatch) -> StepBatch:
        """The batch with both tables, a row for each sequence."""
        longest = int(batch.context_lens.max(initial=0))
        num = -(-longest // self._blocks.block_size)
        if num > len(self._local):
            self._reach(num)
        entries = batch.tables[batch.rows]
        return replace(
            batch,
            tables=np.take(entries, self._global[:num], axis=1) - self._before[:num],
            local_tables=np.take(entries, self._local[:num], axis=1),
            rows=np.arange(len(batch.rows), dtype=np.int32),
        )

    def _reach(self, num: int) -> None:
        blocks, numbers = self._blocks, range(2 * num)
        places = np.array([blocks.global_place(number) for number in numbers], dtype=np.int32)
        self._global, self._before = places.T
        self._local = np.array([blocks.local_block(number) for number in numbers], dtype=np.int32)
