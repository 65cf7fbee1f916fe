"""Choosing from rows of logits that lie on a device.

The number of calls does not depend on the number of rows, and none waits for the device. Weights
are whole numbers, so their sums are the same in whatever order a device takes them: a row's token
depends on its logits, its parameters and its point, and on nothing else in its batch.

The rules are those of ``engine.sampling.distribution``, in which sums are rounded. So a token may
differ from the host's where its point lies within that of the border between two tokens.
"""

import math
from dataclasses import dataclass

import torch

MOST_LISTED = 1024
"""So many of the likeliest tokens of a row are put in order; a row that needs more is sorted."""
_ONE = 2.0**44
"""The weight of a row's likeliest token. Sums of 2 ** 18 of them fit an int64, and what is lost of
a token's probability is below 2 ** -44."""
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Filters:
    """What some rows ask for, each [n, 1] on the device."""

    temperature: torch.Tensor
    """float32."""
    min_p: torch.Tensor | None
    """float32; None if no row has one."""
    top_k: torch.Tensor
    """int64; at least the vocabulary where there is none."""
    top_p: torch.Tensor
    """float64."""

    def at(self, rows: torch.Tensor) -> "Filters":
        """Of these rows only."""
        min_p = None if self.min_p is None else self.min_p.index_select(0, rows)
        others = (self.temperature, self.top_k, self.top_p)
        temperature, top_k, top_p = (one.index_select(0, rows) for one in others)
        return Filters(temperature, min_p, top_k, top_p)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids [n, count] of the largest of each row, largest first, lower id first among
    equals; fewer if the vocabulary has fewer.

    They lie in as many blocks, those with the largest maxima: of any other block each of these has
    a token that goes before all of its own.
    """
    num_rows, width = logits.shape
    count = min(count, width)
    block = 1 << round(math.log2(width / count) / 2)
    num_blocks = width // block
    if num_blocks <= count:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    maxima = logits[:, : num_blocks * block].unflatten(1, (num_blocks, block)).amax(dim=2)
    blocks = maxima.sort(dim=1, descending=True, stable=True).indices[:, :count]
    blocks = blocks.sort(dim=1).values[:, :, None]  # so that equals lie by id
    ids = (blocks * block + torch.arange(block, device=logits.device)).flatten(1)
    if num_blocks * block < width:
        rest = torch.arange(num_blocks * block, width, device=logits.device)
        ids = torch.cat((ids, rest.expand(num_rows, -1)), dim=1)
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order[:, :count])


def weights_of(
    below: torch.Tensor, temperature: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor:
    """Whole numbers in proportion to probabilities. ``below`` [n, k], each logit less its row's
    largest, is overwritten.
    """
    if temperature is not None:
        below.div_(temperature)
    weights = below.exp_()
    if min_p is not None:
        weights.masked_fill_(weights < min_p, 0.0)
    return weights.mul_(_ONE).round_().to(torch.int64)


def pick_by_id(weights: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token [n, 1] at each row's point of all ``weights`` [n, vocab] laid out by id, and their
    sum [n, 1].
    """
    width = weights.shape[1]
    sums = _block_sums(weights)
    reached = sums.cumsum(dim=1)
    totals = reached[:, -1:]
    target = _target(totals, points)
    # Rows with a NaN have any sums. Nobody looks at what is found there, but it must lie inside.
    block = (reached <= target).sum(dim=1, keepdim=True).clamp(max=sums.shape[1] - 1)
    target -= (reached - sums).gather(1, block)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=width - 1)).cumsum(dim=1)
    place = (inside <= target).sum(dim=1, keepdim=True)
    return (block * _BLOCK + place).clamp(max=width - 1), totals


def pick_falling(
    weights: torch.Tensor, totals: torch.Tensor, filters: Filters, points: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The place [n, 1] of what is at each row's point of those of ``weights`` [n, k], largest
    first, that ``top_k`` and then ``top_p`` leave; and whether they were enough for ``top_p``.

    ``totals`` [n, 1]: what ``top_p`` is a share of, or 0 where that is these weights.
    """
    width = weights.shape[1]
    ranks = torch.arange(width, device=weights.device)
    weights = weights.masked_fill(ranks >= filters.top_k, 0)
    reached = weights.cumsum(dim=1)
    found = reached[:, -1:]
    share = torch.where(totals > 0, totals, found).to(torch.float64) * filters.top_p
    is_left = (reached - weights).to(torch.float64) < share
    left = reached.masked_fill(~is_left, 0).amax(dim=1, keepdim=True)
    place = (reached <= _target(left, points)).sum(dim=1, keepdim=True)
    return place.clamp(max=width - 1), found.to(torch.float64) >= share


def pick_sorted(weights: torch.Tensor, filters: Filters, points: torch.Tensor) -> torch.Tensor:
    """``pick_falling`` of whole rows [n, vocab]: the tokens [n, 1]."""
    falling, ids = weights.sort(dim=1, descending=True, stable=True)
    place, _ = pick_falling(falling, torch.zeros_like(ids[:, :1]), filters, points)
    return ids.gather(1, place)


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Of the softmax of ``logits`` [n, vocab], which is overwritten: float64 [n, 2 + 2 * count].

    A row has the log-probability of its token (``tokens`` [n, 1]) and its rank, then the ids of the
    ``count`` likeliest ones, then their log-probabilities.
    """
    chosen = logits.gather(1, tokens)
    rank = (logits > chosen).sum(dim=1, keepdim=True) + 1
    values, ids = likeliest(logits, max(count, 1))
    largest = values[:, :1].clone()
    totals = _block_sums(weights_of(logits.sub_(largest), None, None)).sum(dim=1, keepdim=True)
    norm = largest.to(torch.float64) + (totals.to(torch.float64) / _ONE).log()
    return torch.cat((chosen - norm, rank, ids[:, :count], values[:, :count] - norm), dim=1)


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Of each 256 neighbours in rows [n, vocab]; the last block may have fewer."""
    width = weights.shape[1]
    whole = width // _BLOCK * _BLOCK
    parts = []
    if whole:
        parts = [weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=2)]
    if whole < width:
        parts.append(weights[:, whole:].sum(dim=1, keepdim=True))
    return torch.cat(parts, dim=1)


def _target(totals: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """What running sums must exceed at these points of their totals."""
    target = (totals.to(torch.float64) * points).to(torch.int64)
    return target.minimum(totals - 1)  # a point just below 1 may be rounded to all
