"""What ``LLM.generate`` gives back, in vLLM's shape."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import TokenLogprobs
from kunserve.server.api.answers.choice import Choice, Delta
from kunserve.server.api.answers.detokenize import TokenBytes


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token that was likely at one position."""

    logprob: float
    rank: int | None = None
    """1 is the likeliest of all."""
    decoded_token: str | None = None


TokenAlternatives: TypeAlias = dict[int, Logprob]
"""By token id: the position's own token first, then the likeliest ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    """Also the token that ended it, which has no text."""
    cumulative_logprob: float | None
    """None unless ``logprobs`` were asked for."""
    logprobs: list[TokenAlternatives] | None
    finish_reason: str | None = None
    """``stop``, ``length``, or ``error`` where the engine gave up on this request."""
    stop_reason: int | str | None = None
    """The stop string or token that ended it; None for the model's own end."""

    def finished(self) -> bool:
        """Whether it is over, as it always is here."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One prompt with its answers."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as tokens."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenAlternatives | None] | None
    """One for each token of the prompt; the first has none."""
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    """Of the prompt, those whose KV was found."""


class Reporter:
    """Turns what choices produced into outputs."""

    def __init__(self, token_bytes: TokenBytes, detokenize: bool) -> None:
        self._token_bytes = token_bytes
        self._detokenize = detokenize

    def answer(self, index: int, choice: Choice, delta: Delta) -> CompletionOutput:
        """One answer, of which ``delta`` is everything."""
        num_top = choice.request.sampling.num_logprobs
        logprobs = total = None
        if num_top is not None:
            rows = [(entry.token_id, entry.logprobs) for entry in delta.entries]
            logprobs = [self._told(one, row, num_top) for one, row in rows if row is not None]
            total = sum(row.logprob for _, row in rows if row is not None)
        reason = choice.finish_reason
        return CompletionOutput(
            index=index,
            text=delta.text if self._detokenize else "",
            token_ids=delta.token_ids,
            cumulative_logprob=total,
            logprobs=logprobs,
            finish_reason=None if reason is None else reason.value,
            stop_reason=choice.stop_reason,
        )

    def prompt(
        self, token_ids: Sequence[int], scores: Sequence[PromptScores], num_top: int
    ) -> list[TokenAlternatives | None]:
        """``prompt_logprobs``."""
        rows: Iterator[TokenLogprobs] = (row for piece in scores for row in piece.rows())
        told = [self._told(one, row, num_top) for one, row in zip(token_ids[1:], rows, strict=True)]
        return [None, *told]

    def _told(self, token_id: int, row: TokenLogprobs, num_top: int) -> TokenAlternatives:
        told = {token_id: self._one(token_id, row.logprob, row.rank)}
        for rank, (other, logprob) in enumerate(row.top[:num_top], 1):
            told.setdefault(other, self._one(other, logprob, rank))
        return told

    def _one(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = None
        if self._detokenize:
            text = self._token_bytes.of(token_id).decode(errors="replace")
        return Logprob(logprob, rank, text)
