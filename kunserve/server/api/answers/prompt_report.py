"""What an answer tells of its prompt's tokens: ``echo`` with ``logprobs``, ``prompt_logprobs``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kunserve.core.errors import InvalidRequest
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import TokenLogprobs
from kunserve.server.api.answers.choice import TokenEntry
from kunserve.server.api.answers.logprobs import finite, shown
from kunserve.server.api.schema import GenerationBody
from kunserve.server.api.text import TextCodec

CHARS_PER_NUMBER = 60
"""About what one log-probability takes in ``prompt_logprobs``; in ``logprobs`` it is less."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """One HTTP request's prompts. Made when the client asks for their log-probabilities."""

    codec: TextCodec
    prompts: Sequence[Sequence[int]]
    echoes: Sequence[str]
    """Per prompt: the text that is repeated before the answer."""
    num_choices: int
    """Of each prompt."""
    in_entries: bool
    """Whether the prompt's tokens come in ``logprobs``, before those of the answer."""
    num_listed: int | None
    """Alternatives in ``prompt_logprobs``; None where the client did not ask for the field."""
    num_numbers: int
    """Log-probabilities of all choices together."""

    @property
    def num_chars(self) -> int:
        """About how long the report gets."""
        return CHARS_PER_NUMBER * self.num_numbers

    def entries(self, index: int, scores: Sequence[PromptScores]) -> Iterator[TokenEntry]:
        """The tokens of this choice's prompt; the first has no log-probabilities.

        Their offsets are counted from the end of the prompt's text, so they are not positive.
        """
        prompt, echo = self._prompt(index), self.echoes[index // self.num_choices]
        offsets = self._offsets(prompt, echo)
        for token_id, row, offset in zip(prompt, _rows(scores), offsets, strict=True):
            yield TokenEntry(token_id, row, offset - len(echo))

    def listing(self, index: int, scores: Sequence[PromptScores]) -> msgspec.Raw:
        """``prompt_logprobs`` as vLLM has it: per token a dictionary by token id, or null.

        Each is written at once, because all of them as objects would take hundreds of megabytes.
        """
        assert self.num_listed is not None
        encode = msgspec.json.Encoder().encode
        written = bytearray()
        for token_id, row in zip(self._prompt(index), _rows(scores), strict=True):
            written += b"," if written else b"["
            written += encode(self._list(token_id, row))
        written += b"]"
        return msgspec.Raw(written)

    def _list(self, token_id: int, row: TokenLogprobs | None) -> dict[str, dict[str, Any]] | None:
        """One token of the prompt, and its alternatives."""
        if row is None:
            return None
        listed = {str(token_id): self._listed(token_id, row.logprob, row.rank)}
        for rank, (top_id, logprob) in enumerate(row.top[: self.num_listed], 1):
            listed.setdefault(str(top_id), self._listed(top_id, logprob, rank))
        return listed

    def _listed(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = shown(self.codec.token_bytes.of(token_id))
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    def _prompt(self, index: int) -> Sequence[int]:
        return self.prompts[index // self.num_choices]

    def _offsets(self, prompt: Sequence[int], echo: str) -> list[int]:
        """Where each token begins in the echoed text.

        The tokenizer may have put a token before a text that the client did not write.
        """
        detokenizer = self.codec.detokenizer((), skip_special_tokens=False)
        ends = [0]
        for token_id in prompt:
            ends.append(ends[-1] + len(detokenizer.push(token_id)))
        added = max(0, ends[-1] + len(detokenizer.finish()) - len(echo))
        return [min(max(0, end - added), len(echo)) for end in ends[:-1]]


def _rows(scores: Sequence[PromptScores]) -> Iterator[TokenLogprobs | None]:
    """One for each token of the prompt."""
    yield None
    for piece in scores:
        yield from piece.rows()


def report_of(
    codec: TextCodec,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    echoes: Sequence[str],
    max_numbers: int,
) -> PromptReport | None:
    """The report that the client asks for. Raises InvalidRequest where it would be too long."""
    num_top = body.num_prompt_logprobs
    if num_top is None:
        return None
    num_choices = body.n or 1
    num_numbers = sum(map(len, prompts)) * num_choices * (1 + num_top)
    if num_numbers > max_numbers:
        raise InvalidRequest(
            f"This call asks for {num_numbers} log-probabilities of prompts; at most {max_numbers} "
            "are given. Ask for fewer alternatives, or for fewer prompts per call.",
            "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )
    return PromptReport(
        codec,
        prompts,
        echoes,
        num_choices,
        body.echoes_logprobs,
        body.prompt_logprobs,
        num_numbers,
    )
