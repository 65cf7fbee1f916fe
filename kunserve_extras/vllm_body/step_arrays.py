"""A step's work as vLLM's code wants it: entries from 0 on, a slot for each token."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kunserve.engine.attention import StepBatch

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One microbatch. Block ``e`` of a table is, for layer ``l``, unit ``e + l`` of the cache's."""

    tables: Ints
    """[sequences, blocks], a row for each; beyond a row's context anything."""
    slots: Longs
    """[tokens] where each one's K and V go: the block times its size, and the place in it."""
    positions: Longs
    """[tokens]."""
    q_starts: Ints
    """[sequences + 1]."""
    context_lens: Ints
    """[sequences]."""
    begun: tuple[int, ...]
    """Blocks in which the step writes the first token, and does not fill."""

    @property
    def longest_query(self) -> int:
        """Tokens of the sequence that has most of them in this step."""
        return int(np.diff(self.q_starts).max())

    @property
    def num_pairs(self) -> int:
        """At most so many times a token attends to a position."""
        return int(np.dot(np.diff(self.q_starts).astype(np.int64), self.context_lens))

    @property
    def num_positions(self) -> int:
        """Tokens of the longest context."""
        return int(self.context_lens.max())


def step_arrays(batch: StepBatch, block_size: int, num_layers: int) -> StepArrays:
    """Of a batch with a token at least. Its entries may be as low as ``-num_layers``: that is 0."""
    width = -(-int(batch.context_lens.max()) // block_size)
    tables = np.ascontiguousarray(batch.tables[batch.rows, :width] + np.int32(num_layers))
    positions = batch.positions.astype(np.int64)
    sequence = np.repeat(np.arange(len(batch.rows)), np.diff(batch.q_starts))
    blocks, places = np.divmod(positions, block_size)
    entries = tables[sequence, blocks].astype(np.int64)
    is_begun = places == 0
    is_begun &= batch.context_lens[sequence] < (blocks + 1) * block_size
    return StepArrays(
        tables=tables,
        slots=entries * block_size + places,
        positions=positions,
        q_starts=np.ascontiguousarray(batch.q_starts),
        context_lens=np.ascontiguousarray(batch.context_lens),
        begun=tuple(entries[is_begun].tolist()),
    )
