"""Answers of one choice: how they begin, and how their events are written."""

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Send

from kunserve.server.api.answers.choice import Delta
from kunserve.server.api.answers.streaming import stream_start
from kunserve.server.api.answers.wire import Envelope, event
from kunserve.server.api.front import Front
from kunserve.server.api.generation import Generation
from kunserve.server.api.openai_routes import AskedChat, OpenAIRoutes
from kunserve.server.api.parsers.message import MessagePiece
from kunserve.server.api.schema import ChatBody


def one_answer(
    front: Front,
    openai: OpenAIRoutes,
    chat: ChatBody,
    asked: AskedChat,
    response_id: str,
    arrival_s: float,
) -> tuple[Generation, Envelope]:
    """An answer that is ready to be started. ``arrival_s`` is of the monotonic clock."""
    prompts, eager = [asked.prompt], bool(chat.stream or chat.stop)
    choices = openai.choices(chat, prompts, asked.bad_words, response_id, arrival_s, asked.reading)
    envelope = Envelope(
        kind=chat.kind,
        response_id=response_id,
        created=int(time.time()),
        model=front.model_name,
        format_logprobs=None,
        prefixes=[""],
        num_prompt_tokens=len(asked.prompt),
        tells_cached=front.config.server.enable_prompt_tokens_details,
    )
    return Generation(front.engine, choices, front.watch, eager, len(choices)), envelope


def piece_of(delta: Delta) -> MessagePiece:
    """What a delta says; all of it is content where answers are not read."""
    return delta.message or MessagePiece(content=delta.text)


def named_event(kind: str, **told: Any) -> bytes:
    """One server-sent event that has a name."""
    return b"event: %b\n%b" % (kind.encode(), event({"type": kind, **told}))


async def send_events(send: Send, events: AsyncGenerator[bytes, None]) -> None:
    """A whole response of such events."""
    await send(stream_start())
    async with contextlib.aclosing(events):
        async for told in events:
            await send({"type": "http.response.body", "body": told, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
