"""The fake body notices what a real model would: its tokens depend on every byte."""

import numpy as np
import pytest

from kunserve.control.instance.body import StepWork, UnitCopy
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.layout import LayerRange
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import Chunk, SequenceStart, StepPlan
from kunserve_lab.world.fake_body import FakeBody, FakeModel, expected_tokens, fake_spec

MODEL = FakeModel(4)
PROMPT = (5, 6, 7, 8, 9)
REQUEST = Request(RequestId("r"), PROMPT, SamplingParams(max_tokens=1, temperature=0.0), 0.0)


def body(**changes: int) -> FakeBody:
    settings = {"kv_units": 16, "block_size": 2, "layer_bytes": 128, "granule_bytes": 32}
    return FakeBody(fake_spec(InstanceId(0), 4, **(settings | changes)), MODEL)


def work(
    layers: LayerRange, start: int, tokens: tuple[int, ...], entries: tuple[int, ...]
) -> StepWork:
    """One chunk of the request; it samples after the last prompt token."""
    is_first, samples = layers.first == 0, start + len(tokens) == len(PROMPT)
    begin = SequenceStart(REQUEST.request_id, REQUEST.sampling, len(PROMPT), ())
    return StepWork(
        plan=StepPlan(
            GroupId(0),
            StepId(0),
            (),
            (begin,) if start == 0 else (),
            (Chunk(REQUEST.request_id, start, len(tokens), samples),),
        ),
        layers=layers,
        is_first=is_first,
        is_last=layers.end == 4,
        token_ids=np.array(tokens, dtype=np.int32) if is_first else None,
        tables=np.array([entries], dtype=np.int32),
        rows=np.zeros(1, dtype=np.int32),
    )


WHOLE = LayerRange(0, 4)
EXPECTED = expected_tokens(REQUEST, MODEL, 100)


def sampled(result: FakeBody, entries: tuple[int, ...] = (0, 4, 8)) -> int:
    """The first token, with the prompt in two chunks."""
    result.execute(work(WHOLE, 0, PROMPT[:3], entries), None)
    outcome = result.execute(work(WHOLE, 3, PROMPT[3:], entries), None)
    return outcome.tokens[0].token_id


def test_the_oracle_agrees_with_the_body() -> None:
    assert (sampled(body()),) == EXPECTED


def test_two_stages_agree_with_one() -> None:
    first, second = body(), body()
    low, high = LayerRange(0, 2), LayerRange(2, 4)
    first.memory.drop(low)
    second.memory.drop(high)
    entries = (0, 2, 4)
    hidden = first.execute(work(low, 0, PROMPT, entries), None).hidden
    hidden = second.hidden_from_bytes(bytes(first.hidden_to_bytes(hidden)))
    shifted = tuple(entry - 2 for entry in entries)
    outcome = second.execute(work(high, 0, PROMPT, shifted), hidden)
    assert (outcome.tokens[0].token_id,) == EXPECTED


def test_one_changed_byte_of_kv_changes_the_token() -> None:
    changed = body()
    changed.execute(work(WHOLE, 0, PROMPT[:3], (0, 4, 8)), None)
    changed.unit_view(5, 1)[0] ^= 1
    outcome = changed.execute(work(WHOLE, 3, PROMPT[3:], (0, 4, 8)), None)
    assert (outcome.tokens[0].token_id,) != EXPECTED


def test_a_block_may_move() -> None:
    moved = body()
    moved.execute(work(WHOLE, 0, PROMPT[:3], (0, 4, 8)), None)
    moved.memory.copy_units((UnitCopy(0, 12, 4),))
    outcome = moved.execute(work(WHOLE, 3, PROMPT[3:], (12, 4, 8)), None)
    assert (outcome.tokens[0].token_id,) == EXPECTED


def test_layers_that_are_not_held_or_not_loaded_cannot_run() -> None:
    dropped = body()
    dropped.memory.drop(LayerRange(0, 2))
    with pytest.raises(AssertionError, match="not held"):
        sampled(dropped)
    dropped.memory.reclaim(WHOLE)
    with pytest.raises(AssertionError, match="not loaded"):
        sampled(dropped)
    dropped.load_layers(LayerRange(2, 4))
    assert (sampled(dropped),) == EXPECTED


def test_layers_come_from_a_peer_byte_by_byte() -> None:
    here, peer = body(), body()
    here.memory.drop(LayerRange(0, 3))
    here.memory.reclaim(WHOLE)
    here.layer_view(3)[:] = peer.layer_view(3)
    assert (sampled(here),) == EXPECTED
    here.layer_view(3)[7] += 1
    with pytest.raises(AssertionError, match="not loaded"):
        sampled(here)


def test_units_beyond_the_tail_cannot_be_used() -> None:
    with pytest.raises(AssertionError):
        sampled(body(), (0, 4, 16))
    with pytest.raises(AssertionError):
        body().unit_view(15, 2)


def test_a_drop_gives_whole_granules_and_a_reclaim_takes_them_back() -> None:
    whole = body(layer_bytes=100)
    remap = whole.memory.drop(LayerRange(0, 1))
    # Layers 1-3 are bytes 100..400 of 416: granules 4 (from byte 128) to 12, two units each.
    assert (remap.kv_units, remap.moved_bytes) == (16 + 9 * 32 // 16, 9 * 32)
    assert whole.spec.units_when_holding(1) <= remap.kv_units
    assert whole.memory.reclaim(WHOLE).kv_units == 16


def test_seeds_and_penalties_change_tokens() -> None:
    def tokens(**sampling: float) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=6, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        return expected_tokens(Request(RequestId("x"), PROMPT, params, 0.0), MODEL, 100)

    variants = [
        tokens(),
        tokens(temperature=1.0, seed=1),
        tokens(temperature=1.0, seed=2),
        tokens(frequency_penalty=1.0),
    ]
    assert len(set(variants)) == 4


def test_the_oracle_stops_where_a_request_does() -> None:
    long = Request(RequestId("x"), PROMPT, SamplingParams(max_tokens=50, temperature=0.0), 0.0)
    free = expected_tokens(long, MODEL, 100)
    assert len(free) == 50
    assert len(expected_tokens(long, MODEL, 12)) == 12 - len(PROMPT)
    stop = FakeModel(4, eos_token_ids=frozenset({free[3]}))
    assert expected_tokens(long, stop, 100) == free[: free.index(free[3]) + 1]
