"""Answers of POST /v1/responses: one object, or the events that tell how it comes to be."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from kunserve.core.request import FinishReason
from kunserve.server.api.answers.logprobs import chat_logprobs
from kunserve.server.api.answers.streaming import WholeAnswer
from kunserve.server.api.answers.wire import Envelope
from kunserve.server.api.generation import EngineFailed, Interrupted
from kunserve.server.http.errors import error_object
from kunserve_extras.chats.answers import named_event, piece_of, send_events
from kunserve_extras.responses.output import Output, Told
from kunserve_extras.responses.schema import ResponsesBody

_ABORTED = {"code": "server_error", "message": "The request was aborted."}


@dataclass(slots=True)
class Telling:
    """One response so far, in the API's words."""

    envelope: Envelope
    body: ResponsesBody
    output: Output

    def response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole object; ``usage`` is that of a chat, once it has ended."""
        body, has_ended = self.body, usage is not None
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.envelope.response_id,
            "object": "response",
            "created_at": self.envelope.created,
            "status": status,
            "error": _ABORTED if has_ended and status == "failed" else None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.envelope.model,
            "output": self.output.items if has_ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
        }


def _usage(chat: dict[str, Any]) -> dict[str, Any]:
    """``usage`` of a chat by this API's names."""
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }


def _status(reason: FinishReason | None) -> str:
    if reason is FinishReason.ABORT:
        return "failed"
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


@dataclass(eq=False)
class ResponsesAnswer(WholeAnswer):
    """A response at its end."""

    _telling: Telling

    def tell(self) -> Iterator[Told]:
        """What is new."""
        delta, num_top = self._generation.choices[0].drain(), self._telling.body.num_logprobs
        logprobs: list[dict[str, Any]] = []
        if num_top is not None:
            token_bytes = self._front.codec.token_bytes
            logprobs = chat_logprobs(delta.entries, token_bytes, num_top)["content"]
        return self._telling.output.tell(piece_of(delta), logprobs)

    def write(self) -> bytes:
        """See ``WholeAnswer``."""
        status = _status(self._generation.choices[0].finish_reason)
        for _ in (*self.tell(), *self._telling.output.end(status)):
            pass  # the items are what is wanted
        return msgspec.json.encode(self._telling.response(status, self.usage()))


class StreamedResponsesAnswer(ResponsesAnswer):
    """A response by events, each with its number."""

    _num_told = 0

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``GenerationAnswer``."""
        await send_events(send, self._events())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        telling = self._telling
        begun = {"response": telling.response("in_progress")}
        opening = [("response.created", begun), ("response.in_progress", begun)]
        yield b"".join(self._event(*told) for told in opening)
        try:
            while await self._generation.advance():
                if news := b"".join(self._event(*told) for told in self.tell()):
                    yield news
        except (EngineFailed, Interrupted) as error:
            failed = telling.response("failed", self.usage())
            failed["error"] = _ABORTED | {"message": error_object(error)["error"]["message"]}
            yield self._event("response.failed", {"response": failed})
            return
        status = _status(self._generation.choices[0].finish_reason)
        last = b"".join(self._event(*told) for told in self._telling.output.end(status))
        whole = {"response": telling.response(status, self.usage())}
        yield last + self._event(f"response.{status}", whole)

    def _event(self, kind: str, told: dict[str, Any]) -> bytes:
        number = self._num_told
        self._num_told += 1
        return named_event(kind, sequence_number=number, **told)
