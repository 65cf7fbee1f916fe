"""Answers read by parsers, whole and in pieces."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kunserve.core.extras import extra_names, find_extra
from kunserve.server.api.parsers.reader import MessageFormat, MessageReader
from kunserve.server.api.parsers.tool_parser import ToolParser

TOOL_PARSERS: dict[str, ToolParser] = {
    name: find_extra("tool_parsers", name, "a test") for name in extra_names("tool_parsers")
}


@dataclass
class Message:
    """What an answer says in all."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Of each call: its name, and its arguments as they were written."""

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(pieces: Iterable[str], form: MessageFormat) -> Message:
    """The sum of what is told of an answer that comes in these pieces."""
    message = Message()
    reader = MessageReader(form)
    for piece, is_last in [*((one, False) for one in pieces), ("", True)]:
        new = reader.feed(piece, is_last)
        message.reasoning += new.reasoning
        message.content += new.content
        assert len({call.index for call in new.calls}) == len(new.calls)
        for call in new.calls:
            if call.name is not None:
                assert call.index == len(message.calls)
                message.calls.append([call.name, ""])
            assert call.index == len(message.calls) - 1
            message.calls[-1][1] += call.arguments
    assert reader._out.num_calls == len(message.calls)
    return message


def read_by(name: str, text: str, **form: Any) -> Message:
    """A whole answer read by the parser of this name, and the same letter by letter."""
    form = {"tools": {}, **form}
    made = MessageFormat(TOOL_PARSERS[name], **form)
    message = read([text], made)
    assert read(text, made) == message
    return message
