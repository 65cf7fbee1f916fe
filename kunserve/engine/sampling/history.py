"""The tokens that a request's penalties look at."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """Distinct tokens of prompt and output, and how often each was output."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        assert len(token_ids) >= num_prompt_tokens, (len(token_ids), num_prompt_tokens)
        self.num_output = 0
        distinct = np.unique(np.asarray(token_ids[:num_prompt_tokens], dtype=np.int64))
        self._size = len(distinct)
        self._ids = np.zeros(self._size + 64, dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(self._size + 64, dtype=np.float32)
        self._index = {token: index for index, token in enumerate(distinct.tolist())}
        for token in token_ids[num_prompt_tokens:]:
            self.append(token)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[distinct] every token seen, prompt or output."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """[distinct] occurrences of each of ``ids`` in the output."""
        return self._counts[: self._size]

    def append(self, token_id: int) -> None:
        """One more output token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1
        self.num_output += 1
