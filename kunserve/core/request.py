"""What a user asks for, and how it ends."""

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kunserve.core.ids import RequestId
from kunserve.core.tokens import NO_TOKENS, TokenIds


class FinishReason(enum.StrEnum):
    """Why a request produced its last token. The values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


StructureKind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Tokens between which a model may think before the form of its output begins."""

    opens: int
    closes: int
    is_open: bool
    """Whether the output begins between them. Else it may begin with ``opens``."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form that the output must have."""

    kind: StructureKind
    text: str
    """The schema in JSON, the regular expression, a JSON list of choices, or the grammar; empty
    for ``json_object``, which is any JSON object."""
    after: ReasoningMarks | None = None
    """The form holds behind reasoning, if there is some; None: from the first token on."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Stop *strings* are the front's business and are not here."""

    max_tokens: int
    """Output tokens at most, at least 1."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    """Token ``p`` of a request is drawn from (seed, p) alone, so a re-run draws the same."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: TokenIds = NO_TOKENS
    """No other token is ever chosen; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the output never contains: the last of a run is forbidden after the
    others."""
    structured: StructuredOutput | None = None
    """Tokens that leave this form are forbidden; None allows any text."""
    num_logprobs: int | None = None
    """Top alternatives reported with each token; 0 reports the chosen token's only."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens; None where nobody asked, and nothing is computed."""

    @property
    def has_penalties(self) -> bool:
        """Whether tokens become more or less likely by having come before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at the tokens so far."""
        if self.structured is not None:
            return True
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)

    @property
    def ends_with_form(self) -> bool:
        """Whether the form says where the output ends.

        Neither ``ignore_eos`` nor ``min_tokens`` makes it go on where nothing may follow, so the
        sampler applies them and nobody else.
        """
        return self.structured is not None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete once. ``n > 1`` is several requests, made by the front."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    arrival_s: float
    """Orders the queue: a preempted or re-run request keeps its place."""
    output_token_ids: TokenIds = NO_TOKENS
    """Tokens the client already has, when a request is re-run after its instance died."""
    cache_salt: str = ""
    """Requests of different salts share no KV."""
    num_scored: int = 0
    """Scores of the prompt that are known already: a re-run computes the others."""
    priority: int = 0
    """The lower, the sooner it is served, and the later it makes way. Equals: by arrival."""

    @property
    def max_stored_tokens(self) -> int:
        """Tokens of KV that the request may come to need (the last token's KV is never stored)."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens - 1

    @property
    def num_to_score(self) -> int:
        """Scores that the prompt has in all; 0 where nobody asked for them."""
        if self.sampling.num_prompt_logprobs is None:
            return 0
        return len(self.prompt_token_ids) - 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one sampled token."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""
