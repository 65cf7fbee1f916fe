"""Answers of POST /v1/responses: one object, or the events that tell how it comes to be."""

import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kunserve.core.request import FinishReason
from kunserve.server.api.answers.choice import Delta
from kunserve.server.api.answers.logprobs import chat_logprobs
from kunserve.server.api.answers.streaming import GenerationAnswer, stream_start
from kunserve.server.api.answers.wire import Envelope
from kunserve.server.api.front import Front
from kunserve.server.api.generation import EngineFailed, Generation, Interrupted
from kunserve.server.http.errors import error_answer, error_object
from kunserve_extras.responses.schema import ResponsesBody

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Telling:
    """One response so far, in the API's words."""

    front: Front
    envelope: Envelope
    body: ResponsesBody
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def item_id(self) -> str:
        """Of the only message."""
        return self.envelope.response_id.replace("resp_", "msg_", 1)

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Take what is new; the log-probabilities of it."""
        self.text += delta.text
        num_top = self.body.num_logprobs
        if num_top is None:
            return []
        token_bytes = self.front.codec.token_bytes
        told: list[dict[str, Any]] = chat_logprobs(delta.entries, token_bytes, num_top)["content"]
        self.logprobs.extend(told)
        return told

    def part(self) -> dict[str, Any]:
        """The text."""
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.logprobs,
        }

    def item(self, status: str) -> dict[str, Any]:
        """The message; without a text while it begins."""
        content = [] if status == "in_progress" else [self.part()]
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole object; ``usage`` is that of a chat, once it has ended."""
        body, has_ended = self.body, usage is not None
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.envelope.response_id,
            "object": "response",
            "created_at": self.envelope.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.envelope.model,
            "output": [self.item(status)] if has_ended else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
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
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


class ResponsesAnswer(GenerationAnswer):
    """A response at its end."""

    def __init__(
        self, front: Front, generation: Generation, envelope: Envelope, body: ResponsesBody
    ) -> None:
        super().__init__(front, generation, envelope)
        self._telling = Telling(front, envelope, body)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``GenerationAnswer``."""
        try:
            while await self._generation.advance():
                pass
        except (EngineFailed, Interrupted) as error:
            await error_answer(error)(scope, receive, send)
            return
        (choice,) = self._generation.choices
        self._telling.add(choice.take())
        whole = self._telling.response(_status(choice.finish_reason), self.usage())
        await Response(_encode(whole), media_type="application/json")(scope, receive, send)


class StreamedResponsesAnswer(ResponsesAnswer):
    """A response by events, each with its number."""

    _num_told = 0

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``GenerationAnswer``."""
        await send(stream_start())
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        telling, generation = self._telling, self._generation
        (choice,) = generation.choices
        yield b"".join(self._opening())
        try:
            while await generation.advance():
                delta = choice.take()
                logprobs = telling.add(delta)
                if delta.text or logprobs:
                    told = {"delta": delta.text, "logprobs": logprobs}
                    yield self._event("response.output_text.delta", self._of_part(told))
        except (EngineFailed, Interrupted) as error:
            failed = telling.response("failed", self.usage())
            failed["error"] = {
                "code": "server_error",
                "message": error_object(error)["error"]["message"],
            }
            yield self._event("response.failed", {"response": failed})
            return
        yield b"".join(self._closing(_status(choice.finish_reason)))

    def _opening(self) -> Iterator[bytes]:
        begun = self._telling.response("in_progress")
        yield self._event("response.created", {"response": begun})
        yield self._event("response.in_progress", {"response": begun})
        item = {"output_index": 0, "item": self._telling.item("in_progress")}
        yield self._event("response.output_item.added", item)
        part = self._of_part({"part": self._telling.part()})
        yield self._event("response.content_part.added", part)

    def _closing(self, status: str) -> Iterator[bytes]:
        telling = self._telling
        told = {"text": telling.text, "logprobs": telling.logprobs}
        yield self._event("response.output_text.done", self._of_part(told))
        yield self._event("response.content_part.done", self._of_part({"part": telling.part()}))
        item = {"output_index": 0, "item": telling.item(status)}
        yield self._event("response.output_item.done", item)
        whole = telling.response(status, self.usage())
        yield self._event(f"response.{status}", {"response": whole})

    def _of_part(self, told: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": self._telling.item_id, "output_index": 0, "content_index": 0, **told}

    def _event(self, kind: str, told: dict[str, Any]) -> bytes:
        number = self._num_told
        self._num_told += 1
        data = _encode({"type": kind, "sequence_number": number, **told})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
