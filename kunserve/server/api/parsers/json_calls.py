"""Calls that a model writes as JSON: ``{"name": ..., "arguments": {...}}``.

Up to where its arguments begin, an object may turn out to be none that calls a tool; then it is
content. From there on it is a call, whose arguments are passed on as the model writes them. Where
they break off, they do not parse, and the client sees that.
"""

import json
import re

from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Malformed, Reading, Sink, Tape

_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r"[^\s,\]}<]+")
_NAME_KEYS = frozenset({"name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


def _ignore(_text: str) -> None:
    pass


def _string(tape: Tape, sink: Sink) -> Reading[bool]:
    """Pass a string on as it is written; whether it came to its end."""
    yield from tape.expect('"')
    sink('"')
    while character := (yield from tape.take_while(_IN_STRING, sink)):
        tape.skip()
        sink(character)
        if character == '"':
            return True
        escaped = yield from tape.peek()
        if escaped:
            tape.skip()
            sink(escaped)
    return False


def string_value(tape: Tape) -> Reading[str]:
    """What a string says. Raises Malformed if it says nothing."""
    pieces: list[str] = []
    if not (yield from _string(tape, pieces.append)):
        raise Malformed
    try:
        value = json.loads("".join(pieces), strict=False)
        value.encode()  # half of a pair of escapes is no character
    except ValueError:
        raise Malformed from None
    assert isinstance(value, str)
    return value


def raw_value(tape: Tape, sink: Sink, closers: tuple[str, ...] = ()) -> Reading[None]:
    """Pass any value on as it is written, up to its end, or to what closes the call around it.

    Brackets are counted, not matched: what is within them is the client's to judge.
    """
    first = yield from tape.peek()
    if first == '"':
        yield from _string(tape, sink)
    elif first not in ("{", "["):
        yield from tape.take_while(_SCALAR, sink)
    else:
        yield from _brackets(tape, sink, closers)


def _brackets(tape: Tape, sink: Sink, closers: tuple[str, ...]) -> Reading[None]:
    depth = 0
    while character := (yield from tape.take_while(_OUTSIDE, sink)):
        if character == '"':
            yield from _string(tape, sink)
            continue
        if character == "<" and closers and (yield from tape.stands_at(closers)):
            return
        tape.skip()
        sink(character)
        depth += (character in "{[") - (character in "}]")
        if depth == 0:
            return


class _Call:
    """One object, while it is read."""

    def __init__(self, tape: Tape, out: MessageWriter, closers: tuple[str, ...]) -> None:
        self._tape = tape
        self._out = out
        self._closers = closers
        self._name: str | None = None
        self._early: list[str] | None = None
        """Arguments that came before the name."""
        self.is_begun = False

    def read(self, needs_arguments: bool) -> Reading[None]:
        """Read the object. Raises Malformed before the call is begun, and not after that."""
        tape = self._tape
        yield from tape.expect("{")
        while True:
            yield from tape.spaces()
            character = yield from tape.peek()
            if character == '"' and not self.is_begun:
                yield from self._member()
            elif character == '"':
                yield from self._other_member()
            elif character == ",":
                tape.skip()
            elif character == "}":
                tape.skip()
                break
            elif self.is_begun:
                return  # cut off, or closed without a bracket
            else:
                raise Malformed
        if not self.is_begun:
            if self._name is None or needs_arguments:
                raise Malformed
            self._begin(self._name)
            self._out.arguments("{}")

    def _member(self) -> Reading[None]:
        tape = self._tape
        key = yield from string_value(tape)
        yield from tape.spaces()
        yield from tape.expect(":")
        yield from tape.spaces()
        if key in _NAME_KEYS and self._name is None:
            self._name = yield from string_value(tape)
            if not self._name:
                raise Malformed
            if self._early is not None:
                self._begin(self._name)
                self._out.arguments("".join(self._early))
        elif key in _ARGUMENT_KEYS and self._early is None:
            yield from self._arguments()
        else:
            yield from raw_value(tape, _ignore, self._closers)

    def _other_member(self) -> Reading[None]:
        """A member behind the arguments, which nobody needs."""
        yield from _string(self._tape, _ignore)
        yield from self._tape.spaces()
        if (yield from self._tape.peek()) == ":":
            self._tape.skip()
            yield from self._tape.spaces()
            yield from raw_value(self._tape, _ignore, self._closers)

    def _arguments(self) -> Reading[None]:
        tape = self._tape
        first = yield from tape.peek()
        if not first:
            raise Malformed
        if first == "{" and self._name is not None:
            self._begin(self._name)
            yield from raw_value(tape, self._out.arguments, self._closers)
            return
        early: list[str] = []
        if first == '"':  # an object that was written as a string
            early.append((yield from string_value(tape)))
        else:
            yield from raw_value(tape, early.append, self._closers)
        if "".join(early).strip() in ("", "null"):
            early = ["{}"]
        if self._name is None:
            self._early = early
        else:
            self._begin(self._name)
            self._out.arguments("".join(early))

    def _begin(self, name: str) -> None:
        self.is_begun = True
        self._tape.forget()
        self._out.begin_call(name)


def json_call(
    tape: Tape, out: MessageWriter, closers: tuple[str, ...] = (), needs_arguments: bool = False
) -> Reading[None]:
    """Read one object that calls a tool. Raises Malformed if it does not.

    ``closers`` are what may end it before its last bracket.
    """
    yield from _Call(tape, out, closers).read(needs_arguments)


def json_calls(
    tape: Tape,
    out: MessageWriter,
    before: str = "",
    closers: tuple[str, ...] = (),
    needs_arguments: bool = False,
) -> Reading[bool]:
    """Read objects, one after the other or in a list. ``before`` was read already.

    What is no call becomes content, and reading ends there; whether there was any call.
    """
    tape.mark(before)
    num_calls = 0
    in_list = False
    while True:
        try:
            yield from tape.spaces()
            if num_calls == 0 and not in_list and (yield from tape.peek()) == "[":
                tape.skip()
                in_list = True
                continue
            yield from json_call(tape, out, closers, needs_arguments)
        except Malformed:
            out.content(tape.recorded())
            return num_calls > 0
        num_calls += 1
        tape.mark()
        yield from tape.spaces()
        character = yield from tape.peek()
        if character == "]" and in_list:
            tape.skip()
            tape.forget()
            out.content((yield from tape.spaces()))
            return True
        if character in (",", ";"):
            tape.skip()
        elif character != "{":
            out.content(tape.recorded())
            return True
