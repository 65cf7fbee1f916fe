"""Models that write calls as a list of Python's: ``[weather(city="Paris"), time()]``."""

import json
import re

from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Malformed, Reading, Tape
from kunserve.server.api.parsers.tool_parser import ToolParser, Tools
from kunserve_extras.tool_parsers.python_value import python_value

_NAME = re.compile(r"[\w.\-]+")
_MARKS = ("<|python_start|>", "<|python_end|>")
"""What Llama 4 writes around the list."""


def _read(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
    tape.mark()
    yield from tape.spaces()
    yield from tape.accept(_MARKS[0])
    yield from tape.spaces()
    if (yield from tape.peek()) == "[":
        tape.skip()
        try:
            yield from _list(tape, out)
            yield from tape.spaces()
            yield from tape.accept(_MARKS[1])
            tape.forget()
        except Malformed:
            out.content(tape.leftover() if out.num_calls else tape.recorded())
    else:
        out.content(tape.recorded())
    yield from tape.rest(out.content)


def _list(tape: Tape, out: MessageWriter) -> Reading[None]:
    """See ``_call``, also for what it raises."""
    while True:
        yield from _call(tape, out)
        yield from tape.spaces()
        character = yield from tape.peek()
        if character == ",":
            tape.skip()
            yield from tape.spaces()
            character = yield from tape.peek()
        if character == "]":
            tape.skip()
            return
        if not character:
            raise Malformed


def _call(tape: Tape, out: MessageWriter) -> Reading[None]:
    """One call. It is one once its first argument has a name, or it closes without any.

    Raises Malformed with all that was read and not written on the tape's record.
    """

    def write(text: str) -> None:
        out.arguments(text)
        tape.mark()

    yield from tape.spaces()
    name = yield from _word(tape)
    yield from tape.expect("(")
    separator = "{"
    while True:
        yield from tape.spaces()
        if (yield from tape.peek()) == ")":
            break
        key = yield from _word(tape)
        yield from tape.spaces()
        yield from tape.expect("=")
        yield from tape.spaces()
        if separator == "{":
            out.begin_call(name)
        write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from python_value(tape, write)
        yield from tape.spaces()
        if (yield from tape.peek()) == ",":
            tape.skip()
        elif (yield from tape.peek()) != ")":
            raise Malformed
    tape.skip()
    if separator == "{":
        out.begin_call(name)
        write("{")
    write("}")


def _word(tape: Tape) -> Reading[str]:
    pieces: list[str] = []
    yield from tape.take_while(_NAME, pieces.append)
    if not pieces:
        raise Malformed
    return "".join(pieces)


PYTHONIC = ToolParser(_read)
LLAMA4_PYTHONIC = ToolParser(_read, _MARKS)
