"""Lengths: vLLM's random rule, the BurstGPT fit, the paper's ShareGPT rule."""

import pytest

from kunserve.core.errors import ConfigError
from kunserve_lab.workload.lengths import (
    burstgpt_lengths,
    clip_total,
    random_lengths,
    sample_lengths,
    scale_lengths,
)
from kunserve_lab.workload.workload import Lengths

POOL = Lengths((100, 4000, 10, 4096), (50, 500, 4096, 1), "pool")


def test_random_lengths_stay_in_vllms_range() -> None:
    drawn = random_lengths(2000, 100, 20, 0.5, seed=0)
    assert (min(drawn.input_tokens), max(drawn.input_tokens)) == (50, 150)
    assert (min(drawn.output_tokens), max(drawn.output_tokens)) == (10, 30)
    assert random_lengths(3, 7, 5, 0.0, seed=0).input_tokens == (7, 7, 7)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 2.0])
def test_a_range_ratio_outside_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="range ratio"):
        random_lengths(1, 10, 10, ratio, seed=0)
    with pytest.raises(ConfigError, match="at least 1 token"):
        random_lengths(1, 0, 10, 0.0, seed=0)


def test_the_burstgpt_fit_has_the_published_means() -> None:
    drawn = burstgpt_lengths(200_000, seed=0)
    assert drawn.mean_input_tokens == pytest.approx(642, rel=0.01)
    assert drawn.mean_output_tokens == pytest.approx(262, rel=0.01)
    above = sum(tokens > 1023 for tokens in drawn.input_tokens) / len(drawn)
    assert 0.15 < above < 0.20
    assert max(drawn.input_tokens) <= 4096 and max(drawn.output_tokens) <= 2048


def test_the_sharegpt_rule() -> None:
    clipped = clip_total(POOL, 4096)
    assert clipped.input_tokens == (100, 3596, 4095)
    assert clipped.output_tokens == (50, 500, 1)
    with pytest.raises(ConfigError, match="at least 2"):
        clip_total(POOL, 1)


def test_sampling_keeps_pairs_together() -> None:
    pairs = set(zip(POOL.input_tokens, POOL.output_tokens, strict=True))
    drawn = sample_lengths(POOL, 100, seed=4)
    assert set(zip(drawn.input_tokens, drawn.output_tokens, strict=True)) == pairs
    with pytest.raises(ConfigError, match="no lengths"):
        sample_lengths(Lengths((), (), "nothing"), 1, seed=0)


def test_take_starts_over_in_order() -> None:
    assert Lengths((1, 2), (3, 4), "x").take(5).input_tokens == (1, 2, 1, 2, 1)
    with pytest.raises(ConfigError, match="no lengths"):
        Lengths((), (), "x").take(1)


def test_scaling_lengths_never_reaches_zero() -> None:
    scaled = scale_lengths(POOL, 0.01)
    assert scaled.input_tokens == (1, 40, 1, 41)
    assert scale_lengths(POOL, 1.0) is POOL
    with pytest.raises(ConfigError, match="length factor"):
        scale_lengths(POOL, 0.0)
