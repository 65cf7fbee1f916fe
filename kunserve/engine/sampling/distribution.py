"""Choosing from one row of logits. Each function makes a few passes over a row that fits a cache.

Sorting or accumulating a whole vocabulary takes milliseconds; here sums and maxima of blocks of
256 tokens find the few that matter. Where many matter, values are sorted and not tokens, which
takes half of the time.
"""

import numpy as np
import numpy.typing as npt

from kunserve.core.request import SamplingParams, TokenLogprobs

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 256
_FLOORS = (2.0**-7, 2.0**-10, 2.0**-12, 2.0**-14, 2.0**-16, 2.0**-20, 0.0)
"""Weights, relative to the largest, above which candidates for ``top_p`` are looked for."""


def draw(logits: Row, sampling: SamplingParams, point: float) -> int:
    """The token at ``point`` in [0, 1) of the cumulative distribution that the filters leave.

    Filtered tokens are laid out most likely first (lower id first among equals), unfiltered ones
    by id.
    """
    weights = _weights(logits, sampling.temperature)
    if sampling.min_p > 0:
        weights[weights < np.float32(sampling.min_p)] = 0
    if sampling.top_k is None and sampling.top_p >= 1.0:
        return _at_point(weights, point)
    if sampling.top_k is None:
        return _draw_top_p(weights, sampling.top_p, point)
    ids = largest(weights, sampling.top_k)
    if sampling.top_p < 1.0:
        share = sampling.top_p * float(weights[ids].sum(dtype=np.float64))
        ids = ids[: _num_until(weights[ids], share)]
    return int(ids[_at_point(weights[ids], point)])


def token_logprobs(logits: Row, token: int, count: int) -> TokenLogprobs:
    """Of the softmax of ``logits``: the token's, its rank, and the ``count`` most likely ones."""
    norm = float(logits.max()) + float(np.log(_weights(logits, 1.0).sum(dtype=np.float64)))
    rank = int(np.count_nonzero(logits > logits[token])) + 1
    ids = largest(logits, count)
    top = ((token_id, float(logits[token_id]) - norm) for token_id in ids.tolist())
    return TokenLogprobs(float(logits[token]) - norm, rank, tuple(top))


def largest(values: Row, count: int) -> Ids:
    """Ids of the ``count`` largest values, largest first, lower id first among equals."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    if count >= len(values):
        ids = np.arange(len(values))
    else:
        ids = np.flatnonzero(values >= _bound_of(values, count))
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def _bound_of(values: Row, count: int) -> np.float32:
    """What at least ``count`` of the values reach, and not many more."""
    whole = len(values) // _BLOCK * _BLOCK
    if count < whole // _BLOCK:
        # As many blocks have a maximum of at least the bound, so as many values have.
        values = values[:whole].reshape(-1, _BLOCK).max(axis=1)
    bound: np.float32 = np.partition(values, -count)[-count]
    return bound


def _weights(logits: Row, temperature: float) -> Row:
    """Unnormalised probabilities; the largest is 1."""
    weights: Row = logits - logits.max()
    if temperature != 1.0:
        weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def _at_point(weights: Row, point: float) -> int:
    """Index where the running sum of ``weights`` passes ``point`` times their sum."""
    whole = len(weights) // _BLOCK * _BLOCK
    sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1)
    sums = np.append(sums, weights[whole:].sum())
    reached = np.cumsum(sums, dtype=np.float64)
    target = point * reached[-1]
    block = _first_above(reached, target, sums)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    target -= reached[block - 1] if block else 0.0
    return block * _BLOCK + _first_above(np.cumsum(inside, dtype=np.float64), target, inside)


def _first_above(cumulative: npt.NDArray[np.float64], target: float, weights: Row) -> int:
    """First index whose running sum exceeds the target, or the last with weight if none does."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])


def _draw_top_p(weights: Row, top_p: float, point: float) -> int:
    """The token at a point of the likeliest ones that together have this share."""
    share = top_p * float(weights.sum(dtype=np.float64))
    rising = _likeliest(weights, share)
    falling = rising[::-1]
    falling = falling[: _num_until(falling, share)]
    index = _at_point(np.ascontiguousarray(falling), point)
    value = falling[index]
    # Equal weights lie by id.
    num_larger = len(rising) - int(np.searchsorted(rising, value, side="right"))
    return int(np.flatnonzero(weights == value)[index - num_larger])


def _likeliest(weights: Row, share: float) -> Row:
    """The largest weights, rising: at least those that together have the share."""
    found = weights
    for floor in _FLOORS:
        found = weights[weights > np.float32(floor)]
        if found.sum(dtype=np.float64) >= share:
            break
    return np.sort(found)


def _num_until(weights: Row, share: float) -> int:
    """How many of these, the largest first, together have the share."""
    reached = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(reached, share, side="left")) + 1
