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
from kunserve.engine.distribution import Row, draw, token_logprobs
from kunserve.engine.history import TokenHistory

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
        raw = logits[reported].numpy() if reported else ()
        if all(state.is_greedy and state.is_plain for state in states):
            tokens = logits.numpy().argmax(axis=1)
        else:
            tokens = self._choose(logits, states, positions)
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        for i, row in zip(reported, raw, strict=True):
            count = states[i].sampling.num_logprobs or 0
            logprobs[i] = token_logprobs(row, int(tokens[i]), count)
        chosen = tokens.tolist()
        for state, token in zip(states, chosen, strict=True):
            if state.history is not None:
                state.history.append(token)
        return tuple(map(SampledToken, request_ids, chosen, logprobs))

    def _choose(
        self, logits: torch.Tensor, states: Sequence[_State], positions: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        rows = logits.numpy()
        for row, state, position in zip(rows, states, positions, strict=True):
            if not state.is_plain:
                _adjust(row, state, position)
        tokens: npt.NDArray[np.int64] = rows.argmax(axis=1)
        drawn = [i for i, state in enumerate(states) if not state.is_greedy]
        points = uniforms([states[i].sampling.seed for i in drawn], [positions[i] for i in drawn])
        for i, point in zip(drawn, points.tolist(), strict=True):
            tokens[i] = draw(rows[i], states[i].sampling, point)
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
