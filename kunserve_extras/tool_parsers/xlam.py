"""xLAM: a list of calls in JSON, bare, in a code block, or behind a mark."""

from kunserve.server.api.parsers.json_calls import json_calls
from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Reading, Tape
from kunserve.server.api.parsers.tool_parser import ToolParser, Tools

_FENCES = ("```json", "```")
_MARKS = ("<tool_call>", "[TOOL_CALLS]", *_FENCES)
_CLOSES = ("</tool_call>", "```")


def _read(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
    mark = yield from tape.spaces()
    if (yield from tape.peek()) not in ("[", "{"):
        out.content(mark)
        mark = yield from tape.until(_MARKS, out.content)
    while True:
        if (yield from json_calls(tape, out, mark, needs_arguments=True)):
            yield from tape.accept(*_CLOSES)
        mark = yield from tape.until(_MARKS, out.content)
        if not mark:
            return


XLAM = ToolParser(_read, ("<tool_call>", "</tool_call>", "[TOOL_CALLS]"))
