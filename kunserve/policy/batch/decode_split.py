"""Into how many microbatches a pipeline's decodes go, by what rounds of both ways took.

A round gives every decode a token. Decodes are *parted* into a microbatch for each stage, so that
stages compute side by side; then every microbatch reads all weights. Or they are *joined* in one:
stages compute in turn, and a round reads the weights once. Where stages share their memory, as
instances on one host's CPUs do, and one of them reads as fast as memory gives, side by side is no
faster for few decodes, because reading is all of their time. For many decodes it is.

How many are few depends on model, machine and neighbours. So both ways are timed, for every number
of decodes by itself, and the faster one is taken. Now and then the other one gets some rounds.
"""

from collections import deque
from dataclasses import dataclass, field
from math import log2
from statistics import median

KEPT = 5
"""Last rounds of each way that count."""
ENOUGH = 3
"""Rounds of a way that tell how long it takes."""
BETTER = 0.95
"""Joined rounds must take this share of parted ones at most. Whenever a prompt has been computed
decodes have to meet again, and until then some wait."""
AGAIN_S = 30.0
"""After so long it is looked again whether the other way is faster now."""
MOST_LOST = 2 * ENOUGH
"""A try ends after so many microbatches that prompts came beside."""
CALM = 20.0
"""No other way is tried for so many times the time that the last try took."""


@dataclass(slots=True)
class _Way:
    """What rounds of one way took lately, at about one number of decodes."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    seen_s: float = 0.0

    def is_known(self, now_s: float) -> bool:
        """Whether enough is known, and lately."""
        return len(self.seconds) >= ENOUGH and now_s < self.seen_s + AGAIN_S


@dataclass(slots=True)
class _Try:
    """Some rounds of the way that is not taken."""

    size: int
    parts: int
    num_left: int = ENOUGH
    num_lost: int = 0
    """Microbatches that a prompt came beside."""
    spent_s: float = 0.0


class DecodeSplit:
    """What a group has found out about its rounds."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._ways: dict[tuple[int, int], _Way] = {}
        """By size, see ``_size_of``, and number of microbatches."""
        self._try: _Try | None = None
        self._calm_until_s = 0.0
        self._num_parted = 0
        """Microbatches of parted rounds in a row. The first ones find the pipeline empty."""

    def parts(self, num_decodes: int, now_s: float) -> int:
        """How many microbatches may be in flight, where nothing but decodes runs."""
        if num_decodes == 1:
            return 1
        size = _size_of(num_decodes)
        if self._try is not None and self._try.size != size:
            self._end_try(now_s)
        if self._try is None:
            best = self._best(size)
            other = 1 if best > 1 else self._num_stages
            is_calm = now_s < self._calm_until_s
            if is_calm or len(self._way(size, best).seconds) < ENOUGH:
                return best
            if self._way(size, other).is_known(now_s):
                return best
            self._try = _Try(size, other)
        return self._try.parts

    def note(
        self, parts: int, num_decodes: int, seconds: float, now_s: float, *, is_alone: bool
    ) -> None:
        """A microbatch of decodes came back so long after it was planned.

        ``num_decodes`` are all of the group's, in ``parts`` microbatches. ``is_alone``: nothing
        but decodes was planned meanwhile; otherwise the time says nothing.
        """
        if num_decodes == 1:
            return
        size = _size_of(num_decodes)
        self._num_parted = self._num_parted + 1 if is_alone and parts > 1 else 0
        counts = is_alone and not 0 < self._num_parted <= self._num_stages
        if counts:
            way = self._way(size, parts)
            way.seconds.append(seconds)
            way.seen_s = now_s
        tried = self._try
        if tried is None or (size, parts) != (tried.size, tried.parts):
            return
        tried.spent_s += seconds / parts
        tried.num_left -= counts
        tried.num_lost += not is_alone
        if tried.num_left == 0 or tried.num_lost > MOST_LOST:
            self._end_try(now_s)

    def _end_try(self, now_s: float) -> None:
        assert self._try is not None
        self._calm_until_s = now_s + CALM * self._try.spent_s
        self._try = None

    def _best(self, size: int) -> int:
        """The faster way, as far as is known."""
        joined, parted = self._way(size, 1).seconds, self._way(size, self._num_stages).seconds
        if min(len(joined), len(parted)) < ENOUGH:
            return self._num_stages
        return 1 if median(joined) <= BETTER * median(parted) else self._num_stages

    def _way(self, size: int, parts: int) -> _Way:
        return self._ways.setdefault((size, parts), _Way())


def _size_of(num_decodes: int) -> int:
    """Numbers that differ by less than a fifth or so are of one size."""
    return round(2.0 * log2(num_decodes))
