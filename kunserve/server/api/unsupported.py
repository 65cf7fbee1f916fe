"""What other servers offer and we do not: refused by name rather than silently ignored."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kunserve.core.errors import InvalidRequest

logger = logging.getLogger("kunserve.server")

Neutral: TypeAlias = Callable[[Any], bool]
"""Whether a field's value asks for nothing."""


def _absent(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""


def _none(value: Any) -> bool:
    return value is None


def _is(*neutral: Any) -> Neutral:
    return lambda value: _absent(value) or value in neutral


REFUSED: dict[str, Neutral] = {
    "audio": _absent,
    "modalities": lambda value: _absent(value) or value == ["text"],
    "functions": _absent,
    "function_call": _is("none", "auto"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _none),
    "guided_whitespace_pattern": _absent,
    "use_beam_search": _absent,
    "length_penalty": _is(1, 1.0),
    "suffix": _absent,
    "prompt_embeds": _absent,
    "logits_processors": _absent,
    "chat_template": _absent,
    "documents": _absent,
    "web_search_options": _absent,
    "kv_transfer_params": _absent,
    "mm_processor_kwargs": _absent,
    "media_io_kwargs": _absent,
    "ec_transfer_params": _absent,
    "logprob_token_ids": _absent,
    "repetition_detection": _absent,
    "return_prompt_text": _absent,
    "thinking_token_budget": _is(-1),
    "watermarking": _absent,
}
"""Fields that would change the answer. Any other unknown field is accepted, as vLLM does."""
_GENERATES = "models that generate text are served, and none that embed, classify or rank."
_HEARS = "models of text are served, and none of sound or images."
OTHER_ENDPOINTS = {
    **dict.fromkeys(
        [
            "/v1/embeddings",
            "/v1/score",
            "/score",
            "/v1/rerank",
            "/v2/rerank",
            "/rerank",
            "/pooling",
            "/classify",
            "/invocations",
        ],
        _GENERATES,
    ),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"), _HEARS),
    "/sleep": "an instance gives its memory back when it ends.",
    "/wake_up": "an instance gives its memory back when it ends.",
    "/v1/load_lora_adapter": "the model is served as it is.",
    "/v1/unload_lora_adapter": "the model is served as it is.",
}
"""Endpoints of vLLM's server that are not there, and why."""
HARMLESS = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
    }
    | {"service_tier", "store", "verbosity"}
    | {"return_mm_kwargs", "return_token_offsets", "routed_experts_prompt_start"}
    | {"session_id", "stream_interval", "vllm_xargs"}
)
"""Fields of OpenAI's and vLLM's that change no answer of ours."""


MAX_NOTED = 100
"""Names that are remembered, because clients choose them."""


class ForeignFields:
    """Looks through the fields that our bodies do not have."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def check(self, extra: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for the first field that asks for something we do not do.

        A name that nobody knows is logged once: it may be a slip of the pen.
        """
        for name, value in extra.items():
            asks_nothing = REFUSED.get(name)
            if asks_nothing is None:
                self._note(name)
            elif not asks_nothing(value):
                raise InvalidRequest(f"`{name}` is not supported by this server.", name)

    def _note(self, name: str) -> None:
        if name in HARMLESS or name in self._noted or len(self._noted) >= MAX_NOTED:
            return
        self._noted.add(name)
        logger.info("a request's field is unknown and ignored field=%s", ascii(name[:60]))
