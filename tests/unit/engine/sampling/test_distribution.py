import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kunserve.core.request import SamplingParams
from kunserve.engine.sampling.distribution import draw, largest, token_logprobs
from kunserve.engine.sampling.sampler import uniform
from tests.unit.engine.sorted_distribution import sorted_draw

PLAIN = SamplingParams(1)


def log(probabilities: list[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, dtype=np.float32))


def test_draws_follow_the_distribution() -> None:
    probabilities = [0.5, 0.0, 0.3, 0.2]
    points = [uniform(1, position) for position in range(5000)]
    drawn = np.bincount([draw(log(probabilities), PLAIN, point) for point in points], minlength=4)
    assert drawn[1] == 0
    assert np.allclose(drawn / 5000, probabilities, atol=0.03)


def test_the_last_point_finds_the_last_likely_token() -> None:
    last = math.nextafter(1.0, 0.0)
    assert draw(log([0.5, 0.5, 0.0]), PLAIN, last) == 1
    row = np.full(1000, -np.inf, dtype=np.float32)
    row[[10, 700]] = 0.0
    assert draw(row, PLAIN, last) == 700
    assert draw(row, PLAIN, 0.0) == 10


@given(st.integers(1, 1500), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_an_unfiltered_draw_is_where_the_running_sum_passes(
    size: int, seed: int, point: float
) -> None:
    row = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    weights = np.exp(row.astype(np.float64))
    reached = np.cumsum(weights) / weights.sum()
    token = draw(row, PLAIN, point)
    assert reached[token] >= point - 1e-5
    assert token == 0 or reached[token - 1] <= point + 1e-5


@given(st.integers(1, 1500), st.integers(0, 1600), st.integers(0, 2**32 - 1))
def test_the_largest_are_those_of_a_sort(size: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 50, size).astype(np.float32)
    expected = np.lexsort((np.arange(size), -values))[:count]
    assert largest(values, count).tolist() == expected.tolist()


@given(
    size=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.01, 0.5, 3.0, 8.0]),
    levels=st.sampled_from([None, 3, 40]),
    top_k=st.sampled_from([None, 1, 7, 100, 2999]),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 0.9999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.2]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    num_forbidden=st.integers(0, 20),
)
def test_a_draw_is_what_sorting_everything_gives(
    size: int,
    seed: int,
    spread: float,
    levels: int | None,
    top_k: int | None,
    top_p: float,
    min_p: float,
    temperature: float,
    num_forbidden: int,
) -> None:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, spread, size).astype(np.float32)
    if levels is not None:  # many equal ones
        row = np.round(row * levels) / np.float32(levels)
    row[rng.integers(0, size, min(num_forbidden, size - 1))] = -np.inf
    assume(np.isfinite(row.max()))
    sampling = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for point in (0.0, math.nextafter(1.0, 0.0), *rng.random(4)):
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            expected = sorted_draw(row.copy(), sampling, point)
            assert draw(row.copy(), sampling, point) == expected, (point, sampling)


def test_a_flat_distribution_over_a_large_vocabulary() -> None:
    flat = np.zeros(50_000, dtype=np.float32)
    assert 24_900 < draw(flat, SamplingParams(1, top_p=0.5), 0.999) <= 25_000
    peaked = flat.copy()
    peaked[123] = math.log(75_000)  # 60 % of all
    assert draw(peaked, SamplingParams(1, top_p=0.3), 0.99) == 123
    assert draw(peaked, SamplingParams(1, top_k=2), 0.9999999) == 0
    # Nearly all tokens are needed, and each weighs little beside the largest.
    peaked[123] = math.log(1e6)
    tokens = {draw(peaked, SamplingParams(1, top_p=0.99), point) for point in (0.5, 0.97, 0.999)}
    assert 123 in tokens and max(tokens) > 20_000


def test_temperature_sharpens_and_flattens() -> None:
    row = log([0.6, 0.4])
    sharp, soft = (SamplingParams(1, temperature=t) for t in (0.1, 100.0))
    points = [uniform(1, position) for position in range(300)]
    assert sum(draw(row, sharp, point) for point in points) < 20
    assert 110 < sum(draw(row, soft, point) for point in points) < 190


def test_logprobs() -> None:
    found = token_logprobs(log([0.1, 0.6, 0.3]), 2, 2)
    assert found.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert found.rank == 2
    assert [token for token, _ in found.top] == [1, 2]
    assert found.top[0][1] == pytest.approx(math.log(0.6), abs=1e-6)
    assert token_logprobs(log([0.1, 0.9]), 0, 0).top == ()
    assert len(token_logprobs(log([0.1, 0.9]), 0, 20).top) == 2
