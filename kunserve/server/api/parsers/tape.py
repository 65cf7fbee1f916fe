"""Text that grows while it is read.

A parser is a generator over a ``Tape``. It yields where it needs more text than there is, and is
resumed when more has come. So it reads like a parser of whole texts, what it says cannot depend on
how the text was cut into pieces, and no character is looked at more than a few times.
"""

import re
from collections.abc import Callable, Collection, Generator
from functools import cache
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Yields while it waits for text."""
Sink: TypeAlias = Callable[[str], None]
"""Takes text as it comes."""

_SPACE = re.compile(r"\s*")
_ANYTHING = re.compile(r"[\s\S]+")


class Malformed(Exception):
    """The text is not what the parser thought that it would be."""


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    # The longest first, because one marker may begin with another.
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def beginning_at_end(text: str, markers: Collection[str], start: int = 0) -> int:
    """How many of the last characters of ``text[start:]`` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        tail = text[len(text) - length :]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


class Tape:
    """The text so far, from where the parser stands. All primitives are generators."""

    __slots__ = ("_at", "_ended", "_marked_at", "_recorded", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._marked_at: int | None = None
        self._recorded: list[str] = []

    @property
    def num_held(self) -> int:
        """Characters that were fed and not yet read."""
        return len(self._text) - self._at

    @property
    def is_over(self) -> bool:
        """Whether all was read, and no more will come."""
        return self._ended and self._at == len(self._text)

    def feed(self, text: str) -> None:
        """More text. Called before the parser is resumed."""
        if self._marked_at is not None:
            self._recorded.append(self._text[self._marked_at : self._at])
            self._marked_at = 0
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    # What was read since a mark, for a parser that may have been wrong

    def mark(self, before: str = "") -> None:
        """Record what is read from here on; ``before`` was read already."""
        self._marked_at = self._at
        self._recorded = [before]

    def recorded(self) -> str:
        """All that was read since the mark, which is forgotten."""
        assert self._marked_at is not None
        text = "".join(self._recorded) + self._text[self._marked_at : self._at]
        self.forget()
        return text

    def leftover(self) -> str:
        """The same for what stands behind the complete part of a call; empty if the text is over,
        because then it is the beginning of what would have been more of the call.
        """
        text = self.recorded()
        return "" if self.is_over else text

    def forget(self) -> None:
        """Record no more."""
        self._marked_at = None
        self._recorded = []

    # Reading

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; empty at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> None:
        """Read the character that was peeked."""
        self._at += 1

    def expect(self, character: str) -> Reading[None]:
        """Read this character. Raises Malformed if it is another."""
        if (yield from self.peek()) != character:
            raise Malformed(character)
        self._at += 1

    def spaces(self) -> Reading[str]:
        """Read white space, as much as there is."""
        pieces = []
        while (yield from self.peek()).isspace():
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            # Some characters are space to one library and not to the other.
            end = max(match.end(), self._at + 1)
            pieces.append(self._text[self._at : end])
            self._at = end
        return "".join(pieces)

    def take_while(self, pattern: re.Pattern[str], sink: Sink) -> Reading[str]:
        """Read as long as characters match ``pattern`` (of the form ``[...]+``); the next one."""
        while True:
            character = yield from self.peek()
            match = pattern.match(self._text, self._at) if character else None
            if match is None:
                return character
            self._at = match.end()
            sink(match[0])

    def rest(self, sink: Sink) -> Reading[None]:
        """Read to the end."""
        yield from self.take_while(_ANYTHING, sink)

    def stands_at(self, markers: Collection[str]) -> Reading[str]:
        """The longest marker that comes next, which stays unread; empty if none does."""
        while True:
            found = [one for one in markers if self._text.startswith(one, self._at)]
            longest = max(found, key=len, default="")
            if self._ended or not self._is_half(markers):
                return longest
            yield

    def accept(self, *markers: str) -> Reading[str]:
        """Read the marker that comes next; empty, and nothing is read, if none does.

        Where the text breaks off within a marker, what there is of it is read.
        """
        found = yield from self.stands_at(markers)
        self._at += len(found)
        if not found and self._ended and self._is_half(markers):
            self._at = len(self._text)
        return found

    def _is_half(self, markers: Collection[str]) -> bool:
        """Whether all that is left is the beginning of a marker."""
        rest = len(self._text) - self._at
        return any(len(m) > rest and m.startswith(self._text[self._at :]) for m in markers)

    def until(self, markers: tuple[str, ...], sink: Sink) -> Reading[str]:
        """Read up to the first marker, and it too; the marker, or empty at the end.

        What comes before it goes to ``sink``.
        """
        pattern = _any_of(markers)
        while True:
            match = pattern.search(self._text, self._at)
            # A longer marker may begin where a shorter one is complete.
            if match is not None and not self._may_grow(match.start(), match[0], markers):
                sink(self._text[self._at : match.start()])
                self._at = match.end()
                return match[0]
            end = len(self._text) if match is None else match.start()
            if match is None and not self._ended:
                end -= beginning_at_end(self._text, markers, self._at)
            sink(self._text[self._at : end])
            self._at = end
            if self._ended:
                return ""
            yield

    def _may_grow(self, start: int, found: str, markers: tuple[str, ...]) -> bool:
        rest = self._text[start : start + max(map(len, markers))]
        return not self._ended and any(
            len(one) > len(rest) and one.startswith(rest) for one in markers
        )
