"""Log-probabilities of a prompt's tokens, packed: four bytes a number in memory and on the wire."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kunserve.core.ids import RequestId
from kunserve.core.request import TokenLogprobs
from kunserve.core.tokens import TokenIds

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Consecutive scores of one request.

    Score ``i`` is the log-probability of prompt token ``i + 1``, given tokens 0 to ``i``. So a
    prompt has one score less than tokens.
    """

    request_id: RequestId
    first: int
    """Index of the first score."""
    num_top: int
    """Alternatives of each."""
    ranks: TokenIds
    """[scores] 1 where the prompt's token was the likeliest."""
    top_ids: TokenIds
    """[scores * num_top] the likeliest tokens, likeliest first."""
    logprobs: bytes
    """[scores * (1 + num_top)] float32: the prompt's token, then the likeliest ones."""

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def end(self) -> int:
        """Index after the last score."""
        return self.first + len(self.ranks)

    def since(self, index: int) -> "PromptScores":
        """The scores from ``index`` on, which is not before the first."""
        skipped, num_top = index - self.first, self.num_top
        assert 0 <= skipped <= len(self), (index, self.first, self.end)
        if skipped == 0:
            return self
        return replace(
            self,
            first=index,
            ranks=self.ranks[skipped:],
            top_ids=self.top_ids[skipped * num_top :],
            logprobs=self.logprobs[skipped * (1 + num_top) * _FLOAT_BYTES :],
        )

    def rows(self) -> Iterator[TokenLogprobs]:
        """Each score as generated tokens have it."""
        numbers: array[float] = array("f", self.logprobs)
        num_top, width = self.num_top, 1 + self.num_top
        for row, rank in enumerate(self.ranks):
            ids = self.top_ids[row * num_top : (row + 1) * num_top]
            values = numbers[row * width : (row + 1) * width]
            yield TokenLogprobs(values[0], rank, tuple(zip(ids, values[1:], strict=True)))


def pack_scores(
    request_id: RequestId, first: int, num_top: int, rows: Sequence[TokenLogprobs]
) -> PromptScores:
    """Scores from ``first`` on, each with ``num_top`` alternatives."""
    numbers: array[float] = array("f")
    for row in rows:
        assert len(row.top) == num_top, (len(row.top), num_top)
        numbers.append(row.logprob)
        numbers.extend(logprob for _, logprob in row.top)
    return PromptScores(
        request_id,
        first,
        num_top,
        TokenIds(row.rank for row in rows),
        TokenIds(token_id for row in rows for token_id, _ in row.top),
        numbers.tobytes(),
    )
