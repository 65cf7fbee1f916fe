"""The contract between a scheduler and the runners: what one microbatch computes.

A plan names requests and token ranges, never blocks: each instance keeps its own block table.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kunserve.core.ids import GroupId, PrefixId, RequestId, StepId
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import SamplingParams, TokenLogprobs
from kunserve.core.tokens import TokenIds


class Chunk(NamedTuple):
    """A run of one request's tokens computed in one step; a decode is a chunk of one token.

    A decode may have guesses behind that token: tokens that may come, but are not known yet.
    """

    request_id: RequestId
    start: int
    """Tokens of the request whose KV is already computed (the chunk's prefix)."""
    num_tokens: int
    num_sampled: int
    """A token is sampled after each of the chunk's last so many: after one where the request's
    tokens end here, and after each guess."""

    @property
    def samples(self) -> bool:
        """Whether any token is sampled."""
        return self.num_sampled > 0

    @property
    def num_guesses(self) -> int:
        """Of its tokens, the last ones that are guessed."""
        return max(0, self.num_sampled - 1)


class SequenceStart(NamedTuple):
    """What a stage must know of a request before its first chunk."""

    request_id: RequestId
    sampling: SamplingParams
    num_prompt_tokens: int
    token_ids: TokenIds
    """All tokens so far, where penalties or scores of the prompt need them; else empty."""


class BlockRun(NamedTuple):
    """Blocks [first_block, end_block) of one request, on every stage."""

    request_id: RequestId
    first_block: int
    end_block: int


class KeptPrefix(NamedTuple):
    """Blocks [first_block, end_block) of a request become the cache's; it shares them from now."""

    request_id: RequestId
    prefix_id: PrefixId
    first_block: int
    end_block: int


class EvictedPrefix(NamedTuple):
    """The cache keeps only the blocks below ``end_block`` of a prefix; none if it begins there."""

    prefix_id: PrefixId
    end_block: int


class SharedPrefix(NamedTuple):
    """A request's next blocks, up to ``end_block``, are those of a prefix in the cache."""

    request_id: RequestId
    prefix_id: PrefixId
    end_block: int


class SampledRow(NamedTuple):
    """A token to be sampled."""

    request_id: RequestId
    num_before: int
    """Tokens of the request before it."""


class ScoreRun(NamedTuple):
    """Scores [first, end) of one request's prompt, out of rows of its chunk."""

    request_id: RequestId
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One microbatch. Every stage of the group executes the same plans in the same order."""

    group_id: GroupId
    step_id: StepId
    released: tuple[RequestId, ...]
    """Requests whose blocks every stage frees before anything else."""
    started: tuple[SequenceStart, ...]
    chunks: tuple[Chunk, ...]
    swapped_out: tuple[BlockRun, ...] = ()
    """KV to copy to host memory while the step runs; the next plan's step may use its blocks."""
    swapped_in: tuple[BlockRun, ...] = ()
    """KV to copy back meanwhile, into blocks of its own; whole when the next plan's step begins."""
    scored: tuple[ScoreRun, ...] = ()
    """What the last stage computes of prompts whose clients asked; never more than a run a chunk,
    and in the chunks' order."""
    kept: tuple[KeptPrefix, ...] = ()
    """Blocks that go to the cache. The plan's ``released`` come after them, because who ends or is
    preempted leaves its blocks there; then what is evicted; then what is shared."""
    evicted: tuple[EvictedPrefix, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def num_sampled(self) -> int:
        """Tokens sampled in this step."""
        return sum([chunk.num_sampled for chunk in self.chunks])

    @property
    def samples(self) -> bool:
        """Whether any token is sampled."""
        return any(chunk.num_sampled for chunk in self.chunks)

    @property
    def sampled_requests(self) -> list[RequestId]:
        """Those of ``sampled_rows``, each as often."""
        return [request_id for request_id, _, _, count in self.chunks for _ in range(count)]

    @property
    def sampled_rows(self) -> list[SampledRow]:
        """What is sampled, in the order of chunks and of their tokens."""
        return [
            SampledRow(chunk.request_id, chunk.start + chunk.num_tokens - num_after)
            for chunk in self.chunks
            for num_after in range(chunk.num_sampled - 1, -1, -1)
        ]


LATE = -1
"""Stands for a token of a structured output of which nobody knew in time what may come: a later
step computes its row again. So whose form takes long holds up nobody else."""


class SampledToken(NamedTuple):
    """One request's new token, from the stage that holds the output head."""

    request_id: RequestId
    token_id: int | None
    """None when no token could be chosen: the request ends with an error. Or ``LATE``."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, in the order of the plan's ``sampled_rows``.

    What comes after a wrong guess means nothing.
    """

    group_id: GroupId
    step_id: StepId
    tokens: tuple[SampledToken, ...]
    scores: tuple[PromptScores | None, ...] = ()
    """One for each run of the plan's ``scored``. None ends the request with an error."""
