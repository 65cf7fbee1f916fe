"""A step's work as the kernels want it: flat int32 arrays."""

import numpy as np
import numpy.typing as npt

from kunserve.control.instance.body import StepWork
from kunserve.engine.decoder import StepBatch

_NO_TOKENS = np.empty(0, dtype=np.int32)


def build_batch(work: StepWork) -> StepBatch:
    """The step's arrays; the logits wanted are those of the plan's ``sampled_rows``.

    A decode with guesses is one sequence for each of its tokens. So all of them are computed as
    decodes are, by the same kernels and recorded steps, and a right guess changes no bit.
    """
    chunks, rows = work.plan.chunks, work.rows
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
    num_sampled = np.array([chunk.num_sampled for chunk in chunks], dtype=np.int32)
    if (guesses := num_sampled > 1).any():
        assert (lengths == num_sampled)[guesses].all(), chunks
        parts = np.where(guesses, lengths, np.int32(1))
        starts = np.repeat(starts - np.cumsum(parts, dtype=np.int32) + parts, parts)
        starts += np.arange(len(starts), dtype=np.int32)
        lengths = np.repeat(np.where(guesses, np.int32(1), lengths), parts)
        num_sampled, rows = np.repeat(num_sampled, parts), np.repeat(rows, parts)
    q_starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=q_starts[1:])
    positions = np.arange(q_starts[-1], dtype=np.int32)
    positions += np.repeat(starts - q_starts[:-1], lengths)
    return StepBatch(
        token_ids=_NO_TOKENS if work.token_ids is None else work.token_ids,
        positions=positions,
        tables=np.ascontiguousarray(work.tables, dtype=np.int32),
        rows=np.ascontiguousarray(rows, dtype=np.int32),
        q_starts=q_starts,
        context_lens=starts + lengths,
        sample_rows=q_starts[1:][num_sampled > 0] - 1,
    )


def entries_of(batch: StepBatch, block_size: int) -> npt.NDArray[np.int32]:
    """The block table entries that a step reads or writes, each at least once."""
    num_blocks = -(-batch.context_lens // block_size)
    tables = batch.tables[batch.rows, : num_blocks.max(initial=0)]
    is_used = np.arange(tables.shape[1]) < num_blocks[:, None]
    return tables[is_used]
