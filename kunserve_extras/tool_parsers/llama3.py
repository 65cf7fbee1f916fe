"""Llama 3.1 and later: an answer that calls tools is JSON from its first character on."""

from kunserve.server.api.parsers.json_calls import json_calls
from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Reading, Tape
from kunserve.server.api.parsers.tool_parser import ToolParser, Tools

_MARK = "<|python_tag|>"


def _read(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
    spaces = yield from tape.spaces()
    if (yield from tape.peek()) == "{":
        yield from json_calls(tape, out, before=spaces, needs_arguments=True)
    else:
        out.content(spaces)
    while mark := (yield from tape.until((_MARK,), out.content)):
        yield from json_calls(tape, out, before=mark, needs_arguments=True)


LLAMA3_JSON = ToolParser(_read, (_MARK,))
