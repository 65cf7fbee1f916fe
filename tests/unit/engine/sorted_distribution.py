"""How tokens were drawn before sorts were avoided: what ``engine.distribution`` must still draw.

It sorts whole vocabularies, and adds up whole sorted rows. Every draw of a seed is a promise.
"""

import numpy as np

from kunserve.core.request import SamplingParams
from kunserve.engine.sampling.distribution import Row, _at_point, _weights


def sorted_draw(logits: Row, sampling: SamplingParams, point: float) -> int:
    """As ``distribution.draw``."""
    weights = _weights(logits, sampling.temperature)
    if sampling.min_p > 0:
        weights[weights < np.float32(sampling.min_p)] = 0
    if sampling.top_k is None and sampling.top_p >= 1.0:
        return _at_point(weights, point)
    ids = np.lexsort((np.arange(len(weights)), -weights))
    if sampling.top_k is not None:
        ids = ids[: sampling.top_k]
        share = sampling.top_p * float(weights[ids].sum(dtype=np.float64))
    else:
        share = sampling.top_p * float(weights.sum(dtype=np.float64))
    if sampling.top_p < 1.0:
        reached = np.cumsum(weights[ids], dtype=np.float64)
        ids = ids[: int(np.searchsorted(reached, share, side="left")) + 1]
    elif sampling.top_k is None:
        ids = ids[weights[ids] > 0]
    return int(ids[_at_point(weights[ids], point)])
