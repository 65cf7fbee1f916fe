"""Qwen3-Coder: ``<function=name>`` with ``<parameter=key>`` inside, whose values are plain text.

What a value means depends on the schema of the parameter: text stays text, the rest is JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Reading, Sink, Tape
from kunserve.server.api.parsers.tool_parser import ToolParser, Tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_ENDS = (">", "\n", "<")


def _read(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
    while mark := (yield from tape.until((_OPEN, _FUNCTION), out.content)):
        tape.mark(mark)
        if mark == _OPEN:
            yield from tape.spaces()
            if not (yield from tape.accept(_FUNCTION)):
                out.content(tape.recorded())
                continue
        yield from _function(tape, out, tools)


def _name(tape: Tape) -> Reading[str]:
    """A name up to ``>``; empty if it is none."""
    pieces: list[str] = []
    end = yield from tape.until(_NAME_ENDS, pieces.append)
    return "".join(pieces).strip() if end == ">" else ""


def _function(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
    name = yield from _name(tape)
    if not name:
        out.content(tape.recorded())
        return
    tape.forget()
    out.begin_call(name)
    out.arguments("{")
    properties = tools.get(name, {}).get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    separator = ""
    while True:
        tape.mark()
        yield from tape.spaces()
        mark = yield from tape.accept(_PARAMETER, _FUNCTION_END, _CLOSE)
        if mark in (_FUNCTION_END, _CLOSE):
            break
        key = (yield from _name(tape)) if mark else ""
        if not key:  # cut off, or something else: the braces stay open
            out.content(tape.leftover())
            return
        tape.forget()
        out.arguments(f"{separator}{_quoted(key)}: ")
        separator = ", "
        if not (yield from _value(tape, out.arguments, schemas.get(key))):
            return
    tape.forget()
    out.arguments("}")
    if mark == _FUNCTION_END:
        yield from tape.spaces()
        yield from tape.accept(_CLOSE)


def _value(tape: Tape, sink: Sink, schema: Any) -> Reading[bool]:
    """Write one value as JSON; whether it came to its end."""
    yield from tape.accept("\n")
    if not _is_text(schema):
        pieces: list[str] = []
        end = yield from tape.until((_PARAMETER_END,), pieces.append)
        text = "".join(pieces)
        sink(_as_json(text.removesuffix("\n")) if end else _quoted(text)[:-1])
        return bool(end)
    held = _LastLine(sink)
    sink('"')
    end = yield from tape.until((_PARAMETER_END,), held.write)
    held.finish(is_whole=bool(end))
    return bool(end)


class _LastLine:
    """Text into the inside of a JSON string, but for a line break before its end tag."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""

    def write(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._sink(_quoted(text.removesuffix("\n"))[1:-1])

    def finish(self, is_whole: bool) -> None:
        self._sink('"' if is_whole else _quoted(self._held)[1:-1])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_text(schema: Any) -> bool:
    """Whether a parameter is text: its schema says so, or says nothing of its type."""
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    if isinstance(kind, list):
        return kind == ["string"]
    if kind is None:
        return not any(word in schema for word in ("anyOf", "oneOf", "allOf", "enum", "$ref"))
    return bool(kind == "string")


def _as_json(text: str) -> str:
    """The value as the model wrote it, if that is JSON; Python's constants; else a string."""
    constants = {"True": "true", "False": "false", "None": "null"}
    stripped = text.strip()
    if stripped in constants:
        return constants[stripped]
    try:
        json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    return stripped


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


QWEN3_CODER = ToolParser(_read, (_OPEN, _CLOSE, _FUNCTION, _FUNCTION_END, _PARAMETER_END))
