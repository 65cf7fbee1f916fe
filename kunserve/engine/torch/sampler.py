"""The sampler where logits lie on a device: most rows are chosen there, and only tokens come back.

Rows with penalties, bans or log-probabilities come to the host, one by one. The rules are those of
``engine.sampler`` and ``engine.distribution``. Sums are taken in another order, so a draw may
differ where its point lies within rounding of the border between two tokens.
"""

from collections.abc import Sequence

import torch

from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams
from kunserve.core.step import SampledToken
from kunserve.engine.sampling.sampler import Sampler, sample_row, uniform

ROWS_AT_ONCE = 32
"""Rows whose running sums are in memory together, in float64."""


class TorchSampler(Sampler):
    """A ``Sampler`` for logits on any device."""

    def sample(
        self, logits: torch.Tensor, request_ids: Sequence[RequestId], positions: Sequence[int]
    ) -> tuple[SampledToken, ...]:
        """See ``Sampler.sample``."""
        # Among equals the first one, as torch promises.
        largest, tokens = logits.max(dim=1)
        drawn = [row for row in range(len(request_ids)) if self._is_drawn(request_ids[row])]
        for first in range(0, len(drawn), ROWS_AT_ONCE):
            some = drawn[first : first + ROWS_AT_ONCE]
            sampling = [self._states[request_ids[row]].sampling for row in some]
            points = [
                uniform(one.seed, positions[row]) for one, row in zip(sampling, some, strict=True)
            ]
            index = torch.tensor(some, device=logits.device)
            tokens[index] = draw_rows(logits[index], sampling, points)
        # One copy for all; it also waits for the device.
        found = torch.stack((tokens, largest.isfinite().to(tokens.dtype))).tolist()
        sampled = []
        for row, (request_id, token, is_sound) in enumerate(zip(request_ids, *found, strict=True)):
            state = self._states.get(request_id)
            if is_sound and state is not None and (state.is_argmax or self._is_drawn(request_id)):
                sampled.append(SampledToken(request_id, token, None))
            else:
                values = logits[row].cpu().numpy() if is_sound else None
                sampled.append(sample_row(request_id, values, state, positions[row]))
        self._flush()
        return tuple(sampled)

    def _is_drawn(self, request_id: RequestId) -> bool:
        """Whether the request's token is a draw from its logits as they are, and that is all."""
        state = self._states.get(request_id)
        if state is None or state.is_greedy or not state.is_plain:
            return False
        return state.sampling.num_logprobs is None


def draw_rows(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], points: Sequence[float]
) -> torch.Tensor:
    """``distribution.draw`` for each row of ``logits`` [n, vocab]: int64 [n]."""
    is_filtered = [one.top_k is not None or one.top_p < 1.0 for one in sampling]
    tokens = torch.zeros(len(sampling), dtype=torch.int64, device=logits.device)
    for wants_filter in (False, True):
        rows = [row for row, one in enumerate(is_filtered) if one == wants_filter]
        if not rows:
            continue
        index = torch.tensor(rows, device=logits.device)
        some = [sampling[row] for row in rows]
        weights = _weights(logits[index], some)
        ids = None
        if wants_filter:
            # Stable, so that among equals the lower id comes first.
            weights, ids = weights.sort(dim=1, descending=True, stable=True)
            weights = _filtered(weights, some)
        chosen = _at_points(weights, [points[row] for row in rows])
        tokens[index] = chosen if ids is None else ids.gather(1, chosen[:, None])[:, 0]
    return tokens


def _weights(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Unnormalised probabilities [n, vocab]; the largest of a row is 1."""
    temperature = _column([one.temperature for one in sampling], logits)
    weights = ((logits - logits.amax(dim=1, keepdim=True)) / temperature).exp()
    least = _column([one.min_p for one in sampling], logits)
    return weights.masked_fill_(weights < least, 0.0)


def _filtered(weights: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Rows in falling order, without what ``top_k`` and then ``top_p`` leave out."""
    width = weights.shape[1]
    ranks = torch.arange(width, device=weights.device)
    most = [width if one.top_k is None else one.top_k for one in sampling]
    counts = torch.tensor(most, device=weights.device)[:, None]
    weights = torch.where(ranks < counts, weights, 0.0)
    reached = weights.cumsum(dim=1, dtype=torch.float64)
    top_p = torch.tensor([one.top_p for one in sampling], dtype=torch.float64)
    share = top_p.to(weights.device)[:, None] * reached[:, -1:]
    before = torch.cat((torch.zeros_like(reached[:, :1]), reached[:, :-1]), dim=1)
    is_kept = (before < share) | (top_p.to(weights.device)[:, None] >= 1.0) | (ranks == 0)
    return torch.where(is_kept, weights, 0.0)


def _at_points(weights: torch.Tensor, points: Sequence[float]) -> torch.Tensor:
    """Where each row's running sum passes its point of the whole, [n]."""
    reached = weights.cumsum(dim=1, dtype=torch.float64)
    target = _column(points, reached) * reached[:, -1:]
    index = torch.searchsorted(reached, target, right=True)[:, 0]
    ranks = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, ranks, 0).amax(dim=1)
    return torch.minimum(index, last)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[n, 1] on the same device, of the same type."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
