"""Tokens that a request must not get: all but the allowed ones, and the ends of bad words."""

import numpy as np
import numpy.typing as npt

from kunserve.core.request import SamplingParams
from kunserve.core.step import SequenceStart
from kunserve.engine.sampling.distribution import Row


class TokenBans:
    """One request's, with as much of its output as the longest bad word needs."""

    def __init__(self, start: SequenceStart, vocab_size: int) -> None:
        sampling = start.sampling
        self._forbidden: npt.NDArray[np.bool_] | None = None
        if sampling.allowed_token_ids:
            self._forbidden = np.ones(vocab_size, dtype=bool)
            # One by one they would take 8 ms for a vocabulary of 50,000, within a step.
            allowed = np.frombuffer(sampling.allowed_token_ids.to_bytes(), dtype=np.int32)
            self._forbidden[allowed] = False
        tokens = range(vocab_size)
        self._words = [
            word for word in sampling.bad_words if word and all(one in tokens for one in word)
        ]
        self._num_kept = max(map(len, self._words), default=1) - 1
        self._recent: list[int] = []
        if self._num_kept:
            output = start.token_ids[start.num_prompt_tokens :]
            self._recent = list(output[-self._num_kept :])

    @staticmethod
    def are_in(sampling: SamplingParams) -> bool:
        """Whether the request has any."""
        return bool(sampling.allowed_token_ids or sampling.bad_words)

    @property
    def forbidden(self) -> npt.NDArray[np.bool_] | None:
        """[vocab] all but the allowed tokens; None where all are allowed."""
        return self._forbidden

    @property
    def has_words(self) -> bool:
        """Whether there are bad words."""
        return bool(self._words)

    def allow_only(self, row: Row) -> None:
        """Make the logits [vocab] of all but the allowed tokens minus infinity."""
        if self._forbidden is not None:
            row[self._forbidden] = -np.inf

    def forbid_words(self, row: Row) -> None:
        """Make those of tokens that would end a bad word minus infinity."""
        row[self.word_ends()] = -np.inf

    def word_ends(self) -> list[int]:
        """The tokens that would end a bad word now."""
        return [word[-1] for word in self._words if self._is_begun(word)]

    def _is_begun(self, word: tuple[int, ...]) -> bool:
        num_before = len(word) - 1
        return num_before == 0 or tuple(self._recent[-num_before:]) == word[:-1]

    def append(self, token_id: int) -> None:
        """One more output token."""
        if self._num_kept:
            self._recent = [*self._recent, token_id][-self._num_kept :]
