"""The parts of a chat message, written by a parser piece by piece."""

from dataclasses import dataclass, field

from kunserve.server.api.parsers.escapes import WholePairs


@dataclass(slots=True)
class CallPiece:
    """A piece of one call of a tool."""

    index: int
    """Which call of the message, from 0."""
    name: str | None
    """In the first piece of a call only."""
    arguments: str
    """More of the arguments' JSON."""


@dataclass(slots=True)
class MessagePiece:
    """What became known of a message since it was last asked."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    """In order, with at most one piece for each call."""


class _Prose:
    """Text without the white space between it and markers.

    Between two texts with markers between them some stays: that before the markers, if any.
    """

    __slots__ = ("_drops", "_is_begun", "_met", "_spaces", "pieces")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._spaces: list[str] = []
        """White space that may turn out to be at the end."""
        self._is_begun = False
        self._met = False
        """Whether a marker came after the last text."""
        self._drops = False
        """Whether white space that comes next does not count."""

    def write(self, text: str) -> None:
        if self._drops:
            text = text.lstrip()
        if not text:
            return
        words = text.rstrip()
        if words:
            self.pieces += self._spaces
            self.pieces.append(words)
            self._spaces = []
            self._is_begun, self._met, self._drops = True, False, False
        if len(words) < len(text):
            self._spaces.append(text[len(words) :])

    def meet_marker(self) -> None:
        if not self._is_begun:
            self._spaces = []
        self._met = True
        self._drops = bool(self._spaces) or not self._is_begun

    def finish(self) -> None:
        if not self._met:
            self.pieces += self._spaces
        self._spaces = []

    def take(self) -> str:
        taken, self.pieces = "".join(self.pieces), []
        return taken


class MessageWriter:
    """Collects what a parser finds.

    White space beside calls, and beside the marks of reasoning, is no part of the message.
    """

    __slots__ = (
        "_arguments",
        "_calls",
        "_content",
        "_dropping",
        "_escapes",
        "_max_calls",
        "_reasoning",
        "num_calls",
    )

    def __init__(self, max_calls: int | None = None) -> None:
        """Calls beyond ``max_calls`` are left out."""
        self._reasoning = _Prose()
        self._content = _Prose()
        self._calls: list[CallPiece] = []
        self._arguments: list[str] = []
        """Of the last of them; they are joined once, because they may be many."""
        self._escapes = WholePairs()
        """In these."""
        self._max_calls = max_calls
        self._dropping = False
        self.num_calls = 0

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        self._reasoning.write(text)

    def begin_reasoning(self) -> None:
        """A mark says that reasoning begins."""
        self._content.meet_marker()
        self._reasoning.meet_marker()

    def end_reasoning(self) -> None:
        """A mark says that it is over."""
        self._reasoning.meet_marker()
        self._content.meet_marker()

    def content(self, text: str) -> None:
        """More content."""
        self._content.write(text)

    def begin_call(self, name: str) -> None:
        """Another call."""
        self._content.meet_marker()
        self._end_arguments()
        self._dropping = self.num_calls == self._max_calls
        if not self._dropping:
            self._calls.append(CallPiece(self.num_calls, name, ""))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that was begun last."""
        if not self._dropping and text:
            self._arguments.append(text)

    def _join_arguments(self) -> None:
        if self._arguments:
            text, self._arguments = "".join(self._arguments), []
            self._tell_arguments(self._escapes.write(text))

    def _end_arguments(self) -> None:
        self._join_arguments()
        self._tell_arguments(self._escapes.finish())

    def _tell_arguments(self, text: str) -> None:
        if not text:
            return
        if not self._calls:
            self._calls.append(CallPiece(self.num_calls - 1, None, ""))
        self._calls[-1].arguments += text

    def finish(self) -> None:
        """The text is over: white space at its end is what it seems."""
        self._end_arguments()
        self._reasoning.finish()
        self._content.finish()

    def take(self) -> MessagePiece:
        """Everything since the last call."""
        self._join_arguments()
        piece = MessagePiece(self._reasoning.take(), self._content.take(), self._calls)
        self._calls = []
        return piece
