"""Log-probabilities in the two shapes of the OpenAI API."""

import math
from collections.abc import Sequence
from typing import Any

from kunserve.server.choice import TokenEntry
from kunserve.server.detokenize import TokenBytes

LEAST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot carry."""


def finite(logprob: float) -> float:
    """The value as JSON can carry it."""
    return logprob if math.isfinite(logprob) and logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _shown(raw: bytes) -> str:
    """A token as text; one that is no whole character is spelled in bytes, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    entries: Sequence[TokenEntry], token_bytes: TokenBytes, num_top: int, base_offset: int
) -> dict[str, Any]:
    """Parallel lists: tokens, token_logprobs, top_logprobs, text_offset."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        top: dict[str, float] = {}
        for token_id, logprob in entry.logprobs.top[:num_top]:
            # Two tokens may read the same (incomplete characters): the likelier one is kept.
            top.setdefault(_shown(token_bytes.of(token_id)), finite(logprob))
        if num_top:  # the sampled token is always reported
            name = _shown(token_bytes.of(entry.token_id))
            top.setdefault(name, finite(entry.logprobs.logprob))
        tops.append(top or None)
    return {
        "tokens": [_shown(token_bytes.of(entry.token_id)) for entry in entries],
        "token_logprobs": [finite(entry.logprobs.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": [base_offset + entry.text_offset for entry in entries],
    }


def _chat_token(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes.of(token_id)
    return {
        "token": raw.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(raw),
    }


def chat_logprobs(
    entries: Sequence[TokenEntry], token_bytes: TokenBytes, num_top: int
) -> dict[str, Any]:
    """``content``: one object per token, each with its alternatives."""
    content = []
    for entry in entries:
        one = _chat_token(entry.token_id, entry.logprobs.logprob, token_bytes)
        one["top_logprobs"] = [
            _chat_token(token_id, logprob, token_bytes)
            for token_id, logprob in entry.logprobs.top[:num_top]
        ]
        content.append(one)
    return {"content": content, "refusal": None}
