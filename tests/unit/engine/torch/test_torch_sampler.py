"""The device's sampler says what the host's does, but where a point lies on a border."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams
from kunserve.core.step import SequenceStart
from kunserve.engine.sampling.distribution import draw
from kunserve.engine.sampling.sampler import Sampler
from kunserve.engine.torch.sampler import TorchSampler, draw_rows

VOCAB = 700
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.none() | st.sampled_from([1, 2, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 1000),
)


def rows_of(seed: int, num: int, levels: int) -> np.ndarray:
    """Few levels make many equal logits."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(0, 3, (num, VOCAB))
    return np.round(rows * levels / 3).astype(np.float32) * np.float32(3 / levels)


@settings(max_examples=60)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    levels=st.sampled_from([2, 1000]),
    point=st.floats(0.0, 1.0, exclude_max=True),
)
def test_draws_are_the_same(
    params: list[SamplingParams], seed: int, levels: int, point: float
) -> None:
    rows = rows_of(seed, len(params), levels)
    points = [(point + i / len(params)) % 1.0 for i in range(len(params))]
    tokens = draw_rows(torch.from_numpy(rows.copy()), params, points).tolist()
    for row, one, at, token in zip(rows, params, points, tokens, strict=True):
        near = {draw(row, one, min(max(at + step, 0.0), 1 - 1e-12)) for step in (-1e-5, 0.0, 1e-5)}
        assert token in near, (one, at)


def sample_with(
    kind: type[Sampler], params: list[SamplingParams], rows: np.ndarray
) -> list[object]:
    sampler = kind((2,), VOCAB)
    ids = [RequestId(f"r{i}") for i in range(len(params))]
    for request_id, one in zip(ids, params, strict=True):
        history = (5, 6, 7) if one.needs_history else ()
        sampler.start(SequenceStart(request_id, one, 3, history))
    sampled: list[object] = []
    for position in range(3):
        logits = torch.from_numpy(np.roll(rows, position, axis=1).copy())
        sampled += [*sampler.sample(logits, ids, [position] * len(ids))]
    return sampled


def test_every_kind_of_row_in_one_batch() -> None:
    """Greedy, drawn, filtered, and those that come to the host."""
    params = [
        SamplingParams(100, temperature=0.0),
        SamplingParams(100, seed=1),
        SamplingParams(100, top_p=0.8, seed=2),
        SamplingParams(100, top_k=5, seed=3),
        SamplingParams(100, frequency_penalty=0.5, repetition_penalty=1.3, seed=4),
        SamplingParams(100, temperature=0.0, num_logprobs=2),
        SamplingParams(100, min_p=0.1, min_tokens=2, seed=5),
        SamplingParams(100, temperature=0.0, logit_bias=((9, 100.0),)),
    ]
    rows = rows_of(3, len(params), 1000)
    assert sample_with(TorchSampler, params, rows) == sample_with(Sampler, params, rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cannot_be_sampled_ends_alone(bad: float, temperature: float) -> None:
    params = [SamplingParams(100, temperature=temperature, seed=i) for i in range(3)]
    rows = rows_of(1, 3, 1000)
    rows[1, 17] = bad
    both = [sample_with(kind, params, rows) for kind in (TorchSampler, Sampler)]
    assert both[0] == both[1]
    assert [token.token_id is None for token in both[0][:3]] == [False, True, False]  # type: ignore[attr-defined]


def test_the_lowest_of_equals_wins() -> None:
    rows = np.zeros((2, VOCAB), dtype=np.float32)
    rows[1, [300, 20, 650]] = 4.0
    greedy = [SamplingParams(100, temperature=0.0)] * 2
    sampled = sample_with(TorchSampler, greedy, rows)
    assert [token.token_id for token in sampled[:2]] == [0, 20]  # type: ignore[attr-defined]


def test_a_request_that_is_not_known_gets_no_token() -> None:
    (token,) = TorchSampler((2,), VOCAB).sample(torch.zeros(1, VOCAB), [RequestId("?")], [0])
    assert token.token_id is None
