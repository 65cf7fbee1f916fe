"""Stop strings: found wherever tokens are cut, and never shown in part."""

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text at the first place where a stop string is complete.

    "First" means the earliest *end*, and among strings that end there the longest, so the
    result depends on the text alone, never on how it was cut into tokens.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert stops and all(stops), stops
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        """Text not shown yet: the longest tail that may be the start of a stop string."""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add text; returns what may be shown. Nothing more comes after a match."""
        if self.matched is not None or not text:
            return ""
        buffer = self._held + text
        hit = self._find(buffer)
        if hit is not None:
            end, stop = hit
            self.matched = stop
            self._held = ""
            return buffer[: end if self._include else end - len(stop)]
        held = self._undecided(buffer)
        self._held = buffer[len(buffer) - held :] if held else ""
        return buffer[: len(buffer) - held]

    def finish(self) -> str:
        """The text ended without a stop string: what was held back belongs to it."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _undecided(self, buffer: str) -> int:
        """Length of the longest tail of ``buffer`` that starts some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
