"""Server-sent events of an OpenAI stream: bytes to payloads, payloads to chunks. Pure."""

import enum
from typing import Any, NamedTuple

import msgspec

DONE = b"[DONE]"


class MalformedStream(Exception):
    """The server sent something that is no OpenAI stream."""


class EventBuffer:
    """Cuts received bytes into ``data:`` payloads. Events may be split anywhere."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that ``data`` completes, in order."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    @property
    def rest(self) -> bytes:
        """Bytes after the last complete line."""
        return self._rest


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    message: Any = None
    object: str | None = None


class ChunkKind(enum.Enum):
    """What a chunk means for the clock."""

    TOKEN = enum.auto()
    """At least one token arrived (its text may still be held back)."""
    LAST = enum.auto()
    """The response ends, without text."""
    OTHER = enum.auto()
    """A chat stream's opening, usage alone, or nothing."""


class StreamChunk(NamedTuple):
    """One event of the stream."""

    kind: ChunkKind
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    error: str | None


_decoder = msgspec.json.Decoder(_Chunk)


def parse_chunk(payload: bytes) -> StreamChunk:
    """One payload (not ``[DONE]``) of a completions or chat stream.

    Promises to raise nothing but `MalformedStream`.
    """
    try:
        chunk = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise MalformedStream(f"malformed stream: {error}") from None
    failure = _failure(chunk)
    kind, reason = ChunkKind.OTHER, None
    if chunk.choices:
        choice = chunk.choices[0]
        reason = choice.finish_reason
        kind = _kind(choice)
    usage = chunk.usage
    if usage is None:
        return StreamChunk(kind, reason, None, None, failure)
    return StreamChunk(kind, reason, usage.prompt_tokens, usage.completion_tokens, failure)


def _kind(choice: _Choice) -> ChunkKind:
    delta = choice.delta
    if delta is not None:
        if delta.content or delta.reasoning_content or delta.reasoning:
            return ChunkKind.TOKEN
        return ChunkKind.OTHER if choice.finish_reason is None else ChunkKind.LAST
    if choice.text or choice.finish_reason is None:
        return ChunkKind.TOKEN
    return ChunkKind.LAST


def _failure(chunk: _Chunk) -> str | None:
    if chunk.error is not None:
        return f"error in stream: {error_message(chunk.error)}"
    if chunk.object == "error":
        return f"error in stream: {error_message(chunk.message)}"
    return None


def error_message(error: object) -> str:
    """The message of an OpenAI error object, whatever its shape."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        message = inner.get("message", inner) if isinstance(inner, dict) else inner
        return str(message)
    return str(error)
