"""The integer arithmetic of the fake body, and the oracle that knows its every answer."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kunserve.core.request import Request, SamplingParams, TokenLogprobs

Uint64Array = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
FACTOR_1 = 0x9FB21C651E98DF25
_FACTOR_2 = 0xD6E8FEB86659FD93
_ROUNDS = ((np.uint64(32), np.uint64(FACTOR_1)), (np.uint64(29), np.uint64(_FACTOR_2)))
_LAST_SHIFT = np.uint64(32)
EMBED, _HEAD, _DRAW, _HISTORY = 1 << 40, 1 << 41, 1 << 42, 1 << 43


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What the tokens are made of, beside the prompt."""

    num_layers: int
    vocab_size: int = 1000
    eos_token_ids: frozenset[int] = frozenset()
    window: int | None = None
    """Tokens that layers with a window see: all but the last of every ``period``."""
    period: int = 1

    def window_of(self, layer: int) -> int | None:
        """Tokens that the layer sees; None is all."""
        return None if (layer + 1) % self.period == 0 else self.window


def mix_one(value: int, salt: int) -> int:
    """``mix`` of one integer, for the oracle."""
    value = (value + salt * _FACTOR_2 + 1) & _MASK
    value = ((value ^ (value >> 32)) * FACTOR_1) & _MASK
    value = ((value ^ (value >> 29)) * _FACTOR_2) & _MASK
    return value ^ (value >> 32)


def mix(values: Uint64Array, salt: int) -> Uint64Array:
    """A bijection of 64-bit integers that depends on ``salt`` and scatters every bit."""
    mixed = values + np.uint64((salt * _FACTOR_2 + 1) & _MASK)
    for shift, factor in _ROUNDS:
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> _LAST_SHIFT
    return mixed


def draw(hidden: int, sampling: SamplingParams, position: int, history: list[int]) -> int:
    """What the output head gives for output token ``position`` (before ``% vocab_size``)."""
    value = mix_one(hidden, _HEAD)
    if sampling.temperature > 0:
        value = mix_one(value ^ mix_one(sampling.seed, position), _DRAW)
    if sampling.needs_history:
        for token_id in history:
            value = mix_one(value ^ token_id, _HISTORY)
    return value


def hidden_to_bytes(hidden: Uint64Array, to: str = "") -> memoryview:
    """The activations' bytes for the wire."""
    return hidden.data.cast("B")


def hidden_from_bytes(data: bytes | bytearray | memoryview) -> Uint64Array:
    """Activations from the wire."""
    return np.frombuffer(data, dtype=np.uint64)


def true_weights(layer: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """What a layer's weights are."""
    indices = np.arange(num_bytes, dtype=np.uint64)
    return (mix(indices, layer) & np.uint64(0xFF)).astype(np.uint8)


def score_row(hidden: int, token_id: int) -> TokenLogprobs:
    """What the output head says of a prompt's token: numbers that float32 holds exactly."""
    value = mix_one(hidden ^ token_id, _HEAD)
    return TokenLogprobs(-float(value % 4096), value % 7 + 1, ((value % 1000, -1.0),))


def expected_scores(request: Request, model: FakeModel) -> tuple[TokenLogprobs, ...]:
    """The oracle: every score of the request's prompt."""
    tokens = request.prompt_token_ids
    hidden = last_hidden(model)
    return tuple(
        score_row(hidden(token_id, position), tokens[position + 1])
        for position, token_id in enumerate(tokens[: request.num_to_score])
    )


def last_hidden(model: FakeModel) -> Callable[[int, int], int]:
    """What the layers make of each token, to be called with one after the other."""
    sums = [0] * model.num_layers
    windows = [model.window_of(layer) for layer in range(model.num_layers)]
    seen: list[deque[int]] = [deque() for _ in windows]

    def forward(token_id: int, position: int) -> int:
        hidden = mix_one(token_id * FACTOR_1 + position, EMBED)
        for layer, window in enumerate(windows):
            content = mix_one(hidden, 2 * layer)
            if window is not None:
                seen[layer].append(content)
                content -= seen[layer].popleft() if len(seen[layer]) > window else 0
            sums[layer] = (sums[layer] + content) & _MASK
            hidden = mix_one(hidden + 3 * sums[layer], 2 * layer + 1)
        return hidden

    return forward


def expected_tokens(request: Request, model: FakeModel, max_model_len: int) -> tuple[int, ...]:
    """The oracle: every output token of the request when nothing ever disturbs it.

    Written without arrays, blocks or stages, so that it shares no mistake with the body.
    """
    sampling = request.sampling
    ignores_eos = sampling.ignore_eos and not sampling.ends_with_form
    stops = set(sampling.stop_token_ids) | (set() if ignores_eos else model.eos_token_ids)
    least = 0 if sampling.ends_with_form else sampling.min_tokens
    limit = min(len(request.prompt_token_ids) + sampling.max_tokens, max_model_len)
    tokens = list(request.prompt_token_ids)
    num_prompt = len(tokens)
    forward = last_hidden(model)
    hidden = position = 0
    while True:
        while position < len(tokens):
            hidden = forward(tokens[position], position)
            position += 1
        value = draw(hidden, sampling, len(tokens) - num_prompt, tokens)
        tokens.append(value % model.vocab_size)
        is_stop = tokens[-1] in stops and len(tokens) - num_prompt >= least
        if is_stop or len(tokens) >= limit:
            return tuple(tokens[num_prompt:])
