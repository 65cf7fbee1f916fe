"""Which batches a profile measures: drawn over the lengths that serving meets, seeded."""

import math
from dataclasses import dataclass

import numpy as np

REGIONS = ("prefill", "prefix", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch to measure."""

    region: str
    prefixes: tuple[int, ...]
    lengths: tuple[int, ...]
    num_samples: int
    """The last so many chunks sample a token."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """The largest batch to measure."""

    max_batch_tokens: int
    max_context: int
    """Prefix plus chunk."""
    max_decodes: int
    max_total_context: int
    """Of all chunks together: what the KV memory holds."""


def draw_shapes(num_per_region: int, limits: ShapeLimits, seed: int) -> list[BatchShape]:
    """So many batches of each region, in random order (a slow minute then hits no one region).

    Lengths are stratified on a log scale: every region is covered whatever their number.
    """
    generator = np.random.default_rng(seed)
    draw = _Draw(generator, limits, num_per_region)
    shapes: list[BatchShape] = []
    for region in REGIONS:
        shapes += [getattr(draw, region)(i) for i in generator.permutation(num_per_region)]
    order = generator.permutation(len(shapes))
    return [shapes[i] for i in order]


class _Draw:
    """Draws batches; ``i`` of ``n`` places the region's leading quantity in its i-th stratum."""

    def __init__(self, generator: np.random.Generator, limits: ShapeLimits, count: int) -> None:
        self._generator = generator
        self._limits = limits
        self._count = count

    def prefill(self, i: int) -> BatchShape:
        """Whole prompts: one, or several that together are one budget's tokens."""
        total = self._stratum(i, 16, self._limits.max_batch_tokens)
        lengths = self._parts(total, 1 if i % 2 else int(self._generator.integers(2, 9)))
        return BatchShape("prefill", (0,) * len(lengths), lengths, self._samples(len(lengths)))

    def prefix(self, i: int) -> BatchShape:
        """Later chunks of prompts; mostly one to a batch, as in long prompts."""
        total = self._between(16, self._limits.max_batch_tokens)
        lengths = self._parts(total, 1 if i % 3 else int(self._generator.integers(2, 5)))
        longest = (self._limits.max_context - total) // len(lengths)
        prefix = self._stratum(i, 16, longest)
        prefixes = (prefix, *(self._between(16, longest) for _ in lengths[1:]))
        return BatchShape("prefix", prefixes, lengths, self._samples(len(lengths)))

    def decode(self, i: int) -> BatchShape:
        """One token of each of many sequences."""
        num_decodes = self._stratum(i, 1, self._limits.max_decodes)
        prefixes = self._contexts(num_decodes, self._limits.max_total_context)
        return BatchShape("decode", prefixes, (1,) * num_decodes, num_decodes)

    def mixed(self, i: int) -> BatchShape:
        """Prompts, some of them with a prefix, and decodes behind them."""
        num_decodes = self._between(1, self._limits.max_decodes)
        left = self._limits.max_batch_tokens - num_decodes
        lengths = self._parts(self._stratum(i, 16, left), int(self._generator.integers(1, 4)))
        room = self._limits.max_total_context // 2
        longest = min(self._limits.max_context - max(lengths), room // len(lengths))
        prefixes = tuple(
            self._between(16, longest) if self._generator.random() < 0.5 else 0 for _ in lengths
        )
        contexts = self._contexts(num_decodes, room - sum(lengths))
        num_samples = num_decodes + int(self._generator.integers(0, len(lengths) + 1))
        return BatchShape("mixed", prefixes + contexts, lengths + (1,) * num_decodes, num_samples)

    def _contexts(self, count: int, room: int) -> tuple[int, ...]:
        """Context lengths around one that is drawn: sequences of a batch are of a kind."""
        longest = max(1, min(self._limits.max_context - 1, room // count - 1))
        middle = self._between(min(32, longest), longest)
        spread = self._generator.uniform(0.5, 1.5, count)
        return tuple(int(x) for x in np.clip(middle * spread, 1, longest))

    def _samples(self, num_chunks: int) -> int:
        return int(self._generator.integers(0, num_chunks + 1))

    def _parts(self, total: int, count: int) -> tuple[int, ...]:
        count = min(count, total)
        cuts = np.sort(self._generator.choice(np.arange(1, total), count - 1, replace=False))
        return tuple(int(x) for x in np.diff([0, *cuts, total]))

    def _stratum(self, i: int, low: int, high: int) -> int:
        return _on_log_scale((i + self._generator.random()) / self._count, low, high)

    def _between(self, low: int, high: int) -> int:
        return _on_log_scale(self._generator.random(), low, high)


def _on_log_scale(place: float, low: int, high: int) -> int:
    low = max(1, low)
    high = max(low, high)
    return round(low * math.pow(high / low, place))
