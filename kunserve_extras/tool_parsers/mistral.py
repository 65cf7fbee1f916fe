"""Mistral: ``[TOOL_CALLS]`` and a list in JSON; newer models name the tool before its arguments."""

import random
import re
import string

from kunserve.server.api.parsers.json_calls import json_calls, raw_value
from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Reading, Tape
from kunserve.server.api.parsers.tool_parser import ToolParser, Tools

_MARK, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.\-]+")
_ID_TEXT = re.compile(r"[A-Za-z0-9]+")
_ID_LENGTH = 9
_random = random.SystemRandom()


def _call_id() -> str:
    """Its templates refuse every id of another form."""
    return "".join(_random.choices(string.ascii_letters + string.digits, k=_ID_LENGTH))


def _read(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
    while mark := (yield from tape.until((_MARK,), out.content)):
        tape.mark(mark)
        yield from tape.spaces()
        if (yield from tape.peek()) in ("[", "{"):
            yield from json_calls(tape, out, before=tape.recorded())
        else:
            yield from _named(tape, out)


def _named(tape: Tape, out: MessageWriter) -> Reading[None]:
    """``name{...}``, with marks before the braces, or without."""
    name: list[str] = []
    yield from tape.take_while(_NAME, name.append)
    if (yield from tape.accept(_ID)):
        yield from tape.take_while(_ID_TEXT, lambda _: None)
    yield from tape.accept(_ARGUMENTS)
    yield from tape.spaces()
    if not name or (yield from tape.peek()) != "{":
        out.content(tape.recorded())
        return
    tape.forget()
    out.begin_call("".join(name))
    yield from raw_value(tape, out.arguments)


MISTRAL = ToolParser(_read, (_MARK, _ARGUMENTS, _ID), _call_id)
