"""Log-probabilities in the two shapes of the OpenAI API."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kunserve.server.api.answers.choice import TokenEntry
from kunserve.server.api.answers.detokenize import TokenBytes

LEAST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot carry."""


def finite(logprob: float) -> float:
    """The value as JSON can carry it."""
    return logprob if math.isfinite(logprob) and logprob > LEAST_LOGPROB else LEAST_LOGPROB


TokenName: TypeAlias = Callable[[int], str]
"""How a token is written in an answer."""


def shown(raw: bytes) -> str:
    """A token as text; one that is no whole character is spelled in bytes, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_name(token_id: int) -> str:
    """As ``return_tokens_as_token_ids`` wants it: unlike text, it tells all tokens apart."""
    return f"token_id:{token_id}"


def completion_logprobs(
    entries: Sequence[TokenEntry], name_of: TokenName, num_top: int, base_offset: int
) -> dict[str, Any]:
    """Parallel lists: tokens, token_logprobs, top_logprobs, text_offset."""
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprobs is None:
            logprobs.append(None)
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in entry.logprobs.top[:num_top]:
            # Two tokens may read the same (incomplete characters): the likelier one is kept.
            top.setdefault(name_of(token_id), finite(logprob))
        if num_top:  # the token itself is always reported
            top.setdefault(name_of(entry.token_id), finite(entry.logprobs.logprob))
        logprobs.append(finite(entry.logprobs.logprob))
        tops.append(top or None)
    return {
        "tokens": [name_of(entry.token_id) for entry in entries],
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": [base_offset + entry.text_offset for entry in entries],
    }


def _chat_token(
    token_id: int, logprob: float, token_bytes: TokenBytes, as_ids: bool
) -> dict[str, Any]:
    raw = token_bytes.of(token_id)
    return {
        "token": token_name(token_id) if as_ids else raw.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(raw),
    }


def chat_logprobs(
    entries: Sequence[TokenEntry], token_bytes: TokenBytes, num_top: int, as_ids: bool = False
) -> dict[str, Any]:
    """``content``: one object per token, each with its alternatives."""
    content = []
    for entry in entries:
        assert entry.logprobs is not None, entry
        one = _chat_token(entry.token_id, entry.logprobs.logprob, token_bytes, as_ids)
        one["top_logprobs"] = [
            _chat_token(token_id, logprob, token_bytes, as_ids)
            for token_id, logprob in entry.logprobs.top[:num_top]
        ]
        content.append(one)
    return {"content": content, "refusal": None}
