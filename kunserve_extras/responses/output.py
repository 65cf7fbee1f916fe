"""The items of a response: thoughts, a message, calls of tools; and the events that tell them."""

from collections.abc import Iterator
from typing import Any, TypeAlias

from kunserve.server.api.answers.choice import Choice
from kunserve.server.api.parsers.message import CallPiece, MessagePiece

Told: TypeAlias = tuple[str, dict[str, Any]]
"""The name of an event, and its fields."""
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class Output:
    """Each item begins, grows, and ends before the next one begins."""

    def __init__(self, choice: Choice, unique: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._choice = choice
        self._unique = unique
        self._open: dict[str, Any] | None = None
        """The last item, until it has ended."""

    def tell(self, piece: MessagePiece, logprobs: list[dict[str, Any]]) -> Iterator[Told]:
        """More of the answer; ``logprobs`` are those of its tokens."""
        calls = list(piece.calls)
        if calls and calls[0].name is None:  # the call that is open comes to its end first
            yield self._argue(calls.pop(0).arguments)
        if piece.reasoning:
            yield from self._begin("reasoning")
            yield self._write("reasoning_text", piece.reasoning)
        begins_or_goes_on = self._open is None or self._open["type"] == "message"
        if piece.content or (logprobs and begins_or_goes_on and not calls):
            yield from self._begin("message")
            yield self._write("output_text", piece.content, logprobs)
        for call in calls:
            yield from self._call(call)

    def end(self, status: str) -> Iterator[Told]:
        """The answer is over. One that says nothing is an empty message."""
        if not self.items:
            yield from self._begin("message")
        yield from self._end(status)

    def _call(self, call: CallPiece) -> Iterator[Told]:
        yield from self._end("completed")
        call_id = self._choice.new_call_id()
        yield from self._begin("function_call", call_id=call_id, name=call.name, arguments="")
        if call.arguments:
            yield self._argue(call.arguments)

    def _argue(self, arguments: str) -> Told:
        assert self._open is not None, arguments
        self._open["arguments"] += arguments
        return "response.function_call_arguments.delta", {**self._place(), "delta": arguments}

    def _write(self, kind: str, text: str, logprobs: list[dict[str, Any]] | None = None) -> Told:
        assert self._open is not None, kind
        part, told = self._open["content"][0], {**self._place(part=True), "delta": text}
        part["text"] += text
        if logprobs is not None:
            part["logprobs"] += logprobs
            told["logprobs"] = logprobs
        return f"response.{kind}.delta", told

    def _begin(self, kind: str, **fields: Any) -> Iterator[Told]:
        """An item of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._end("completed")
        number = f"_{len(self.items)}" if self.items else ""
        item = {"id": f"{_PREFIXES[kind]}_{self._unique}{number}", "type": kind}
        if kind == "message":
            item["role"] = "assistant"
        self._open = item | {"status": "in_progress"} | fields
        self.items.append(self._open)
        if kind == "reasoning":
            self._open["summary"] = []
        if kind == "function_call":
            yield "response.output_item.added", self._whole()
            return
        self._open["content"] = []
        yield "response.output_item.added", self._whole()
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield "response.content_part.added", {**self._place(part=True), "part": dict(part)}
        self._open["content"] = [part]

    def _end(self, status: str) -> Iterator[Told]:
        """The item that is open is complete, or as complete as it will be."""
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            told = {**self._place(), "name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", told
        else:
            place, part = self._place(part=True), item["content"][0]
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield f"response.{part['type']}.done", {**place, **told}
            yield "response.content_part.done", {**place, "part": part}
        yield "response.output_item.done", self._whole()
        self._open = None

    def _place(self, *, part: bool = False) -> dict[str, Any]:
        """Of the item that is open, or of its only part."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if part else place

    def _whole(self) -> dict[str, Any]:
        assert self._open is not None
        return {"output_index": len(self.items) - 1, "item": dict(self._open)}
