"""A step's work as the kernels want it: flat int32 arrays."""

import numpy as np
import numpy.typing as npt

from kunserve.control.instance.body import StepWork
from kunserve.core.kv_blocks import KvBlocks
from kunserve.engine.cpu.decoder import StepBatch
from kunserve.engine.cpu.kernels.library import is_loaded
from kunserve.engine.cpu.kernels.ops import lowest_and_highest

_NO_TOKENS = np.empty(0, dtype=np.int32)


def build_batch(work: StepWork, *, rows_are_alike: bool = False) -> StepBatch:
    """The step's arrays; the logits wanted are those of the plan's ``sampled_rows``.

    A right guess changes no bit. So a decode with guesses is one sequence for each of its tokens,
    computed by the same kernels and recorded steps as decodes are; or it is one, whose KV is read
    once, where ``rows_are_alike``: a row's bits do not depend on those beside it.
    """
    chunks, rows = work.plan.chunks, work.rows
    _, chunk_starts, chunk_lengths, chunk_samples = zip(*chunks, strict=True)
    assert min(chunk_starts) >= 0, chunks
    if chunk_lengths.count(1) == chunk_samples.count(1) == len(chunks):
        return _only_decodes(work, chunk_starts)
    starts = np.array(chunk_starts, dtype=np.int32)
    lengths = np.array(chunk_lengths, dtype=np.int32)
    num_sampled = np.array(chunk_samples, dtype=np.int32)
    guesses = num_sampled > 1
    assert (lengths == num_sampled)[guesses].all(), chunks
    if guesses.any() and not rows_are_alike:
        parts = np.where(guesses, lengths, np.int32(1))
        starts = np.repeat(starts - np.cumsum(parts, dtype=np.int32) + parts, parts)
        starts += np.arange(len(starts), dtype=np.int32)
        lengths = np.repeat(np.where(guesses, np.int32(1), lengths), parts)
        num_sampled = np.repeat(np.minimum(num_sampled, np.int32(1)), parts)
        rows = np.repeat(rows, parts)
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
        sample_rows=_sampled(q_starts[1:], num_sampled),
        wants_sampled=work.is_last and not work.plan.scored,
    )


def _sampled(ends: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The last so many rows of each sequence, which end there."""
    last = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
    return last.astype(np.int32)


def _only_decodes(work: StepWork, starts: tuple[int, ...]) -> StepBatch:
    """As nearly every step of a server is: one token of each, after which one is sampled."""
    num = len(starts)
    flat = np.array([*starts, *range(num + 1), *[start + 1 for start in starts]], dtype=np.int32)
    q_starts = flat[num : 2 * num + 1]
    return StepBatch(
        token_ids=_NO_TOKENS if work.token_ids is None else work.token_ids,
        positions=flat[:num],
        tables=work.tables,
        rows=work.rows,
        q_starts=q_starts,
        context_lens=flat[2 * num + 1 :],
        sample_rows=q_starts[:-1],
        reach=max(starts) + 1,
        flat=flat,
    )


def entry_bounds(batch: StepBatch, blocks: KvBlocks) -> tuple[int, int] | None:
    """The lowest and the highest of ``entries_of``; None if there are none."""
    # Kernels read a table as far as a context goes: beyond its row is another's, or nobody's.
    reach, width = batch.num_positions, batch.tables.shape[1]
    assert blocks.holding(reach) <= width, (reach, width, blocks)
    # Where a GPU computes, there may be no compiler.
    if blocks.ring is not None or not is_loaded():
        entries = entries_of(batch, blocks)
        return (int(entries.min()), int(entries.max())) if len(entries) else None
    low, high = lowest_and_highest(batch.as_c(), blocks.block_size)
    return (low, high) if low <= high else None


def entries_of(batch: StepBatch, blocks: KvBlocks) -> npt.NDArray[np.int32]:
    """The block table entries that a step reads or writes, each at least once."""
    if blocks.ring is None:
        num_blocks = -(-batch.context_lens // blocks.block_size)
    else:
        lengths = batch.context_lens.tolist()
        num_blocks = np.array([blocks.holding(length) for length in lengths], dtype=np.int32)
    tables = batch.tables[batch.rows, : num_blocks.max(initial=0)]
    is_used = np.arange(tables.shape[1]) < num_blocks[:, None]
    return tables[is_used]
