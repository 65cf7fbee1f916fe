"""Stop strings: found wherever tokens are cut, and never shown in part."""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, prepared once for all its choices.

    ``fallbacks[i][k - 1]`` is the length of the longest proper beginning of string ``i`` that its
    first ``k`` characters end with (Knuth, Morris and Pratt). So a character of output costs a
    few steps per stop string, however long the strings are.
    """

    __slots__ = ("fallbacks", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        assert strings and all(strings), strings
        self.strings = tuple(strings)
        self.fallbacks = tuple(map(_fallbacks, self.strings))


def _fallbacks(string: str) -> list[int]:
    lengths = [0]
    for character in string[1:]:
        length = lengths[-1]
        while length and string[length] != character:
            length = lengths[length - 1]
        lengths.append(length + (string[length] == character))
    return lengths


class StopMatcher:
    """Cuts a stream of text at the first place where a stop string is complete.

    "First" means the earliest *end*, and among strings that end there the longest, so the
    result depends on the text alone, never on how it was cut into tokens.
    """

    __slots__ = ("_held", "_include", "_progress", "_stops", "matched")

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._progress = [0] * len(stops.strings)
        """Per stop string: how much of its beginning the text so far ends with."""
        self._held = ""
        """Text not shown yet: the longest tail that may be the start of a stop string."""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add text; returns what may be shown. Nothing more comes after a match."""
        if self.matched is not None or not text:
            return ""
        buffer = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            stop = self._step(character)
            if stop is not None:
                self.matched = stop
                self._held = ""
                return buffer[: end if self._include else end - len(stop)]
        held = max(self._progress)
        self._held = buffer[len(buffer) - held :] if held else ""
        return buffer[: len(buffer) - held]

    def finish(self) -> str:
        """The text ended without a stop string: what was held back belongs to it."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Take one character; the longest stop string that it completes."""
        complete: str | None = None
        progress = self._progress
        stops = self._stops
        for number, string in enumerate(stops.strings):
            length = progress[number]
            while length and string[length] != character:
                length = stops.fallbacks[number][length - 1]
            if string[length] == character:
                length += 1
                if length == len(string):
                    if complete is None or length > len(complete):
                        complete = string
                    length = 0
            progress[number] = length
        return complete
