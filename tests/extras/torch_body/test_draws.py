"""The likeliest tokens, draws and log-probabilities of rows, beside the host's of one row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.request import SamplingParams
from kunserve.engine.sampling.distribution import draw, largest, token_logprobs
from kunserve.engine.sampling.sampler import uniform, uniforms
from kunserve_extras.torch_body.draws import (
    MOST_LISTED,
    Filters,
    likeliest,
    pick_by_id,
    pick_falling,
    pick_sorted,
    score,
    weights_of,
)
from tests.examples import examples

WIDTHS = st.sampled_from([5, 256, 700, 3001, 5000])


def rows_of(seed: int, num: int, width: int, levels: int) -> np.ndarray:
    """Few levels make many equal logits."""
    rows = np.random.default_rng(seed).normal(0, 3, (num, width))
    return np.round(rows * levels / 3).astype(np.float32) * np.float32(3 / levels)


def filters_of(params: list[SamplingParams], width: int) -> Filters:
    columns = [
        torch.tensor([one.temperature for one in params])[:, None],
        torch.tensor([one.min_p for one in params])[:, None],
        torch.tensor([one.top_k or width for one in params])[:, None],
        torch.tensor([one.top_p for one in params], dtype=torch.float64)[:, None],
    ]
    return Filters(*columns)


def draw_rows(rows: np.ndarray, params: list[SamplingParams], points: list[float]) -> list[int]:
    """Each as the sampler would if it were alone."""
    tokens = []
    for row, one, point in zip(rows, params, points, strict=True):
        logits, filters = torch.from_numpy(row[None].copy()), filters_of([one], len(row))
        at = torch.tensor([[point]], dtype=torch.float64)
        values, ids = likeliest(logits, min(one.top_k or MOST_LISTED, MOST_LISTED))
        whole = weights_of(logits - logits.max(), filters.temperature, filters.min_p)
        token, totals = pick_by_id(whole, at)
        if one.top_k is not None or one.top_p < 1.0:
            is_share = one.top_k is None
            listed = weights_of(values - values[:, :1], filters.temperature, filters.min_p)
            totals = totals if is_share else torch.zeros_like(totals)
            place, is_enough = pick_falling(listed, totals, filters, at)
            token = ids.gather(1, place)
            if not is_enough.item() or (one.top_k or 0) > MOST_LISTED:
                token = pick_sorted(whole, filters, at)
        tokens.append(int(token))
    return tokens


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 1000),
    width=WIDTHS,
    count=st.sampled_from([1, 2, 40, 1024]),
    levels=st.sampled_from([1, 2, 1000]),
)
def test_the_likeliest_are_the_hosts(seed: int, width: int, count: int, levels: int) -> None:
    rows = rows_of(seed, 3, width, levels)
    values, ids = likeliest(torch.from_numpy(rows), count)
    for row, some, which in zip(rows, values, ids, strict=True):
        assert which.tolist() == largest(row, count).tolist()
        assert some.tolist() == row[which.numpy()].tolist()


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.none() | st.sampled_from([1, 2, 40, 2000, 9000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)


@settings(max_examples=examples(80))
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    width=WIDTHS,
    levels=st.sampled_from([1, 2, 1000]),
    point=st.floats(0.0, 1.0, exclude_max=True),
)
def test_draws_are_the_hosts(
    params: list[SamplingParams], seed: int, width: int, levels: int, point: float
) -> None:
    """But where the point lies on a border."""
    rows = rows_of(seed, len(params), width, levels)
    points = [(point + i / len(params)) % 1.0 for i in range(len(params))]
    tokens = draw_rows(rows, params, points)
    for row, one, at, token in zip(rows, params, points, tokens, strict=True):
        near = {draw(row, one, min(max(at + step, 0.0), 1 - 1e-12)) for step in (-1e-5, 0.0, 1e-5)}
        assert token in near, (one, at)


def test_a_point_just_below_one_and_at_zero() -> None:
    rows = rows_of(0, 1, 3001, 1000)
    for params in (SamplingParams(9), SamplingParams(9, top_p=0.9), SamplingParams(9, top_k=7)):
        for point in (0.0, 1 - 2.0**-53):
            (token,) = draw_rows(rows, [params], [point])
            assert rows[0, token] > -np.inf and 0 <= token < 3001


@pytest.mark.parametrize("width", [1, 255, 256, 257, 3001])
def test_a_flat_row_is_drawn_evenly(width: int) -> None:
    """Each token has the same share, to the last one."""
    row = np.full((1, width), -7.0, dtype=np.float32)
    for token in {0, width // 2, width - 1}:
        point = (token + 0.5) / width
        assert draw_rows(row, [SamplingParams(9)], [point]) == [token]
        nearly_all = SamplingParams(9, top_p=1 - 1e-9)
        assert draw_rows(row, [nearly_all], [point]) == [token]


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 1000), width=WIDTHS, count=st.integers(0, 20))
def test_log_probabilities_are_the_hosts(seed: int, width: int, count: int) -> None:
    rows = rows_of(seed, 4, width, 1000)
    tokens = np.random.default_rng(seed).integers(0, width, 4)
    scores = score(torch.from_numpy(rows.copy()), torch.from_numpy(tokens)[:, None], count)
    num = min(count, width)
    for row, token, (logprob, rank, *rest) in zip(rows, tokens, scores.tolist(), strict=True):
        expected = token_logprobs(row, int(token), count)
        assert (int(rank), rest[:num]) == (expected.rank, [one for one, _ in expected.top])
        found = [logprob, *rest[num:]]
        assert found == pytest.approx([expected.logprob, *(p for _, p in expected.top)], abs=2e-6)


@settings(max_examples=examples(50))
@given(
    seeds=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5),
    position=st.integers(0, 2**31),
)
def test_points_are_the_hosts(seeds: list[int], position: int) -> None:
    wrapped = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    positions = np.arange(position, position + len(seeds), dtype=np.uint64)
    expected = [uniform(seed, position + i) for i, seed in enumerate(seeds)]
    assert uniforms(wrapped, positions).tolist() == expected
