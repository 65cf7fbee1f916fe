"""Chooses each request's next token from its logits.

Order as in vLLM: log-probabilities are of the raw logits; then ``min_tokens``, ``logit_bias`` and
the penalties; then greedy, or temperature, ``min_p``, ``top_k``, ``top_p`` and a draw. Everything
depends on the request's own row alone, so batching and pipelining change nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams, TokenLogprobs
from kunserve.core.step import SampledToken, SequenceStart
from kunserve.engine.history import TokenHistory
from kunserve.engine.kernels.ops import argmax

Row = npt.NDArray[np.float32]

_GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


@dataclass(slots=True)
class _State:
    """What is kept of a request between its tokens."""

    sampling: SamplingParams
    is_greedy: bool
    is_plain: bool
    """Whether its logits are used as they are."""
    early_ids: npt.NDArray[np.int64]
    """Tokens forbidden before ``min_tokens``."""
    bias_ids: npt.NDArray[np.int64]
    bias: Row
    history: TokenHistory | None


class Sampler:
    """Lives where the output head is. One entry per running request."""

    def __init__(self, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._eos_ids = tuple(eos_ids)
        self._vocab_size = vocab_size
        self._states: dict[RequestId, _State] = {}

    def start(self, start: SequenceStart) -> None:
        """Know a request, replacing what was known of it."""
        sampling = start.sampling
        stops = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_ids)
        bias = [pair for pair in sampling.logit_bias if 0 <= pair[0] < self._vocab_size]
        history = None
        if sampling.needs_history:
            history = TokenHistory(start.token_ids, start.num_prompt_tokens)
        self._states[start.request_id] = _State(
            sampling=sampling,
            is_greedy=sampling.temperature < _GREEDY_BELOW,
            is_plain=history is None and not bias and sampling.min_tokens == 0,
            early_ids=_ids(token for token in stops if 0 <= token < self._vocab_size),
            bias_ids=_ids(token for token, _ in bias),
            bias=np.array([value for _, value in bias], dtype=np.float32),
            history=history,
        )

    def forget(self, request_id: RequestId) -> None:
        """The request ended; unknown ones are no mistake."""
        self._states.pop(request_id, None)

    def sample(
        self, logits: torch.Tensor, request_ids: Sequence[RequestId], positions: Sequence[int]
    ) -> tuple[SampledToken, ...]:
        """One token for each row of ``logits`` [n, vocab] float32, which is overwritten.

        ``positions`` are the tokens' indices among their request's output.
        """
        states = [self._states[request_id] for request_id in request_ids]
        reported = [i for i, state in enumerate(states) if state.sampling.num_logprobs is not None]
        raw = logits[reported] if reported else None
        if all(state.is_greedy and state.is_plain for state in states):
            tokens = argmax(logits)
        else:
            tokens = self._choose(logits, states, positions)
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        if raw is not None:
            counts = [states[i].sampling.num_logprobs or 0 for i in reported]
            for i, found in zip(reported, _logprobs(raw, tokens[reported], counts), strict=True):
                logprobs[i] = found
        chosen = tokens.tolist()
        for state, token in zip(states, chosen, strict=True):
            if state.history is not None:
                state.history.append(token)
        return tuple(map(SampledToken, request_ids, chosen, logprobs))

    def _choose(
        self, logits: torch.Tensor, states: Sequence[_State], positions: Sequence[int]
    ) -> npt.NDArray[np.int32]:
        rows = logits.numpy()
        for row, state, position in zip(rows, states, positions, strict=True):
            if not state.is_plain:
                _adjust(row, state, position)
        tokens = argmax(logits)
        drawn = [i for i, state in enumerate(states) if not state.is_greedy]
        if not drawn:
            return tokens
        params = [states[i].sampling for i in drawn]
        temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        weights = torch.softmax(logits[drawn] / temperatures[:, None], dim=-1).numpy()
        points = uniforms([p.seed for p in params], [positions[i] for i in drawn])
        for i, row, sampling, point in zip(drawn, weights, params, points.tolist(), strict=True):
            tokens[i] = draw(row, sampling, point)
        return tokens


def _ids(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _adjust(row: Row, state: _State, position: int) -> None:
    """Apply everything that changes the logits [vocab] themselves, in place."""
    sampling = state.sampling
    if position < sampling.min_tokens:
        row[state.early_ids] = -np.inf
    np.add.at(row, state.bias_ids, state.bias)
    history = state.history
    if history is None:
        return
    assert history.num_output == position, (history.num_output, position)
    ids, counts = history.ids, history.output_counts
    seen = row[ids]
    if sampling.repetition_penalty != 1.0:
        penalty = np.float32(sampling.repetition_penalty)
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
    seen -= np.float32(sampling.frequency_penalty) * counts
    seen -= np.float32(sampling.presence_penalty) * (counts > 0)
    row[ids] = seen


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position): two rounds of splitmix64's finaliser."""
    mask = (1 << 64) - 1
    state = _mix(np.array([seed & mask for seed in seeds], dtype=np.uint64))
    state = _mix(state + np.array(positions, dtype=np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draw(probabilities: Row, sampling: SamplingParams, point: float) -> int:
    """The token at ``point`` of the cumulative distribution that the filters leave.

    ``probabilities`` [vocab] follow the temperature already. Filtered tokens are laid out most
    likely first; unfiltered ones by id, which needs no sorting.
    """
    if sampling.min_p > 0:
        floor = np.float32(sampling.min_p) * probabilities.max()
        probabilities[probabilities < floor] = 0
    if sampling.top_k is None and sampling.top_p >= 1.0:
        return _at_point(probabilities, point)
    ids = _candidates(probabilities, sampling)
    return int(ids[_at_point(probabilities[ids], point)])


def _at_point(weights: Row, point: float) -> int:
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
    if index < len(weights):
        return index
    return int(np.flatnonzero(weights)[-1])


def _candidates(probabilities: Row, sampling: SamplingParams) -> npt.NDArray[np.int64]:
    """Ids that top_k and then top_p leave, most likely first (lower id first among equals)."""
    num = sampling.top_k if sampling.top_k is not None else len(probabilities)
    share = sampling.top_p * float(probabilities.sum(dtype=np.float64))
    ids = np.empty(0, dtype=np.int64)
    # Sorting the whole vocabulary takes milliseconds, and nearly always a few tokens decide.
    for fraction in (2.0**-7, 2.0**-14, 0.0):
        floor = np.float32(probabilities.max() * fraction)
        ids = np.flatnonzero(probabilities > floor)
        enough = sampling.top_k is None and probabilities[ids].sum(dtype=np.float64) >= share
        if enough or len(ids) >= num:
            break
    ids = ids[np.argsort(-probabilities[ids], kind="stable")][:num]
    if sampling.top_p < 1.0:
        cumulative = np.cumsum(probabilities[ids], dtype=np.float64)
        if sampling.top_k is not None:
            share = sampling.top_p * float(cumulative[-1])
        ids = ids[: int(np.searchsorted(cumulative, share, side="left")) + 1]
    return ids


def _logprobs(
    raw: torch.Tensor, tokens: npt.NDArray[np.int32], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Of raw logits [n, vocab]: the chosen tokens' and each row's ``counts`` most likely ones."""
    chosen = torch.from_numpy(tokens.astype(np.int64))[:, None]
    norms = torch.logsumexp(raw, dim=-1, keepdim=True)
    values = raw.gather(1, chosen)
    ranks = (raw > values).sum(dim=-1) + 1
    most = min(max(counts), raw.shape[1])
    top_values, top_ids = torch.topk(raw, most, dim=-1)
    return [
        TokenLogprobs(value, rank, tuple(zip(ids[:count], tops[:count], strict=True)))
        for value, rank, ids, tops, count in zip(
            (values - norms).squeeze(1).tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            (top_values - norms).tolist(),
            counts,
            strict=True,
        )
    ]
