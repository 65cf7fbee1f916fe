"""Constants of Python, rewritten as JSON while they are read."""

import json
import re

from kunserve.server.api.parsers.tape import Malformed, Reading, Sink, Tape

MAX_DEPTH = 32
"""Of lists and dictionaries in each other; more is nothing that a tool asks for."""
_MAX_SCALAR = 400
_SCALAR = re.compile(r"[\w.+\-]+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\n]+") for quote in "'\""}
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def python_value(tape: Tape, sink: Sink, depth: int = 0) -> Reading[None]:
    """Read one constant and write it as JSON. Raises Malformed for what is none."""
    character = yield from tape.peek()
    if character in ("'", '"'):
        yield from _string(tape, sink, character)
    elif character in ("[", "(", "{"):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from _container(tape, sink, character, depth)
    else:
        yield from _scalar(tape, sink)


def _scalar(tape: Tape, sink: Sink) -> Reading[None]:
    pieces: list[str] = []
    yield from tape.take_while(_SCALAR, pieces.append)
    text = "".join(pieces)
    if text in _CONSTANTS:
        sink(_CONSTANTS[text])
    elif _JSON_NUMBER.fullmatch(text):
        sink(text)
    else:
        sink(_number(text))


def _number(text: str) -> str:
    """A number that JSON would write in another way."""
    if len(text) > _MAX_SCALAR:
        raise Malformed
    for kind in (lambda: int(text, 0), lambda: float(text)):
        try:
            return json.dumps(kind(), allow_nan=False)
        except (ValueError, OverflowError):
            pass
    raise Malformed


def _container(tape: Tape, sink: Sink, opening: str, depth: int) -> Reading[None]:
    closing = {"[": "]", "(": ")", "{": "}"}[opening]
    begin, end = ("{", "}") if opening == "{" else ("[", "]")
    tape.skip()
    sink(begin)
    separator = ""
    while True:
        yield from tape.spaces()
        if (yield from tape.peek()) == closing:
            tape.skip()
            sink(end)
            return
        sink(separator)
        if opening == "{":
            if (yield from tape.peek()) not in ("'", '"'):
                raise Malformed  # JSON's keys are strings
            yield from python_value(tape, sink, depth + 1)
            yield from tape.spaces()
            yield from tape.expect(":")
            sink(": ")
            yield from tape.spaces()
        yield from python_value(tape, sink, depth + 1)
        separator = ", "
        yield from tape.spaces()
        if (yield from tape.peek()) == ",":
            tape.skip()
        elif (yield from tape.peek()) != closing:
            raise Malformed


def _string(tape: Tape, sink: Sink, quote: str) -> Reading[None]:
    def write(text: str) -> None:
        sink(json.dumps(text, ensure_ascii=False)[1:-1])

    tape.skip()
    sink('"')
    while True:
        character = yield from tape.take_while(_PLAIN[quote], write)
        if character == "\\":
            tape.skip()
            yield from _escape(tape, sink)
        elif character == "\n":  # models write them as they are
            tape.skip()
            write("\n")
        elif character == quote:
            tape.skip()
            sink('"')
            return
        else:
            raise Malformed


def _escape(tape: Tape, sink: Sink) -> Reading[None]:
    character = yield from tape.peek()
    if not character:
        raise Malformed
    tape.skip()
    num_digits = _HEX_DIGITS.get(character, 0)
    if num_digits:
        digits = ""
        for _ in range(num_digits):
            digit = yield from tape.peek()
            if digit not in "0123456789abcdefABCDEF" or not digit:
                raise Malformed
            tape.skip()
            digits += digit
        code = int(digits, 16)
        if code > 0x10FFFF:
            raise Malformed
        sink(json.dumps(chr(code))[1:-1])  # escaped, because it may be half of a pair
    elif character in _SIMPLE:
        sink(json.dumps(_SIMPLE[character])[1:-1])
    elif character in "\\'\"":
        sink(json.dumps(character)[1:-1])
    elif character != "\n":  # which joins two lines; others stand for themselves
        sink(json.dumps("\\" + character, ensure_ascii=False)[1:-1])
