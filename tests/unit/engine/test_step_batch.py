"""What is wrong with a step's arrays is found before C reads them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kunserve.core.ids import RequestId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.step import Chunk
from kunserve.engine.attention import StepBatch
from kunserve.engine.cpu.hidden_rows import HiddenRows
from kunserve.engine.step_batch import _only_decodes, build_batch, entry_bounds

NUM = 3


def only_decodes() -> StepBatch:
    rows = np.arange(NUM, dtype=np.int32)
    work: Any = SimpleNamespace(token_ids=None, tables=np.zeros((NUM, 4), np.int32), rows=rows)
    return _only_decodes(work, (5, 0, 7))


def test_a_step_of_decodes_is_one_array() -> None:
    batch = only_decodes()
    batch.check()
    parts = batch.positions, batch.q_starts, batch.context_lens
    assert [part.tolist() for part in parts] == [[5, 0, 7], [0, 1, 2, 3], [6, 1, 8]]
    c_batch = batch.as_c()
    for at, part in zip(
        (c_batch.positions, c_batch.q_starts, c_batch.context_lens), parts, strict=True
    ):
        assert at == part.ctypes.data


@pytest.mark.parametrize("wrong", ["short", "long", "another", "wide", "strided"])
def test_an_array_that_is_not_what_the_others_are_of_is_refused(wrong: str) -> None:
    batch = only_decodes()
    flat = batch.flat
    assert flat is not None
    batch.flat = {
        "short": flat[:-1],
        "long": np.append(flat, np.int32(0)),
        "another": flat.copy(),
        "wide": flat.astype(np.int64),
        "strided": np.repeat(flat, 2)[::2],
    }[wrong]
    with pytest.raises(AssertionError):
        batch.check()


def work_of(*chunks: tuple[int, int]) -> Any:
    plan = SimpleNamespace(
        chunks=[Chunk(RequestId(str(i)), *chunk, 1) for i, chunk in enumerate(chunks)], scored=()
    )
    rows = np.arange(len(chunks), dtype=np.int32)
    tables = np.zeros((len(chunks), 4), np.int32)
    return SimpleNamespace(plan=plan, token_ids=None, tables=tables, rows=rows, is_last=True)


@pytest.mark.parametrize("sound", [((5, 1), (63, 1)), ((5, 30), (60, 4))])
def test_a_step_reads_no_further_than_its_tables(sound: tuple[tuple[int, int], ...]) -> None:
    """In decodes and in prompts."""
    blocks = KvBlocks(16)
    assert entry_bounds(build_batch(work_of(*sound)), blocks) == (0, 0)
    (start, length) = sound[1]
    with pytest.raises(AssertionError, match="65, 4"):
        entry_bounds(build_batch(work_of(sound[0], (start + 1, length))), blocks)
    with pytest.raises(AssertionError):
        build_batch(work_of(sound[0], (-1, length)))


def test_no_rows_have_no_parts() -> None:
    none = HiddenRows.of_bytes(b"", 8)
    assert none.num_rows == none.address == 0 and not none.data.nbytes
    some = HiddenRows.of_bytes(bytes(range(16)), 8)
    assert some.first(0).num_rows == 0
    assert bytes(some.picked(np.array([1], dtype=np.int32)).data) == bytes(range(8, 16))
    with pytest.raises(AssertionError, match="no row is picked"):
        some.picked(np.array([], dtype=np.int32))
    for ask in (lambda: none.first(0), lambda: none.tensor("unused")):
        with pytest.raises(AssertionError, match="there are no rows"):
            ask()
