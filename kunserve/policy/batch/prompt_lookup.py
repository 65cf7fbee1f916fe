"""What may come next, by prompt lookup: what followed the last tokens where they stood before."""

from array import array
from collections.abc import Iterable

MOST_PLACES = 64
"""Earlier places of the last tokens that are looked at, latest first."""


class PromptLookup:
    """One text, and where each run of ``shortest`` tokens stands in it. It only grows."""

    def __init__(self, shortest: int, longest: int) -> None:
        """A guess follows ``shortest`` equal tokens at least; the place with most is taken, up to
        ``longest``.
        """
        assert 1 <= shortest <= longest, (shortest, longest)
        self._shortest = shortest
        self._longest = longest
        self._tokens = array("i")
        self._last_end: dict[tuple[int, ...], int] = {}
        """Tokens up to the end of each run's last place."""
        self._previous_end = array("i", [0])
        """The same of the place before, for the run that ends after so many tokens; 0 for none."""

    def extend(self, tokens: Iterable[int]) -> None:
        """These come next in the text."""
        text, last_end, shortest = self._tokens, self._last_end, self._shortest
        for token in tokens:
            text.append(token)
            end = len(text)
            previous = 0
            if end >= shortest:
                run = tuple(text[end - shortest :])
                previous = last_end.get(run, 0)
                last_end[run] = end
            self._previous_end.append(previous)

    def find(self, most: int) -> tuple[int, ...]:
        """Up to ``most`` tokens that may follow the text; none if its end stands nowhere else.

        Where the place is so near that its text runs into the end, it is taken to go on so.
        """
        text, end = self._tokens, len(self._tokens)
        if most <= 0 or end < self._shortest:
            return ()
        best = best_length = 0
        place = self._previous_end[end]
        for _ in range(MOST_PLACES):
            if not place:
                break
            length = self._num_equal(place, end)
            if length > best_length:
                best, best_length = place, length
                if length == self._longest:
                    break
            place = self._previous_end[place]
        if not best:
            return ()
        period = end - best
        return tuple(text[best + i % period] for i in range(most))

    def _num_equal(self, place: int, end: int) -> int:
        """How many tokens before ``place`` are those before ``end``, as far as it matters."""
        text, length = self._tokens, self._shortest
        most = min(self._longest, place)
        while length < most and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        return length
