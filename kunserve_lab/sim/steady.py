"""What an instance can do in a steady state: found from step times and sizes, without a simulation.

An instance holds `n` requests that decode, and a step brings `q` tokens of prompts on average. A
step then takes `T(n, q)` on average. Prompts come in lumps: while less than a whole prompt comes in
a step, some steps compute a prompt (or what the token budget has of it) and others none. In a group
of `d` stages each instance runs `d` microbatches, each over `1/d` of the layers, where it ran one
step alone. Bubbles of pipelines and the links are left out.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.workload.workload import Lengths

Array = npt.NDArray[np.float64]

NUM_CLASSES = 6
"""Classes of equally many requests, by their output length."""
NUM_PROMPTS = 100
"""Prompt lengths that stand for all: each for one percent of the requests."""
_NOBODY = RequestId("nobody")


@dataclass(frozen=True, slots=True)
class RequestMix:
    """The lengths of many requests, as a few classes of equal frequency."""

    input_tokens: Array
    """Mean of each class."""
    output_tokens: Array
    """Mean of each class, in rising order."""
    prompt_tokens: Array
    """Lengths of prompts, in rising order: each stands for equally many requests."""

    @property
    def mean_input_tokens(self) -> float:
        """Of a request's prompt."""
        return float(self.input_tokens.mean())

    @property
    def mean_output_tokens(self) -> float:
        """Of a request's answer."""
        return float(self.output_tokens.mean())

    @property
    def context_tokens(self) -> float:
        """KV of a decoding request, on average over time: requests that stay longer count more."""
        midway = self.input_tokens + self.output_tokens / 2
        return float((midway * self.output_tokens).sum() / self.output_tokens.sum())


def mix_of(lengths: Lengths) -> RequestMix:
    """The mix that these lengths make. There must be at least one pair."""
    inputs = np.array(lengths.input_tokens, dtype=np.float64)
    outputs = np.array(lengths.output_tokens, dtype=np.float64)
    order = np.lexsort((inputs, outputs))
    return RequestMix(
        _means(inputs[order], NUM_CLASSES),
        _means(outputs[order], NUM_CLASSES),
        _means(np.sort(inputs), NUM_PROMPTS),
    )


def _means(ordered: Array, num_parts: int) -> Array:
    """The means of as many parts of equal size. A value at a border counts in both, by shares."""
    cumulative = np.concatenate(([0.0], np.cumsum(ordered)))
    borders = np.linspace(0.0, len(ordered), num_parts + 1)
    sums = np.interp(borders, np.arange(len(ordered) + 1), cumulative)
    return np.diff(sums) * num_parts / len(ordered)


class StepTable:
    """`T(n, q)` for groups of each depth, read off a grid between whose points it is linear."""

    def __init__(
        self,
        profile: InstanceProfile,
        mix: RequestMix,
        depths: tuple[int, ...],
        max_tokens: int,
        max_seqs: int,
    ) -> None:
        """``max_tokens`` of a step, and ``max_seqs`` that an instance may run."""
        self.max_tokens = float(max_tokens)
        self.max_seqs = float(max(1, min(max_seqs, max_tokens - 1)))
        self._nums = self.max_seqs * _GRID
        self._tokens = self.max_tokens * _GRID
        self._profile = profile
        self._decode = Chunk(_NOBODY, int(mix.context_tokens), 1, True)
        self._prompt_tokens = int(mix.mean_input_tokens)
        self._seconds = np.array([[self._row(round(num), d) for num in self._nums] for d in depths])

    def _row(self, num: int, depth: int) -> Array:
        """`T` of so many decodes over all numbers of prompt tokens."""
        lump = max(1, min(self._prompt_tokens, int(self.max_tokens) - num))
        alone_s, lump_s = self._exactly_s(num, 0, depth), self._exactly_s(num, lump, depth)
        return np.array(
            [
                alone_s + tokens / lump * (lump_s - alone_s)
                if tokens < lump
                else self._exactly_s(num, round(tokens), depth)
                for tokens in self._tokens
            ]
        )

    def _exactly_s(self, num: int, tokens: int, depth: int) -> float:
        """Seconds from one token of a request to its next, over all microbatches."""
        chunks = [self._decode] * max(1, num)
        if tokens >= 2:
            chunks.append(Chunk(_NOBODY, self._prompt_tokens // 2, tokens, False))
        layers = self._profile.spec.num_layers / depth
        last_s = _stage_s(self._profile, chunks, layers, True)
        if depth == 1:
            return last_s
        return (depth - 1) * _stage_s(self._profile, chunks, layers, False) + last_s

    def seconds(self, level: npt.NDArray[np.int64], num: Array, tokens: Array) -> Array:
        """Between two tokens of a request, for groups of these levels of depth, elementwise."""
        i, x = _place(self._nums, num)
        j, y = _place(self._tokens, tokens)
        table = self._seconds
        low, high = table[level, i, j], table[level, i + 1, j]
        low = low + y * (table[level, i, j + 1] - low)
        high = high + y * (table[level, i + 1, j + 1] - high)
        result: Array = low + x * (high - low)
        return result


_GRID = np.concatenate(([0.0], np.geomspace(1 / 64, 1.0, 13)))
"""Shares of the most. Closer where few tokens are computed, because reading weights bends it."""


def _place(points: Array, values: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """The interval of each value from 0 on, and where in it the value lies, from 0 to 1."""
    index = np.minimum(np.searchsorted(points, values, side="right") - 1, len(points) - 2)
    share = (values - points[index]) / (points[index + 1] - points[index])
    return index, np.minimum(share, 1.0)


def _stage_s(profile: InstanceProfile, chunks: list[Chunk], layers: float, is_last: bool) -> float:
    """For a mean number of layers: stages may hold one more or less than others."""
    low = max(1, int(layers))
    low_s = profile.times.stage_s(chunks, low, is_last)
    if low == layers:
        return low_s
    return low_s + (layers - low) * (profile.times.stage_s(chunks, low + 1, is_last) - low_s)
