"""A model's last layer leaves out rows that nobody samples; no bit of the others changes."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.decoder import Decoder, StepBatch
from kunserve.engine.cpu.kernels.library import set_num_threads
from tests.tiny_models import VOCAB, save_tiny

NUM_LAYERS = 3
WHOLE = LayerRange(0, NUM_LAYERS)
BLOCK_SIZE = 8
SIDE_BLOCKS = 300
SIDE_UNITS = SIDE_BLOCKS * NUM_LAYERS
"""Two steps of the same tokens leave their KV side by side."""
NUM_SEQUENCES = 3
MOST_TOKENS = 96
Chunk = tuple[int, int, int]
"""A sequence, its tokens so far, and how many come."""


@pytest.fixture(
    scope="module", params=["llama3 float32", "mistral", "qwen3", "olmoe", "qwen2_moe float32"]
)
def body(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineBody]:
    kind, _, dtype = request.param.partition(" ")
    folder = save_tiny(tmp_path_factory.mktemp(kind), kind, NUM_LAYERS)
    model = ModelConfig(model=str(folder), dtype=dtype or "bfloat16")
    memory = InstanceConfig(memory_bytes=16 << 20, granule_bytes=8192, block_size=BLOCK_SIZE)
    with closing(EngineBody(InstanceId(0), model, memory)) as made:
        yield made
    set_num_threads(1)


def begin(body: EngineBody, threads: int) -> None:
    """Without KV of any earlier test."""
    body.memory.unit_view(0, 2 * SIDE_UNITS)[:] = 0
    set_num_threads(threads)


def decoder_of(body: EngineBody) -> Decoder:
    assert isinstance(body._decoder, Decoder) and body._decoder.fused
    return body._decoder


def step_of(chunks: Sequence[Chunk], wanted: Sequence[int], side: int) -> StepBatch:
    starts = np.cumsum([0] + [num for _, _, num in chunks], dtype=np.int32)
    positions = np.concatenate([np.arange(past, past + num) for _, past, num in chunks])
    numbers = np.repeat([sequence for sequence, _, _ in chunks], np.diff(starts))
    blocks = np.arange(SIDE_BLOCKS, dtype=np.int32)[::-1] + side * SIDE_BLOCKS
    return StepBatch(
        token_ids=((positions * positions + 13 * positions + 7 * numbers) % VOCAB).astype(np.int32),
        positions=positions.astype(np.int32),
        tables=np.ascontiguousarray(blocks.reshape(NUM_SEQUENCES, -1) * NUM_LAYERS),
        rows=np.array([sequence for sequence, _, _ in chunks], dtype=np.int32),
        q_starts=starts,
        context_lens=np.array([past + num for _, past, num in chunks], dtype=np.int32),
        sample_rows=np.array(wanted, dtype=np.int32),
        wants_sampled=side > 0,
    )


def assert_same(body: EngineBody, chunks: Sequence[Chunk], wanted: Sequence[int]) -> None:
    """A step over all rows, and over what is wanted: in one call, in many, by two stages."""
    decoder = decoder_of(body)
    ours, theirs = (body.memory.unit_view(side * SIDE_UNITS, SIDE_UNITS) for side in (1, 0))
    before = ours.copy()
    every, some = (step_of(chunks, wanted, side) for side in range(2))

    states = decoder.forward(every, decoder.embed(every))
    assert len(states) == every.num_tokens
    expected = decoder.logits_of(np.array(wanted, dtype=np.int64), states).clone()
    logits, found = decoder.run_whole(some)
    assert torch.equal(logits, expected)
    assert found.token_ids == expected.argmax(dim=1).tolist()
    assert (ours == theirs).all()

    ours[:] = before
    calls: list[int] = []
    given = decoder.forward(some, decoder.embed(some), lambda: calls.append(1))
    assert len(calls) == NUM_LAYERS
    assert len(given) == len(wanted)
    assert torch.equal(decoder.logits(some, given), expected)
    assert (ours == theirs).all()

    ours[:] = before
    decoder.set_layers(LayerRange(0, 1))
    rows = decoder.run_fused(replace(some, wants_sampled=False), None)
    assert rows.num_rows == some.num_tokens
    decoder.set_layers(LayerRange(1, NUM_LAYERS))
    rows = decoder.run_fused(some, rows)
    decoder.set_layers(WHOLE)
    picked = states[torch.tensor(wanted, dtype=torch.int64)]
    assert bytes(rows.data) == picked.view(torch.uint8).numpy().tobytes()
    assert (ours == theirs).all()


lengths = st.lists(st.integers(0, 40), min_size=NUM_SEQUENCES, max_size=NUM_SEQUENCES).filter(any)
picks = st.sets(st.integers(0, 119), max_size=9)


@given(st.lists(st.tuples(lengths, picks), min_size=1, max_size=3), st.integers(1, 3))
@settings(max_examples=12)
def test_any_rows_of_any_steps(
    body: EngineBody, steps: list[tuple[list[int], set[int]]], threads: int
) -> None:
    begin(body, threads)
    past = [0] * NUM_SEQUENCES
    for numbers, picked in steps:
        fitting = [min(num, MOST_TOKENS - done) for num, done in zip(numbers, past, strict=True)]
        chunks = [(i, past[i], num) for i, num in enumerate(fitting) if num]
        if chunks:
            assert_same(body, chunks, sorted({row % sum(fitting) for row in picked}))
        past = [done + num for done, num in zip(past, fitting, strict=True)]


@pytest.mark.parametrize("threads", [1, 3])
def test_prompts_in_chunks_beside_decodes(body: EngineBody, threads: int) -> None:
    """Of several segments of keys: the last token of a long prompt attends to them as a decode."""
    begin(body, threads)
    assert_same(body, [(0, 0, 400), (1, 0, 9)], [408])
    assert_same(body, [(1, 9, 1), (0, 400, 300)], [0])
    assert_same(body, [(1, 10, 1), (0, 700, 99), (2, 0, 50)], [0, 99])
    assert_same(body, [(1, 11, 1), (0, 799, 1), (2, 50, 1)], [0, 1, 2])
    assert_same(body, [(0, 0, 700)], [])


@pytest.mark.parametrize("wanted", [[7, 2], [3, 3], [1, 0, *range(2, 10)]])
def test_rows_ascend(body: EngineBody, wanted: list[int]) -> None:
    """All rows in another order would be taken for all of them in order."""
    with pytest.raises(AssertionError):
        decoder_of(body).run_whole(step_of([(0, 0, 10)], wanted, 0))


def test_the_kernels_view_of_a_step_says_anew_what_is_wanted(body: EngineBody) -> None:
    decoder = decoder_of(body)
    batch = step_of([(0, 0, 20), (1, 0, 5)], [19], 1)
    assert len(decoder.forward(batch, decoder.embed(batch))) == 1
    batch.wants_sampled = False
    states = decoder.forward(batch, decoder.embed(batch))
    fresh = step_of([(0, 0, 20), (1, 0, 5)], [19], 0)
    assert torch.equal(states, decoder.forward(fresh, decoder.embed(fresh)))


def test_behind_the_last_keys_nothing_is_computed_for_nobody(body: EngineBody) -> None:
    decoder = decoder_of(body)
    every, none = (step_of([(0, 0, 20), (1, 0, 5)], [], side) for side in range(2))
    decoder.set_layers(LayerRange(0, NUM_LAYERS - 1))
    before = decoder.forward(every, decoder.embed(every))
    decoder.set_layers(WHOLE)
    states = decoder.embed(none)
    assert decoder.forward(none, states).shape == (0, before.shape[1])
    assert torch.equal(states, before)
    assert not torch.equal(decoder.forward(every, decoder.embed(every)), before)
