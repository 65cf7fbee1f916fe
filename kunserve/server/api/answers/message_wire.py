"""The bytes of streams whose text is read: reasoning, content and calls of tools."""

from typing import Any

from kunserve.server.api.answers.choice import Choice, Delta
from kunserve.server.api.answers.message_object import call_delta, reasoning_fields
from kunserve.server.api.answers.wire import Envelope, UsageIn, event, usage_object


class MessageStream:
    """Writes the chunks of one choice of one stream, as ``ChoiceStream`` does."""

    __slots__ = ("_envelope", "_first", "_index", "_usage")

    def __init__(self, envelope: Envelope, index: int, usage: UsageIn) -> None:
        self._envelope = envelope
        self._index = index
        self._usage = usage
        self._first = True

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The delta as SSE events; empty when there is nothing to tell yet.

        Reasoning, content and calls go in events of their own, because clients look at one only.
        """
        parts = self._parts(choice, delta)
        finish, prompts = choice.finish_name, self._envelope.prompt_token_ids
        has_more = delta.entries or (delta.token_ids and prompts is not None)
        if finish is not None or (has_more and not parts):
            parts.append({})
        events = [self._event(choice, part) for part in parts]
        if not events:
            return b""
        ending = events[-1]["choices"][0]
        if prompts is not None:
            ending["token_ids"] = delta.token_ids
            if delta.starts:
                events[0]["prompt_token_ids"] = prompts[self._index]
        if delta.entries:
            ending["logprobs"] = self._envelope.logprobs(self._index, delta)
        if finish is not None:
            ending["finish_reason"] = finish
            ending["stop_reason"] = choice.stop_reason
        return b"".join(map(event, events))

    def _parts(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        piece = delta.message
        assert piece is not None, self._index
        parts: list[dict[str, Any]] = []
        if self._first:
            self._first = False
            prefix = self._envelope.prefixes[self._index]
            parts.append({"role": "assistant", "content": ""})
            if prefix:
                parts.append({"content": prefix})
        if piece.reasoning:
            parts.append(reasoning_fields(piece.reasoning))
        if piece.content:
            parts.append({"content": piece.content})
        if piece.calls:
            parts.append({"tool_calls": [call_delta(choice, call) for call in piece.calls]})
        return parts

    def _event(self, choice: Choice, part: dict[str, Any]) -> dict[str, Any]:
        envelope = self._envelope
        one = {"index": self._index, "delta": part, "logprobs": None, "finish_reason": None}
        value: dict[str, Any] = {
            "id": envelope.response_id,
            "object": "chat.completion.chunk",
            "created": envelope.created,
            "model": envelope.model,
            "choices": [one],
        }
        if self._usage is UsageIn.EACH:
            value["usage"] = usage_object(envelope.num_prompt_tokens, choice.num_tokens)
        elif self._usage is UsageIn.LAST:
            value["usage"] = None
        return value
