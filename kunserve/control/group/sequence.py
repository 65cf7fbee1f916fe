"""A request's progress inside one scheduler."""

import enum
from dataclasses import dataclass, replace

from kunserve.control.group.draft import Draft
from kunserve.control.group.prompt_prefix import PromptPrefix
from kunserve.core.ids import RequestId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.messages import SequenceState, TokenOutput
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import FinishReason, Request, TokenLogprobs
from kunserve.core.step import SequenceStart
from kunserve.core.tokens import NO_TOKENS, TokenIds


class Progress(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    """Without KV, in the queue."""
    RUNNING = "running"
    STALLED = "stalled"
    """With KV that is still being exchanged: may not run."""
    SWAPPED = "swapped"
    """With KV in host memory, or on its way there or back: may not run."""
    ENDED = "ended"


QueueKey = tuple[float, float, int]
"""(priority, arrival, order of coming): a sequence's place, kept through preemptions."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Owner of one request's tokens, of how many of them have KV, and of where it is.

    There are no phases: known tokens are computed, and when none is left one is sampled. (A
    sequence decodes when just its newest output token is left.)
    """

    request: Request
    request_id: RequestId
    key: QueueKey
    output_token_ids: list[int]
    """Those of the prompt are in ``request``."""
    num_tokens: int
    """Prompt and output so far."""
    num_prompt: int
    num_computed: int
    """Tokens whose KV exists or will when the steps in flight have run."""
    num_preemptions: int
    state: Progress
    max_total_tokens: int
    """Prompt plus output at which the request ends."""
    min_total_tokens: int
    """Prompt plus output before which no token may end it."""
    stop_ids: frozenset[int]
    """Tokens that end the output."""
    beginning: PromptPrefix
    """What it shares with others."""
    num_to_score: int = 0
    """Scores that the prompt has in all."""
    num_scored: int = 0
    """Scores that have come: none of them is computed again."""
    is_awaiting: bool = False
    """A sampling chunk is in flight: the next token is not known yet."""
    is_late: bool = False
    """No token came for its last one, which is to be computed again: its KV is there. Only with a
    form, so that no step runs ahead meanwhile."""
    is_started: bool = False
    """The stages have been told of it, and not told since to release it."""
    began_s: float | None = None
    """When it was first admitted here."""
    streams_since_s: float | None = None
    """When its first token here came, or the first one since it was swapped; None before."""
    num_parked: int = 0
    """Times that it went to host memory."""
    last_step: int = -1
    """The last step planned for it: who has waited longest decodes first."""
    num_cached: int = 0
    """Prompt tokens whose KV was there when it was first admitted here."""
    draft: Draft | None = None
    """What its tokens let guess; None before anybody has looked."""

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self.num_tokens - self.num_prompt

    @property
    def num_left(self) -> int:
        """Known tokens not computed yet."""
        return self.num_tokens - self.num_computed

    @property
    def has_scores_to_come(self) -> bool:
        """Whether scores of its prompt are still computed."""
        return self.num_scored < self.num_to_score

    @property
    def max_stored_tokens(self) -> int:
        """Tokens of KV that the request may come to need (the last token's is never stored)."""
        return self.max_total_tokens - 1

    # Where it is

    def adopt(self, given: SequenceState, state: Progress) -> None:
        """It comes with KV from another leader."""
        self.num_preemptions, self.num_computed = given.num_preemptions, given.num_computed
        self.is_late = given.num_computed == self.num_tokens
        self.state = state

    def admit(self, num_computed: int, now_s: float) -> bool:
        """It has memory, and KV of so many tokens; whether that is for the first time here."""
        self.num_computed, self.state = num_computed, Progress.RUNNING
        is_first = self.began_s is None
        if is_first:
            self.began_s = now_s
            self.num_cached = min(num_computed, self.num_prompt)
        return is_first

    def move_to(self, state: Progress) -> None:
        """It may run, may not, or has ended."""
        self.state = state

    def park(self) -> None:
        """Its KV goes to host memory."""
        self.state = Progress.SWAPPED
        self.num_parked += 1
        self.num_preemptions += 1

    def come_back(self) -> None:
        """Its KV is back from host memory."""
        self.state = Progress.RUNNING
        self.streams_since_s = None

    def lose_kv(self) -> None:
        """It is to be computed again."""
        self.num_preemptions += 1
        self.num_computed = 0
        self.is_late = False
        self.streams_since_s = None
        self.is_started = False
        self.state = Progress.WAITING

    # Its tokens

    def advance(self, step: int, end: int) -> bool:
        """A step computes its tokens up to ``end``; whether it samples the next one."""
        self.last_step = step
        self.is_late = False
        self.num_computed = end
        self.is_awaiting = samples = end == self.num_tokens
        return samples

    def ignore_token(self) -> None:
        """The token that a step samples for it is not wanted."""
        self.is_awaiting = False

    def wait_on(self) -> None:
        """The token that a step was to sample for it is late."""
        self.is_awaiting, self.is_late = False, True

    def append_token(
        self,
        token_id: int | None,
        logprobs: TokenLogprobs | None,
        pool_tokens: int,
        now_s: float,
    ) -> TokenOutput:
        """Add a sampled token; what the client is told of it. None: it could not be chosen.

        Another one of the same step was sampled behind a guess that the one before it confirms.
        """
        position = self.num_tokens - self.num_prompt
        reason = self._add_token(token_id, pool_tokens, now_s)
        if position:
            return TokenOutput(self.request_id, position, token_id, logprobs, reason)
        computed_s = None if self.began_s is None else now_s - self.began_s
        return TokenOutput(
            self.request_id, 0, token_id, logprobs, reason, computed_s, self.num_cached
        )

    def _add_token(
        self, token_id: int | None, pool_tokens: int, now_s: float
    ) -> FinishReason | None:
        """Why it is the last one, if it is."""
        if not self.is_awaiting:
            self.num_computed += 1
        self.is_awaiting = False
        if self.streams_since_s is None:
            self.streams_since_s = now_s
        if token_id is None:
            return FinishReason.ERROR
        self.output_token_ids.append(token_id)
        self.num_tokens = total = self.num_tokens + 1
        if token_id in self.stop_ids and total >= self.min_total_tokens:
            return FinishReason.STOP
        if total >= self.max_total_tokens or total > pool_tokens:
            return FinishReason.LENGTH
        return None

    def take_scores(self, scores: PromptScores) -> PromptScores | None:
        """Those that had not come yet; after a preemption some are computed twice."""
        known = self.num_scored
        assert scores.first <= known, (self.request_id, scores.first, known)
        if scores.end <= known:
            return None
        self.num_scored = scores.end
        return scores.since(known)

    def keep_draft(self, draft: Draft) -> None:
        """Somebody has looked what its tokens let guess."""
        self.draft = draft

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        prompt, num_prompt = self.request.prompt_token_ids, self.num_prompt
        if end <= num_prompt:
            return list(prompt[start:end])
        output = self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        return [*prompt[start:], *output] if start < num_prompt else output

    def start(self) -> SequenceStart:
        """What the stages are told before the first chunk."""
        self.is_started = True
        sampling = self.request.sampling
        history = NO_TOKENS
        if sampling.needs_history or self.has_scores_to_come:
            history = TokenIds(self.known_tokens(0, self.num_tokens))
        return SequenceStart(self.request_id, sampling, self.num_prompt, history)

    def hand_over(self, blocks: KvBlocks) -> SequenceState:
        """The sequence for another leader. No step of it may be in flight."""
        assert not self.is_awaiting, self
        request = self.request
        if self.num_to_score:
            request = replace(request, num_scored=self.num_scored)
        return SequenceState(
            request=request,
            output_token_ids=TokenIds(self.output_token_ids),
            num_computed=self.num_computed,
            num_blocks=blocks.holding(self.num_computed),
            num_preemptions=self.num_preemptions,
            shared=self.beginning.parts,
        )


def make_sequence(
    request: Request,
    output_token_ids: TokenIds,
    order: int,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    named_size: int,
) -> Sequence:
    """A waiting sequence, output so far included, the ``order``-th that its scheduler makes.

    Its ends are worked out once, so that the step loop only compares. A block of ``named_size``
    tokens may be shared.
    """
    sampling = request.sampling
    num_prompt = len(request.prompt_token_ids)
    max_total_tokens = min(num_prompt + sampling.max_tokens, max_model_len)
    total = num_prompt + len(output_token_ids)
    assert num_prompt > 0 and total < max_total_tokens, (
        request.request_id,
        total,
        max_total_tokens,
    )
    ignores_eos = sampling.ignore_eos and not sampling.ends_with_form
    stop_ids = frozenset() if ignores_eos else eos_token_ids
    if sampling.stop_token_ids:
        stop_ids = stop_ids.union(sampling.stop_token_ids)
    return Sequence(
        request=request,
        request_id=request.request_id,
        key=(request.priority, request.arrival_s, order),
        output_token_ids=list(output_token_ids),
        num_tokens=total,
        num_prompt=num_prompt,
        num_computed=0,
        num_preemptions=0,
        state=Progress.WAITING,
        max_total_tokens=max_total_tokens,
        min_total_tokens=num_prompt + (0 if sampling.ends_with_form else sampling.min_tokens),
        stop_ids=stop_ids,
        beginning=PromptPrefix(request.request_id, names_at=named_size),
        num_to_score=request.num_to_score,
        num_scored=request.num_scored,
    )
