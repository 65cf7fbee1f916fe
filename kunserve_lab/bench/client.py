"""One streaming request to an OpenAI server, and its record. Never raises on a server's fault."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from kunserve_lab.bench.prompts import Prompt
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.bench.sse import (
    DONE,
    ChunkKind,
    EventBuffer,
    MalformedStream,
    error_message,
    parse_chunk,
)

_MAX_ERROR_BYTES = 64 * 1024
_BROKEN_OFF = ("abort", "error")
"""Reasons with which some servers end a stream that they could not complete."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What every request of a run has in common."""

    model: str
    endpoint: str
    chat: bool
    ignore_eos: bool = False
    temperature: float = 0.0
    api_key: str | None = None
    timeout_s: float = 3600.0
    extra_body: tuple[tuple[str, object], ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request."""
        common = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        return common | authorization(self.api_key)

    def body(self, prompt: Prompt, max_tokens: int, priority: int = 0) -> bytes:
        """The JSON of one request."""
        asked: dict[str, object] = {"model": self.model}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": prompt}]
            asked["max_completion_tokens"] = max_tokens
        else:
            asked["prompt"] = prompt
            asked["max_tokens"] = max_tokens
        asked["temperature"] = self.temperature
        asked["stream"] = True
        asked["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if priority:
            asked["priority"] = priority
        return msgspec.json.encode(asked | dict(self.extra_body))


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that carries the key, if there is one."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


@dataclass(slots=True)
class Call:
    """A request under way: what has been seen of it so far."""

    number: int
    server: str
    planned_s: float
    input_tokens: int
    asked_output_tokens: int
    sent_s: float
    token_times_s: list[float]
    last_token_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    done: bool = False

    def see(self, payload: bytes, now_s: float) -> str | None:
        """Takes in one payload that arrived at ``now_s``; an error in it is returned."""
        if payload == DONE:
            self.done = True
            return None
        chunk = parse_chunk(payload)
        if chunk.kind is ChunkKind.TOKEN:
            self.token_times_s.append(now_s)
            self.last_token_s = now_s
        elif chunk.kind is ChunkKind.LAST:
            self.last_token_s = now_s
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        if chunk.completion_tokens is not None:
            self.completion_tokens = chunk.completion_tokens
        if chunk.prompt_tokens is not None:
            self.prompt_tokens = chunk.prompt_tokens
        return chunk.error

    def record(self, finish_s: float, error: str | None) -> RequestRecord:
        """What is known now, for good."""
        if error is None and self.last_token_s is None:
            error = "the response ended without a token"
        if error is None and self.finish_reason in _BROKEN_OFF:
            error = f"ended by {self.finish_reason}"
        if error is None and not self.done and self.finish_reason is None:
            error = "the stream ended early"
        times = tuple(self.token_times_s)
        if error is None and not times and self.last_token_s is not None:
            times = (self.last_token_s,)
        asked, counted = self.input_tokens, self.completion_tokens
        return RequestRecord(
            number=self.number,
            server=self.server,
            planned_s=self.planned_s,
            sent_s=self.sent_s,
            token_times_s=times,
            last_token_s=self.last_token_s,
            finish_s=finish_s,
            input_tokens=asked if self.prompt_tokens is None else self.prompt_tokens,
            asked_output_tokens=self.asked_output_tokens,
            output_tokens=len(times) if counted is None else counted,
            finish_reason=self.finish_reason,
            error=error,
        )


async def stream(
    session: aiohttp.ClientSession,
    settings: CallSettings,
    call: Call,
    body: bytes,
    start_s: float,
    now_s: Callable[[], float] = time.perf_counter,
) -> RequestRecord:
    """Sends ``body`` to the call's server and follows the answer to its end.

    ``start_s`` is the moment on ``now_s`` at which the run began. Every failure of the server
    or of the network becomes the record's ``error``; only cancellation is raised.
    """
    call.sent_s = now_s() - start_s
    error: str | None
    try:
        async with session.post(
            call.server + settings.endpoint, data=body, headers=settings.headers
        ) as response:
            if response.status != 200:
                error = await _http_error(response)
            else:
                error = await _follow(response, call, start_s, now_s)
    except MalformedStream as caught:
        error = str(caught)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as caught:
        error = network_error(caught)
    return call.record(now_s() - start_s, error)


async def _follow(
    response: aiohttp.ClientResponse, call: Call, start_s: float, now_s: Callable[[], float]
) -> str | None:
    events = EventBuffer()
    async for data in response.content.iter_any():
        moment_s = now_s() - start_s
        for payload in events.feed(data):
            error = call.see(payload, moment_s)
            if error is not None:
                return error
    if not call.done and call.last_token_s is None:
        kind = response.headers.get("Content-Type", "no content type")
        return f"the response is not a stream ({kind})"
    return None


async def _http_error(response: aiohttp.ClientResponse) -> str:
    body = await response.content.read(_MAX_ERROR_BYTES)
    try:
        message = error_message(msgspec.json.decode(body))
    except msgspec.MsgspecError:
        message = body[:200].decode(errors="replace").strip() or (response.reason or "")
    return f"HTTP {response.status}: {message}"


def network_error(error: BaseException) -> str:
    """A short reason, the same for every failure of its kind so that they can be counted."""
    match error:
        case TimeoutError() | asyncio.TimeoutError():
            return "timed out"
        case aiohttp.ClientConnectorDNSError():
            return "the host name is unknown"
        case aiohttp.ClientConnectorError() if isinstance(error.os_error, ConnectionRefusedError):
            return "connection refused"
        case aiohttp.ClientConnectorError():
            return f"cannot connect ({error.os_error.strerror or error.os_error})"
        case aiohttp.ServerDisconnectedError() | ConnectionResetError() | BrokenPipeError():
            return "the server closed the connection"
        case aiohttp.ClientPayloadError():
            return "the stream was cut off"
        case aiohttp.InvalidURL():
            return f"not a URL: {error}"
        case _:
            return f"{type(error).__name__}: {error}"
