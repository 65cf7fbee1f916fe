"""The bytes of answers: SSE chunks cut from prepared halves, and whole response objects.

A streamed token costs one JSON string and one concatenation: everything else of its chunk is
the same for the whole stream and is encoded once per choice.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from kunserve.server.api.answers.choice import Choice, Delta, TokenEntry
from kunserve.server.api.answers.message_object import whole_message
from kunserve.server.api.answers.prompt_report import PromptReport
from kunserve.server.api.schema import Kind, StreamOptions

DONE = b"data: [DONE]\n\n"
FormatLogprobs: TypeAlias = Callable[[Sequence[TokenEntry], int], dict[str, Any]]
"""(entries, offset of the output in the text) -> the API's ``logprobs`` object."""

_encode = msgspec.json.Encoder().encode

_OBJECTS = {
    "completion": ("text_completion", "text_completion"),
    "chat": ("chat.completion", "chat.completion.chunk"),
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk and the whole answer of one HTTP request have in common."""

    kind: Kind
    response_id: str
    created: int
    model: str
    format_logprobs: FormatLogprobs | None
    prefixes: Sequence[str]
    """Per choice: the prompt's text when it is echoed, else empty."""
    num_prompt_tokens: int
    """For ``usage``: each prompt counts once, whatever ``n``."""
    report: PromptReport | None = None
    """Where the client asks for log-probabilities of its prompts."""
    tells_cached: bool = False
    """Whether ``usage`` tells how many prompt tokens were cached."""
    prompt_token_ids: Sequence[Sequence[int]] | None = None
    """Per choice, where the client asks for token ids."""

    def logprobs(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """The ``logprobs`` object of a choice's news; an echoed prompt's tokens come first."""
        if self.format_logprobs is None:
            return None
        entries: Sequence[TokenEntry] = delta.entries
        if delta.starts and self.report is not None and self.report.in_entries:
            entries = [*self.report.entries(index, delta.prompt_scores), *entries]
        return self.format_logprobs(entries, len(self.prefixes[index]))


def usage_object(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None
) -> dict[str, Any]:
    """The ``usage`` object; ``cached_tokens`` None is not told."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def event(value: Any) -> bytes:
    """One SSE event."""
    return b"data: " + _encode(value) + b"\n\n"


class UsageIn(enum.Enum):
    """Which chunks of a stream tell the usage."""

    NONE = enum.auto()
    LAST = enum.auto()
    """One more at the end; the others say null."""
    EACH = enum.auto()
    """Each one that of its choice so far, and one more at the end."""

    @classmethod
    def of(cls, options: StreamOptions | None) -> "UsageIn":
        """As vLLM reads ``stream_options``."""
        if options is None or not options.include_usage:
            return cls.NONE
        return cls.EACH if options.continuous_usage_stats else cls.LAST


class ChoiceStream:
    """Writes the chunks of one choice of one stream."""

    __slots__ = (
        "_closing",
        "_envelope",
        "_first",
        "_head",
        "_index",
        "_middle",
        "_tail",
        "_usage",
    )

    def __init__(self, envelope: Envelope, index: int, usage: UsageIn) -> None:
        self._envelope = envelope
        self._usage = usage
        self._index = index
        head = _encode(
            {
                "id": envelope.response_id,
                "object": _OBJECTS[envelope.kind][1],
                "created": envelope.created,
                "model": envelope.model,
            }
        )
        chat = envelope.kind == "chat"
        opening = b'"delta":{"content":' if chat else b'"text":'
        self._head = b'data: %b,"choices":[{"index":%d,%b' % (head[:-1], index, opening)
        self._middle = b'},"logprobs":' if chat else b',"logprobs":'
        self._closing = self._middle + b'null,"finish_reason":null'
        self._tail = b"}]}\n\n" if usage is UsageIn.NONE else b'}],"usage":null}\n\n'
        self._first = True

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The delta as SSE events; empty when there is nothing to tell yet."""
        text = delta.text
        opening = b""
        tail = self._tail
        prompts = self._envelope.prompt_token_ids
        if self._usage is UsageIn.EACH:
            usage = usage_object(self._envelope.num_prompt_tokens, choice.num_tokens)
            tail = b'}],"usage":%b}\n\n' % _encode(usage)
        if self._first:
            self._first = False
            opening, text = self._open(text, tail)
        finish = choice.finish_name
        if prompts is not None and (delta.token_ids or finish is not None):
            tail = self._told_ids(delta, prompts[self._index]) + tail
        if finish is None and not delta.entries:
            if not text and (prompts is None or not delta.token_ids):
                return opening
            return opening + self._head + _encode(text) + self._closing + tail
        logprobs = self._logprobs(delta)
        ending = b"null"
        if finish is not None:
            stop_reason = _encode(choice.stop_reason)
            ending = b'%b,"stop_reason":%b' % (_encode(finish), stop_reason)
        return b"".join(
            (
                opening,
                self._head,
                _encode(text),
                self._middle,
                logprobs,
                b',"finish_reason":',
                ending,
                tail,
            )
        )

    def _open(self, text: str, tail: bytes) -> tuple[bytes, str]:
        """What comes before the first text: the role, and what is echoed."""
        text = self._envelope.prefixes[self._index] + text
        if self._envelope.kind == "completion":
            return b"", text
        # The content's opening, with the role before it.
        head = self._head.replace(b'"delta":{', b'"delta":{"role":"assistant",', 1)
        prompts = self._envelope.prompt_token_ids
        if prompts is not None:
            told = b',"prompt_token_ids":%b,"choices":' % _encode(prompts[self._index])
            head = head.replace(b',"choices":', told, 1)
        return head + b'""' + self._closing + tail, text

    def _told_ids(self, delta: Delta, prompt: Sequence[int]) -> bytes:
        """The end of a chunk's choice; that of a completion begins with the prompt's tokens."""
        told = b',"token_ids":' + _encode(delta.token_ids)
        if delta.starts and self._envelope.kind == "completion":
            told += b',"prompt_token_ids":' + _encode(prompt)
        return told

    def _logprobs(self, delta: Delta) -> bytes:
        if not delta.entries and not delta.starts:
            return b"null"
        return _encode(self._envelope.logprobs(self._index, delta))


def usage_chunk(envelope: Envelope, usage: dict[str, Any]) -> bytes:
    """The last chunk of a stream with ``include_usage``."""
    return event(
        {
            "id": envelope.response_id,
            "object": _OBJECTS[envelope.kind][1],
            "created": envelope.created,
            "model": envelope.model,
            "choices": [],
            "usage": usage,
        }
    )


def whole_answer(
    envelope: Envelope, choices: Sequence[Choice], deltas: Sequence[Delta], usage: dict[str, Any]
) -> bytes:
    """The body of an answer that is not streamed."""
    bodies = []
    for choice, delta in zip(choices, deltas, strict=True):
        assert choice.finish_reason is not None, choice.index
        prefix = envelope.prefixes[choice.index]
        body: dict[str, Any] = {"index": choice.index}
        if choice.reads_message:
            body["message"] = whole_message(choice, delta, prefix)
        elif envelope.kind == "chat":
            text = prefix + delta.text
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = prefix + delta.text
        body["logprobs"] = envelope.logprobs(choice.index, delta)
        body["finish_reason"] = choice.finish_name
        body["stop_reason"] = choice.stop_reason
        if envelope.prompt_token_ids is not None:
            body["token_ids"] = delta.token_ids
            if envelope.kind == "completion":
                body["prompt_token_ids"] = envelope.prompt_token_ids[choice.index]
        bodies.append(body)
    answer = {
        "id": envelope.response_id,
        "object": _OBJECTS[envelope.kind][0],
        "created": envelope.created,
        "model": envelope.model,
        "choices": bodies,
        "usage": usage,
    }
    if envelope.prompt_token_ids is not None and envelope.kind == "chat":
        answer["prompt_token_ids"] = envelope.prompt_token_ids[0]
    report = envelope.report
    if report is not None and report.num_listed is not None:
        if envelope.kind == "chat":  # which has one prompt
            answer["prompt_logprobs"] = report.listing(0, deltas[0].prompt_scores)
        else:
            for body, delta in zip(bodies, deltas, strict=True):
                body["prompt_logprobs"] = report.listing(body["index"], delta.prompt_scores)
    return _encode(answer)
