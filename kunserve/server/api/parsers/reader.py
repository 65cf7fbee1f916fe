"""One answer being read: text in, pieces of its message out."""

from dataclasses import dataclass

from kunserve.server.api.parsers.message import MessagePiece, MessageWriter
from kunserve.server.api.parsers.reasoning import ReasoningParser
from kunserve.server.api.parsers.tape import Reading, Tape
from kunserve.server.api.parsers.tool_parser import ToolParser, Tools, long_call_id


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How the answers to one request are to be read."""

    tool_parser: ToolParser | None = None
    tools: Tools | None = None
    max_calls: int | None = None
    reasoning: ReasoningParser | None = None
    is_open: bool | None = None
    """Whether answers begin within reasoning; see ``ReasoningParser.is_open_after``."""
    tells_reasoning: bool = True
    """Whether the client wants to see it."""
    calls_finish: bool = True
    """Whether ``finish_reason`` tells of calls. It does not of the one that the client named."""

    @property
    def markers(self) -> tuple[str, ...]:
        """What must be seen in the text, also where it is a special token."""
        marks = () if self.reasoning is None else (self.reasoning.begins, self.reasoning.ends)
        return marks if self.tool_parser is None else (*marks, *self.tool_parser.markers)

    def new_call_id(self) -> str:
        """An id for another call."""
        return long_call_id() if self.tool_parser is None else self.tool_parser.new_call_id()


class MessageReader:
    """Reads one answer, fed as it comes."""

    __slots__ = ("_out", "_reading", "_tape", "form")

    def __init__(self, form: MessageFormat) -> None:
        self.form = form
        self._tape = Tape()
        self._out = MessageWriter(form.max_calls)
        self._reading: Reading[None] | None = self._read()

    @property
    def ends_in_calls(self) -> bool:
        """Whether the answer so far is one that ``finish_reason`` says ``tool_calls`` of."""
        return self.form.calls_finish and self._out.num_calls > 0

    def feed(self, text: str, is_last: bool = False) -> MessagePiece:
        """More of the answer; what became known by it. Nothing may follow the last piece."""
        assert self._reading is not None or not text, text
        if self._reading is not None:
            self._tape.feed(text)
            if is_last:
                self._tape.end()
            self._advance()
        piece = self._out.take()
        if not self.form.tells_reasoning:
            piece.reasoning = ""
        return piece

    def _advance(self) -> None:
        assert self._reading is not None
        try:
            next(self._reading)
        except StopIteration:
            assert self._tape.is_over
            self._reading = None
            self._out.finish()

    def _read(self) -> Reading[None]:
        form, tape, out = self.form, self._tape, self._out
        if form.reasoning is not None:
            yield from form.reasoning.read(tape, out, form.is_open)
        if form.tool_parser is not None:
            yield from form.tool_parser.read(tape, out, form.tools or {})
        else:
            yield from tape.rest(out.content)
