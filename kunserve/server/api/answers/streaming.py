"""Answers that are written while the engine works, and what happens when nobody reads them."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kunserve.server.api.answers.choice import Choice, Delta
from kunserve.server.api.answers.message_wire import MessageStream
from kunserve.server.api.answers.wire import (
    DONE,
    ChoiceStream,
    Envelope,
    UsageIn,
    event,
    usage_chunk,
    usage_object,
    whole_answer,
)
from kunserve.server.api.front import Front
from kunserve.server.api.generation import ClientGone, EngineFailed, Generation, Interrupted
from kunserve.server.http.errors import error_object

logger = logging.getLogger("kunserve.server")


def stream_start() -> Message:
    """The head of a response of server-sent events."""
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ],
    }


def _chunks(
    streams: Sequence[ChoiceStream | MessageStream], news: Iterable[tuple[Choice, Delta]]
) -> bytes:
    return b"".join([streams[choice.index].chunk(choice, delta) for choice, delta in news])


@dataclass(eq=False)
class GenerationAnswer:
    """Runs a started generation and answers with it; a disconnect aborts it at once.

    An ASGI application, as Starlette's responses are.
    """

    _front: Front
    _generation: Generation
    _envelope: Envelope

    def usage(self) -> dict[str, Any]:
        """The ``usage`` object as of now."""
        generation, envelope = self._generation, self._envelope
        cached_tokens = generation.num_cached_tokens if envelope.tells_cached else None
        return usage_object(envelope.num_prompt_tokens, generation.num_output_tokens, cached_tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answer, and leave nothing running behind."""
        watcher = asyncio.create_task(self._watch_client(receive))
        try:
            await self.answer(scope, receive, send)
        except ClientGone:
            pass
        finally:
            watcher.cancel()
            self._front.leave(self._generation, ClientGone())

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response. Raises ClientGone when there is nobody to write it to."""
        raise NotImplementedError

    async def written(self, write: Callable[[], bytes], num_chars: int = 0) -> bytes:
        """What ``write`` gives. A long report of prompts, and a long text that is read, are
        written in a thread, since others would wait for it.
        """
        report, threads = self._envelope.report, self._front.codec.threads
        if report is not None:
            num_chars += report.num_chars
        if num_chars <= threads.inline_chars:
            return write()
        return await threads.call(write)

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.stop(ClientGone())


class WholeAnswer(GenerationAnswer):
    """One JSON object at the end."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``GenerationAnswer``."""
        try:
            while await self._generation.advance():
                pass
        except (EngineFailed, Interrupted) as error:
            await self._front.error_answer(scope["path"], error)(scope, receive, send)
            return
        num_read = sum(choice.num_unread for choice in self._generation.choices)
        body = await self.written(self.write, num_read)
        await Response(body, media_type="application/json")(scope, receive, send)

    def write(self) -> bytes:
        """The object. Called once, in a thread if it is long."""
        choices = self._generation.choices
        deltas = [choice.drain() for choice in choices]
        return whole_answer(self._envelope, choices, deltas, self.usage())


@dataclass(eq=False)
class StreamedAnswer(GenerationAnswer):
    """Server-sent events: a chunk per choice for all the tokens that came together."""

    _usage_in: UsageIn

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``GenerationAnswer``."""
        await send(stream_start())
        ending = await self._stream(send)
        await send({"type": "http.response.body", "body": ending + DONE})

    async def _stream(self, send: Send) -> bytes:
        """Write every token; returns the events that come before ``[DONE]``."""
        generation = self._generation
        streams = [
            (MessageStream if choice.reads_message else ChoiceStream)(
                self._envelope, choice.index, self._usage_in
            )
            for choice in generation.choices
        ]
        try:
            while moved := await generation.advance():
                news = [(choice, choice.drain()) for choice in moved]
                if any(delta.prompt_scores for _, delta in news):
                    body = await self.written(functools.partial(_chunks, streams, news))
                else:
                    body = _chunks(streams, news)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except (EngineFailed, Interrupted) as error:
            return event(error_object(error))
        except ClientGone:
            raise
        except Exception as error:
            logger.exception("stream failed request_id=%s", self._envelope.response_id)
            return event(error_object(error))
        if self._usage_in is UsageIn.NONE:
            return b""
        return usage_chunk(self._envelope, self.usage())
