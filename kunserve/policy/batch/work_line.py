"""All queued prompt tokens as one line in order of arrival, with the cost up to every place."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch.batch_form import PromptWork
from kunserve.policy.batch.cost import Array, own_cost, resume_cost, tokens_within_each

Positions = npt.NDArray[np.int64]


class WorkLine:
    """Prompts laid end to end. A position counts tokens from the line's beginning.

    Costs are Eq. 1 less what a batch shares. Cutting inside a prompt makes its rest a chunk of
    its own, which costs ``resume_costs`` more.
    """

    def __init__(self, prompts: Sequence[PromptWork], cost: CostCoefficients) -> None:
        table = np.array(prompts, dtype=np.float64).reshape(-1, 2)
        self._prefixes, self._lengths = table[:, 0], table[:, 1]
        self._cost = cost
        self._starts = np.zeros(len(table) + 1, dtype=np.int64)
        np.cumsum(self._lengths.astype(np.int64), out=self._starts[1:])
        whole = self._inside(np.arange(len(table)), self._lengths) + cost.sample_s
        self._start_s = np.zeros(len(table) + 1)
        np.cumsum(whole, out=self._start_s[1:])

    @property
    def num_tokens(self) -> int:
        """The line's length."""
        return int(self._starts[-1])

    @property
    def total_s(self) -> float:
        """Cost of the line in one piece."""
        return float(self._start_s[-1])

    def positions(self, seconds: Array) -> Positions:
        """Where the cost from the beginning reaches each of ``seconds``, to the nearest token."""
        index = self._index(self._start_s, seconds)
        left_s = seconds - self._start_s[index]
        tokens = np.rint(tokens_within_each(self._cost, self._prefixes[index], left_s))
        tokens = np.minimum(tokens, self._lengths[index])
        return np.clip(self._starts[index] + tokens.astype(np.int64), 0, self.num_tokens)

    def resume_costs(self, positions: Positions) -> Array:
        """What it costs to begin a microbatch at each position, beyond the line's own cost."""
        index, inside = self._locate(positions)
        again = resume_cost(self._cost, self._prefixes[index] + inside)
        return np.where(inside > 0, again, 0.0)

    def costs(self, bounds: Positions) -> Array:
        """Cost of each part between neighbouring bounds."""
        index, inside = self._locate(bounds)
        up_to = self._start_s[index] + np.where(inside > 0, self._inside(index, inside), 0.0)
        up_to[bounds >= self.num_tokens] = self.total_s
        return np.diff(up_to) + self.resume_costs(bounds[:-1])

    def num_chunks(self, bounds: Positions) -> Positions:
        """Prompts that each part between neighbouring bounds touches."""
        first = np.searchsorted(self._starts, bounds[:-1], side="right")
        return np.searchsorted(self._starts, bounds[1:], side="left") - first + 1

    def end_of_chunks(self, position: int, num_chunks: int) -> int:
        """Where so many chunks from a position end."""
        index = bisect_right(self._starts, position) - 1 + num_chunks
        return int(self._starts[min(index, len(self._starts) - 1)])

    def _inside(self, index: Positions, tokens: Array) -> Array:
        """Cost of the first tokens of a prompt, as one chunk."""
        return own_cost(self._cost, self._prefixes[index], tokens)

    def _locate(self, positions: Positions) -> tuple[Positions, Array]:
        """(prompt, tokens of it before) of each position."""
        index = self._index(self._starts, positions)
        return index, (positions - self._starts[index]).astype(np.float64)

    def _index(self, edges: npt.NDArray[np.generic], values: npt.NDArray[np.generic]) -> Positions:
        found = np.searchsorted(edges, values, side="right") - 1
        return np.clip(found, 0, len(self._lengths) - 1)
