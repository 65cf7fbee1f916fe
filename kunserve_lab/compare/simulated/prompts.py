"""Prompts for simulated instances: tokens that say only which prompts begin alike."""

from array import array

from kunserve.core.tokens import TYPE_CODE, TokenIds
from kunserve_lab.workload.workload import WorkloadRequest

ANSWER = 0
"""What simulated instances answer, token after token."""


class Prompts:
    """Makes them one at a time. A run is one number over and over: runs of equal names are alike.

    A prompt without a content, or what its content leaves over, is like no other.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        """By the name of a run: names may be larger than a token."""

    def of(self, request: WorkloadRequest) -> TokenIds:
        """The request's prompt."""
        tokens = array(TYPE_CODE)
        for name, size in request.content or ():
            number = self._numbers.setdefault(name, ANSWER + 1 + len(self._numbers))
            tokens.extend(array(TYPE_CODE, (number,)) * size)
        rest = request.input_tokens - len(tokens)
        if rest > 0:
            tokens.extend(array(TYPE_CODE, (-1 - request.number,)) * rest)
        return TokenIds.from_bytes(tokens[: request.input_tokens].tobytes())
