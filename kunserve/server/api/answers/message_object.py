"""Messages of answers whose text is read: reasoning, content and calls of tools."""

from typing import Any

from kunserve.server.api.answers.choice import Choice, Delta
from kunserve.server.api.parsers.message import CallPiece


def reasoning_fields(text: str) -> dict[str, str]:
    """Reasoning under vLLM's present name, and under the one that most clients know."""
    return {"reasoning": text, "reasoning_content": text}


def whole_message(choice: Choice, delta: Delta, prefix: str) -> dict[str, Any]:
    """The message of an answer that is not streamed; ``prefix`` is what is echoed."""
    piece = delta.message
    assert piece is not None, choice.index
    content = prefix + piece.content
    says_more = bool(piece.calls or piece.reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if says_more and not content else content,
        "refusal": None,
    }
    if piece.reasoning:
        message |= reasoning_fields(piece.reasoning)
    if piece.calls:
        message["tool_calls"] = [
            {
                "id": choice.new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in piece.calls
        ]
    return message


def call_delta(choice: Choice, call: CallPiece) -> dict[str, Any]:
    """A piece of a call, as it is streamed: the first one has the id and the name."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": choice.new_call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
