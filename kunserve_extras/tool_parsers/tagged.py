"""Models that write calls as JSON behind a mark, and mostly before another one."""

from kunserve.server.api.parsers.json_calls import json_calls
from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Reading, Tape
from kunserve.server.api.parsers.tool_parser import ToolParser, Tools


def tagged(opens: tuple[str, ...], closes: tuple[str, ...] = ()) -> ToolParser:
    """A parser of such calls; text around them is content."""

    def read(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
        while opened := (yield from tape.until(opens, out.content)):
            if not (yield from json_calls(tape, out, before=opened, closers=closes)):
                continue
            if closes:
                yield from tape.accept(*closes)

    return ToolParser(read, (*opens, *closes))


HERMES = tagged(("<tool_call>",), ("</tool_call>",))
"""Hermes 2 Pro and later; Qwen2.5 and Qwen3."""
JAMBA = tagged(("<tool_calls>",), ("</tool_calls>",))
GRANITE = tagged(("<|tool_call|>", "<tool_call>"))
PHI4_MINI = tagged(("functools",))
