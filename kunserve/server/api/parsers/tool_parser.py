"""What a parser of tool calls is."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Reading, Tape

TOOL_PARSERS = "tool_parsers"
"""The seam where formats of calls come in, one ``ToolParser`` by each name."""
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the parameters of a request's tools, by name."""


def long_call_id() -> str:
    """An id of a call, in vLLM's form."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class ToolParser:
    """How one family of models writes calls."""

    read: Callable[[Tape, MessageWriter, Tools], Reading[None]]
    """Reads an answer to its end. Whatever is no call becomes content."""
    markers: tuple[str, ...] = ()
    """Tokens that it needs to see, also where they are special ones."""
    new_call_id: Callable[[], str] = long_call_id
