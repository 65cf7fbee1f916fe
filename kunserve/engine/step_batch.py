"""A step's work as the kernels want it: flat int32 arrays."""

import numpy as np
import numpy.typing as npt

from kunserve.control.instance.body import StepWork
from kunserve.engine.decoder import StepBatch

_NO_TOKENS = np.empty(0, dtype=np.int32)


def build_batch(work: StepWork) -> StepBatch:
    """The step's arrays; the logits wanted are those of the plan's ``sampled_rows``."""
    chunks = work.plan.chunks
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
    q_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lengths, out=q_starts[1:])
    positions = np.arange(q_starts[-1], dtype=np.int32)
    positions += np.repeat(starts - q_starts[:-1], lengths)
    num_sampled = np.array([chunk.num_sampled for chunk in chunks], dtype=np.int32)
    sample_rows = np.repeat(q_starts[1:] - np.cumsum(num_sampled), num_sampled)
    sample_rows += np.arange(len(sample_rows), dtype=np.int32)
    return StepBatch(
        token_ids=_NO_TOKENS if work.token_ids is None else work.token_ids,
        positions=positions,
        tables=np.ascontiguousarray(work.tables, dtype=np.int32),
        rows=np.ascontiguousarray(work.rows, dtype=np.int32),
        q_starts=q_starts,
        context_lens=starts + lengths,
        sample_rows=sample_rows.astype(np.int32),
    )


def entries_of(batch: StepBatch, block_size: int) -> npt.NDArray[np.int32]:
    """The block table entries that a step reads or writes, each at least once."""
    num_blocks = -(-batch.context_lens // block_size)
    tables = batch.tables[batch.rows, : num_blocks.max(initial=0)]
    is_used = np.arange(tables.shape[1]) < num_blocks[:, None]
    return tables[is_used]
