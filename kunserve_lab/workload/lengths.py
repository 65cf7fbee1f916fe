"""Input and output lengths of requests, in tokens."""

import numpy as np
import numpy.typing as npt

from kunserve.core.errors import ConfigError
from kunserve_lab.workload import seeds
from kunserve_lab.workload.workload import Lengths

SHAREGPT_MAX_TOTAL_TOKENS = 4096

_INPUT_MU, _INPUT_SIGMA, _INPUT_MAX_TOKENS = 5.9956, 1.0, 4096
_OUTPUT_MU, _OUTPUT_SIGMA, _OUTPUT_MAX_TOKENS = 5.2518, 0.8, 2048


def random_lengths(
    count: int, input_tokens: int, output_tokens: int, range_ratio: float, seed: int
) -> Lengths:
    """vLLM's ``random`` lengths: uniform integers in ``[n * (1 - r), n * (1 + r)]``."""
    if not 0.0 <= range_ratio < 1.0:
        raise ConfigError(f"the range ratio must be at least 0 and below 1, not {range_ratio}")
    if input_tokens < 1 or output_tokens < 1:
        raise ConfigError(
            f"lengths must be at least 1 token, not {input_tokens} in, {output_tokens} out"
        )
    rng = seeds.generator(seed, seeds.LENGTHS)
    spread = "" if range_ratio == 0 else f" +-{range_ratio:.0%}, seed {seed}"
    return Lengths(
        _uniform(rng, input_tokens, range_ratio, count),
        _uniform(rng, output_tokens, range_ratio, count),
        f"{input_tokens} in, {output_tokens} out{spread}",
    )


def burstgpt_lengths(count: int, seed: int) -> Lengths:
    """Lengths with BurstGPT's published means, 642 in and 262 out, drawn independently.

    Lognormal, rounded and clipped: inputs with log-deviation 1.0 (its 17 % above 1,023 tokens
    agrees with the 19 % of the trace's first 500 rows) clipped at 4,096; outputs with 0.8
    clipped at 2,048. The location is solved so that the clipped mean is the published one.
    """
    rng = seeds.generator(seed, seeds.LENGTHS)
    inputs = np.exp(rng.normal(_INPUT_MU, _INPUT_SIGMA, count))
    outputs = np.exp(rng.normal(_OUTPUT_MU, _OUTPUT_SIGMA, count))
    return Lengths(
        _rounded(np.clip(inputs, 1, _INPUT_MAX_TOKENS)),
        _rounded(np.clip(outputs, 1, _OUTPUT_MAX_TOKENS)),
        f"lognormal fit to BurstGPT's means 642 in, 262 out, seed {seed}",
    )


def sample_lengths(pool: Lengths, count: int, seed: int) -> Lengths:
    """``count`` pairs drawn from ``pool`` with replacement; a pair stays together."""
    if not len(pool):
        raise ConfigError(f"no lengths to draw from ({pool.source})")
    picks = seeds.generator(seed, seeds.LENGTHS).integers(0, len(pool), count).tolist()
    return Lengths(
        tuple(pool.input_tokens[pick] for pick in picks),
        tuple(pool.output_tokens[pick] for pick in picks),
        f"{pool.source}, drawn with seed {seed}",
    )


def clip_total(pool: Lengths, max_total_tokens: int = SHAREGPT_MAX_TOTAL_TOKENS) -> Lengths:
    """The paper's rule for ShareGPT: ``input = min(input, max_total_tokens - output)``.

    Pairs whose output alone leaves no room for one input token are left out.
    """
    if max_total_tokens < 2:
        raise ConfigError(f"a total length must be at least 2 tokens, not {max_total_tokens}")
    kept = [
        (min(input_tokens, max_total_tokens - output_tokens), output_tokens)
        for input_tokens, output_tokens in zip(pool.input_tokens, pool.output_tokens, strict=True)
        if output_tokens < max_total_tokens
    ]
    return Lengths(
        tuple(pair[0] for pair in kept),
        tuple(pair[1] for pair in kept),
        f"{pool.source}, input = min(input, {max_total_tokens} - output)",
    )


def scale_lengths(pool: Lengths, factor: float) -> Lengths:
    """Every length times ``factor``, rounded, at least 1: for small models and machines."""
    if not (factor > 0 and np.isfinite(factor)):
        raise ConfigError(f"a length factor must be greater than 0, not {factor}")
    if factor == 1.0:
        return pool
    return Lengths(
        _rounded(np.maximum(1, np.array(pool.input_tokens, dtype=np.float64) * factor)),
        _rounded(np.maximum(1, np.array(pool.output_tokens, dtype=np.float64) * factor)),
        f"{pool.source}, lengths x{factor:g}",
        pool.contents
        and tuple(None if one is None else one.scaled(factor) for one in pool.contents),
        pool.priorities,
    )


def _uniform(rng: np.random.Generator, centre: int, ratio: float, count: int) -> tuple[int, ...]:
    low = max(1, int(np.floor(centre * (1 - ratio))))
    high = int(np.ceil(centre * (1 + ratio)))
    return tuple(rng.integers(low, high, count, endpoint=True).tolist())


def _rounded(values: npt.NDArray[np.float64]) -> tuple[int, ...]:
    return tuple(np.rint(values).astype(np.int64).tolist())
