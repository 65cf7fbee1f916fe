"""Answers of POST /v1/messages: one object, or the events that tell how it comes to be."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from kunserve.core.request import FinishReason
from kunserve.server.api.answers.choice import Choice
from kunserve.server.api.answers.streaming import WholeAnswer
from kunserve.server.api.generation import EngineFailed, Interrupted
from kunserve.server.api.parsers.message import MessagePiece
from kunserve_extras.chats.answers import named_event, piece_of, send_events
from kunserve_extras.messages.errors import error_body

PING_S = 10.0
"""So long a stream may be silent. Proxies cut what is silent for a minute."""
SIGNATURE = "unsigned"
"""Of thoughts. Clients want one, and send it back; nothing here reads it."""


def stop_reason(choice: Choice, is_clipped: bool, num_calls: int) -> str:
    """Why the answer ended; ``is_clipped``: the context held fewer tokens than were asked for."""
    if choice.finish_reason is FinishReason.LENGTH:
        return "model_context_window_exceeded" if is_clipped else "max_tokens"
    if choice.finish_reason is FinishReason.ABORT:
        return "pause_turn"
    if isinstance(choice.stop_reason, str):
        return "stop_sequence"
    return "tool_use" if num_calls else "end_turn"


@dataclass(eq=False)
class MessageAnswer(WholeAnswer):
    """A message at its end."""

    _is_clipped: bool
    """Whether the context holds fewer tokens than were asked for."""

    @property
    def choice(self) -> Choice:
        """The only one."""
        return self._generation.choices[0]

    def tokens(self) -> dict[str, int]:
        """``usage`` as of now. All of a prompt is one of the three inputs."""
        num_cached = self._generation.num_cached_tokens if self._envelope.tells_cached else 0
        return {
            "input_tokens": self._envelope.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._generation.num_output_tokens,
        }

    def message(self, content: list[dict[str, Any]], ending: dict[str, Any]) -> dict[str, Any]:
        """The whole object."""
        return {
            "id": self._envelope.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": content,
            **ending,
            "usage": self.tokens(),
        }

    def ending(self, num_calls: int) -> dict[str, Any]:
        """Why it ended."""
        reason = stop_reason(self.choice, self._is_clipped, num_calls)
        matched = self.choice.stop_reason if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": matched}

    def write(self) -> bytes:
        """See ``WholeAnswer``."""
        piece = piece_of(self.choice.drain())
        blocks = list(whole_blocks(self.choice, piece))
        return msgspec.json.encode(self.message(blocks, self.ending(len(piece.calls))))


def whole_blocks(choice: Choice, piece: MessagePiece) -> Iterator[dict[str, Any]]:
    """The content of a message."""
    if piece.reasoning:
        yield {"type": "thinking", "thinking": piece.reasoning, "signature": SIGNATURE}
    if piece.content:
        yield {"type": "text", "text": piece.content}
    for call in piece.calls:
        given = called_with(call.arguments)
        yield {"type": "tool_use", "id": choice.new_call_id(), "name": call.name, "input": given}


def called_with(arguments: str) -> dict[str, Any]:
    """The input of a call; of one that was cut off, what there is of it."""
    try:
        given = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


class Blocks:
    """The blocks of a stream: each begins, grows, and ends before the next one begins."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._kind: str | None = None
        """Of the block that is open."""
        self._index = -1
        self.num_calls = 0

    def tell(self, piece: MessagePiece) -> Iterator[bytes]:
        """More of the message."""
        calls = list(piece.calls)
        if calls and calls[0].name is None:  # the call that is open comes to its end first
            yield self._grow(type="input_json_delta", partial_json=calls.pop(0).arguments)
        if piece.reasoning:
            yield from self._begin("thinking", thinking="", signature="")
            yield self._grow(type="thinking_delta", thinking=piece.reasoning)
        if piece.content:
            yield from self._begin("text", text="")
            yield self._grow(type="text_delta", text=piece.content)
        for call in calls:
            self.num_calls += 1
            yield from self.end()
            call_id = self._choice.new_call_id()
            yield from self._begin("tool_use", id=call_id, name=call.name, input={})
            if call.arguments:
                yield self._grow(type="input_json_delta", partial_json=call.arguments)

    def end(self) -> Iterator[bytes]:
        """The block that is open is complete."""
        if self._kind == "thinking":
            yield self._grow(type="signature_delta", signature=SIGNATURE)
        if self._kind is not None:
            yield named_event("content_block_stop", index=self._index)
        self._kind = None

    def _begin(self, kind: str, **block: Any) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self.end()
        self._kind = kind
        self._index += 1
        yield named_event(
            "content_block_start", index=self._index, content_block={"type": kind, **block}
        )

    def _grow(self, **delta: Any) -> bytes:
        return named_event("content_block_delta", index=self._index, delta=delta)


class StreamedMessage(MessageAnswer):
    """A message by events."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``GenerationAnswer``."""
        await send_events(send, self._events())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        blocks = Blocks(self.choice)
        ending = {"stop_reason": None, "stop_sequence": None}
        yield named_event("message_start", message=self.message([], ending)) + named_event("ping")
        try:
            while (moved := await self._advance()) != []:
                told = [] if moved is None else blocks.tell(piece_of(self.choice.drain()))
                if news := b"".join(told) if moved else named_event("ping"):
                    yield news
        except (EngineFailed, Interrupted) as error:
            yield named_event("error", error=error_body(error)["error"])
            return
        closing = named_event(
            "message_delta", delta=self.ending(blocks.num_calls), usage=self.tokens()
        )
        yield b"".join(blocks.end()) + closing + named_event("message_stop")

    async def _advance(self) -> list[Choice] | None:
        """Progress, as ``Generation.advance`` has it; None after a silence."""
        try:
            async with asyncio.timeout(PING_S):
                return await self._generation.advance()
        except TimeoutError:
            return None
