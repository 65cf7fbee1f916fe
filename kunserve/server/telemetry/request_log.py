"""``--enable-log-requests``: a line when a request arrives, and one when it has ended.

What users write is not in them, unless ``--max-log-len`` asks for the beginning of prompts.
"""

import dataclasses
import logging
from typing import Any

from starlette.requests import Request as HttpRequest

from kunserve.core.request import SamplingParams
from kunserve.server.api.text import TextCodec
from kunserve.server.http.errors import error_object
from kunserve.server.telemetry.request_life import RequestLife

logger = logging.getLogger("kunserve.server.requests")

_NEUTRAL = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


class RequestLog:
    """A observer of requests."""

    def __init__(self, codec: TextCodec, max_chars: int | None) -> None:
        """``max_chars`` of each prompt are shown; None shows nothing of it."""
        self._codec = codec
        self._max_chars = max_chars

    def began(self, life: RequestLife) -> None:
        """See ``RequestObserver``."""
        request = life.request
        prompt = request.prompt_token_ids
        params = shown_params(request.sampling)
        if self._max_chars is None:
            text = "request arrived request=%s prompt_tokens=%d params=%s"
            logger.info(text, request.request_id, len(prompt), params)
            return
        shown = self._codec.decode(list(prompt[: self._max_chars]))[: self._max_chars]
        text = "request arrived request=%s prompt_tokens=%d params=%s prompt=%r"
        logger.info(text, request.request_id, len(prompt), params, shown)

    def ended(self, life: RequestLife) -> None:
        """See ``RequestObserver``."""
        assert life.reason is not None and life.ended_s is not None
        logger.info(
            "request ended request=%s finish_reason=%s prompt_tokens=%d output_tokens=%d "
            "queue_ms=%s ttft_ms=%s tpot_ms=%s total_ms=%s",
            life.request.request_id,
            life.reason.value,
            len(life.request.prompt_token_ids),
            life.num_tokens,
            _ms(life.queued_s),
            _ms(life.ttft_s),
            _ms(life.tpot_s),
            _ms(life.ended_s - life.request.arrival_s),
        )

    def refused(self, http: HttpRequest, request_id: str, error: Exception) -> None:
        """A request was answered with an error. The message is left out: it may quote the body."""
        said = error_object(error)["error"]
        logger.info(
            "request refused request=%s path=%s status=%d type=%s param=%s",
            request_id,
            http.scope["raw_path"].decode("ascii", "replace"),
            said["code"],
            said["type"],
            said["param"],
        )


def shown_params(sampling: SamplingParams) -> dict[str, Any]:
    """What differs from the neutral value. Of long lists only the length."""
    shown = {}
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        if value != neutral:
            shown[name] = len(value) if isinstance(value, tuple) else value
    return shown


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
