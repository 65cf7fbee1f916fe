"""Independent random streams from one seed."""

import numpy as np

ARRIVALS = 1
LENGTHS = 2
THINNING = 3
UPSCALING = 4
PROMPTS = 5
THINKING = 6


def generator(seed: int, *stream: int) -> np.random.Generator:
    """A generator that depends on ``seed`` and ``stream`` alone.

    Two streams of one seed are independent, so that changing how arrivals are drawn does not
    change the lengths.
    """
    return np.random.default_rng([seed, *stream])
