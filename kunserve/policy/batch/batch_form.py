"""Forming a microbatch from what could run: which sequences, and how many tokens of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

CHUNK_TOKENS = 16
"""Of prompts in a microbatch at least, however many decodes it has."""


class PromptWork(NamedTuple):
    """A sequence with known tokens to compute: a prompt, or all of it again after preemption."""

    prefix: int
    """Tokens whose KV exists already."""
    remaining: int


@dataclass(frozen=True, slots=True)
class FormationView:
    """Everything that could run now, memory permitting."""

    decodes: Sequence[int]
    """Context length of each sequence that could decode; who has waited longest comes first."""
    prompts: Sequence[PromptWork]
    """Those that run already, then the admissible queue, each in order of arrival."""
    num_decodes_in_flight: int
    """Sequences whose next token is being computed in other microbatches."""
    num_in_flight: int
    """Microbatches in flight, fewer than ``num_stages``."""
    num_stages: int
    max_num_tokens: int
    """Of one microbatch."""
    max_num_seqs: int
    """Of one microbatch."""
    context_in_flight: int = 0
    """Tokens of context of the decodes in flight, all together."""
    decode_rounds: int = 1
    """A decode runs once in so many rounds of a microbatch for every stage."""
    has_backlog: bool = False
    """Whether requests wait that cannot be admitted yet: as others end, their prompts will come."""


class PromptShare(NamedTuple):
    """Tokens of one prompt that a microbatch computes."""

    prompt: int
    """Index into ``FormationView.prompts``."""
    num_tokens: int


class Microbatch(NamedTuple):
    """A decision: what the next step computes. Empty parts mean that nothing should run."""

    decodes: Sequence[int]
    """Indices into ``FormationView.decodes``."""
    prompts: Sequence[PromptShare]


@dataclass(frozen=True, slots=True)
class OngoingFormation:
    """A formation whose microbatches are not all planned: the scheduler keeps it between them.

    Only a cost is kept. Each microbatch is cut when its slot opens, to that cost, from what is
    there then: ends, aborts and preemptions in between leave nothing to repair.
    """

    target_s: float
    """Predicted cost of every microbatch."""
    num_left: int
    """Microbatches not planned yet."""
    num_prompt_tokens: int
    """Prompt tokens that the next view has, if nobody comes or goes."""
    num_decodes: int
    """Decodes, in flight or not, at the formation."""


class FormBatch(Protocol):
    """A way to form microbatches."""

    def __call__(
        self, view: FormationView, ongoing: OngoingFormation | None
    ) -> tuple[Microbatch, OngoingFormation | None]:
        """The next microbatch, and what to bring with the next view."""
        ...


def form_token_budget(view: FormationView) -> Microbatch:
    """Chunked prefill under a token budget (Sarathi, vLLM): decodes first, then prompts in order.

    In a pipeline the paper's baseline: microbatches balanced by tokens, not by time.
    """
    num_decodes = min(share_of_decodes(view), view.max_num_tokens, view.max_num_seqs)
    tokens_left = view.max_num_tokens - num_decodes
    seqs_left = view.max_num_seqs - num_decodes
    shares: list[PromptShare] = []
    for index, work in enumerate(view.prompts):
        if tokens_left == 0 or seqs_left == 0:
            break
        num_tokens = min(work.remaining, tokens_left)
        shares.append(PromptShare(index, num_tokens))
        tokens_left -= num_tokens
        seqs_left -= 1
    return Microbatch(range(num_decodes), shares)


def share_of_decodes(view: FormationView) -> int:
    """How many decodes one microbatch should carry, so that every stage has some to work on.

    At most the S-th part of all that decode, in flight or not, so that a drained or uneven
    pipeline evens out; at most the part of the ready ones that leaves some for the free slots.
    Where decodes skip rounds it is a part of that.
    """
    ready = len(view.decodes)
    parts = view.num_stages * view.decode_rounds
    if parts == 1:
        return ready
    even = _ceil_div(ready + view.num_decodes_in_flight, parts)
    slots = view.num_stages - view.num_in_flight
    return min(even, _ceil_div(ready, slots))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
