"""Each token's slot is where the block table has it; only begun blocks are to be emptied."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kunserve.engine.attention import StepBatch
from kunserve_extras.vllm_body.step_arrays import step_arrays

BLOCK = 4
LAYERS = 3
Chunks = list[tuple[int, int]]
"""Of each sequence: where it starts, and how many tokens."""


def batch_of(chunks: Chunks, tables: np.ndarray) -> StepBatch:
    lengths = np.array([num for _, num in chunks], dtype=np.int32)
    starts = np.array([start for start, _ in chunks], dtype=np.int32)
    q_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + num) for start, num in chunks])
    return StepBatch(
        token_ids=np.zeros(len(positions), dtype=np.int32),
        positions=positions.astype(np.int32),
        tables=tables,
        rows=np.arange(len(chunks), dtype=np.int32)[::-1].copy(),
        q_starts=q_starts,
        context_lens=starts + lengths,
        sample_rows=q_starts[1:] - 1,
    )


@given(st.lists(st.tuples(st.integers(0, 17), st.integers(1, 11)), min_size=1, max_size=5))
def test_every_token_has_its_slot(chunks: Chunks) -> None:
    width = 8
    entries = np.random.default_rng(1).permutation(len(chunks) * width) * LAYERS - LAYERS
    tables = entries.astype(np.int32).reshape(len(chunks), width)
    batch = batch_of(chunks, tables)
    arrays = step_arrays(batch, BLOCK, LAYERS)
    assert arrays.tables.min() >= 0
    token, begun = 0, []
    for row, (start, num) in zip(batch.rows, chunks, strict=True):
        for position in range(start, start + num):
            entry = tables[row, position // BLOCK] + LAYERS
            assert arrays.slots[token] == entry * BLOCK + position % BLOCK
            if position % BLOCK == 0 and start + num < position + BLOCK:
                begun.append(int(entry))
            token += 1
    assert token == len(arrays.slots) == len(arrays.positions)
    assert list(arrays.begun) == begun
    assert arrays.num_pairs == sum(num * (start + num) for start, num in chunks)
    assert arrays.longest_query == max(num for _, num in chunks)
    assert arrays.num_positions == max(start + num for start, num in chunks)


def test_a_row_of_another_sequence_is_not_read() -> None:
    tables = np.array([[3, 6], [9, 12]], dtype=np.int32)
    arrays = step_arrays(batch_of([(3, 2), (0, 4)], tables), BLOCK, LAYERS)
    assert arrays.tables.tolist() == [[12, 15], [6, 9]]
    assert arrays.slots.tolist() == [12 * 4 + 3, 15 * 4, 6 * 4, 6 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3]
    assert arrays.begun == (15,)
