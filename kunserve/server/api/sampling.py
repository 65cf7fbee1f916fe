"""From a request body to the engine's ``SamplingParams``, one set per completion."""

import hashlib
import random
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from kunserve.cluster.api import ServingLimits
from kunserve.core.errors import InvalidRequest
from kunserve.core.request import SamplingParams, StructuredOutput
from kunserve.core.tokens import TokenIds
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.api.schema import GenerationBody
from kunserve.server.api.text import too_long
from kunserve.server.api.vocabulary import check_token_ids

Number = TypeVar("Number", int, float)
BadWords: TypeAlias = tuple[tuple[int, ...], ...]
"""As tokens."""

SEED_MASK = (1 << 63) - 1
GREEDY_BELOW = 1e-5
"""A smaller temperature would overflow the division it stands for: it means greedy."""
PLAIN_PER_ENTRY = 16
"""So many token ids with nothing beside them are told and read in the time of one with a bias."""


class SeedSource:
    """Seeds for requests that bring none; the same sequence after every start."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> int:
        """A fresh 63-bit seed."""
        return self._random.getrandbits(63)


def derive_seed(seed: int, choice: int) -> int:
    """The seed of the ``choice``-th of ``n`` completions; the first keeps the request's own."""
    if choice == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b(f"{seed & SEED_MASK}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def resolve_sampling(
    body: GenerationBody,
    defaults: SamplingDefaults,
    limits: ServingLimits,
    num_prompt_tokens: Sequence[int],
    seeds: SeedSource,
    bad_words: BadWords = (),
    structured: StructuredOutput | None = None,
) -> list[SamplingParams]:
    """The parameters of every completion: ``n`` for each prompt, of these lengths.

    ``bad_words`` are the client's, as tokens. ``structured`` has been tried. Raises PromptTooLong
    when a prompt and its answer together cannot fit, and InvalidRequest.
    """
    vocab_size, most = limits.vocab_size, limits.max_model_len
    max_tokens = [_max_tokens(body, defaults, most, num) for num in num_prompt_tokens]
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    top_p = _first(body.top_p, defaults.top_p, 1.0)
    top_k = _top_k(_first(body.top_k, defaults.top_k, 0), vocab_size)
    min_p = _first(body.min_p, defaults.min_p, 0.0)
    repetition_penalty = _first(body.repetition_penalty, defaults.repetition_penalty, 1.0)
    min_tokens = body.min_tokens or 0
    if min_tokens > min(max_tokens):
        raise InvalidRequest(
            f"`min_tokens` ({min_tokens}) is more than the completion may have "
            f"({min(max_tokens)}).",
            "min_tokens",
        )
    # Checked once, because one call may ask for many completions.
    stop_token_ids = tuple(check_token_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids"))
    allowed = _allowed(body.allowed_token_ids or [], vocab_size)
    logit_bias = _logit_bias(body.logit_bias or {}, vocab_size)

    def resolved(length: int, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=length,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(body.ignore_eos),
            min_tokens=min_tokens,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias,
            allowed_token_ids=allowed,
            bad_words=bad_words,
            structured=structured,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.num_prompt_logprobs,
        )

    completions: list[SamplingParams] = []
    for length in max_tokens:
        seed = seeds.draw() if body.seed is None else body.seed
        completions += [resolved(length, derive_seed(seed, i)) for i in range(body.n or 1)]
    return completions


def check_entries(
    body: GenerationBody, bad_words: BadWords, num_completions: int, most: int
) -> None:
    """Raise InvalidRequest where lists that go along with each completion are too much together.

    Whoever computes reads them for every one, and everybody else in the group waits for that.
    """
    entries = (
        ("logit_bias", len(body.logit_bias or ()), most),
        ("bad_words", sum(map(len, bad_words)), most),
        ("allowed_token_ids", len(body.allowed_token_ids or ()), most * PLAIN_PER_ENTRY),
    )
    for param, num, limit in entries:
        if num * num_completions > limit:
            raise InvalidRequest(
                f"`{param}` has {num} tokens for each of {num_completions} completions; together "
                f"they may have {limit}.",
                param,
            )


def _max_tokens(
    body: GenerationBody, defaults: SamplingDefaults, max_model_len: int, num_prompt_tokens: int
) -> int:
    """How long the completion of a prompt may be; all that remains where nobody says it."""
    default, asked = body.default_tokens, body.asked_tokens
    if defaults.max_new_tokens is not None:
        default = min(defaults.max_new_tokens, default or 1 << 62)
    if asked is not None:
        # The engine makes one token at least, which is not shown where none is asked for.
        asked = max(1, asked)
    remains = max_model_len - num_prompt_tokens
    if remains < (asked or 1):
        raise too_long(max_model_len, str(num_prompt_tokens), asked if remains > 0 else None)
    if asked is None:
        return remains if default is None else min(default, remains)
    return asked


def _first(asked: Number | None, recommended: Number | None, neutral: Number) -> Number:
    """What the request says, else what the model's makers say, else what changes nothing."""
    if asked is not None:
        return asked
    return neutral if recommended is None else recommended


def _top_k(top_k: int, vocab_size: int) -> int | None:
    return top_k if 0 < top_k < vocab_size else None


def _allowed(token_ids: list[int], vocab_size: int) -> TokenIds:
    return TokenIds(dict.fromkeys(check_token_ids(token_ids, vocab_size, "allowed_token_ids")))


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 12:
            raise InvalidRequest(f"`logit_bias`: {key[:40]!r} is not a token id.", "logit_bias")
        if not -100.0 <= value <= 100.0:
            raise InvalidRequest(
                f"`logit_bias`: {value} for token {key} is not between -100 and 100.", "logit_bias"
            )
        pairs.append((int(key), float(value)))
    check_token_ids([token_id for token_id, _ in pairs], vocab_size, "logit_bias")
    return tuple(pairs)
