"""How large steps are, and how often decodes run, where tokens have an objective in time (TPOT).

A step reads the weights once and gives every decode a token. The more prompt tokens it has
besides, the sooner a queue of prompts is served, and the longer every decode waits for its next
token. The objective says how long it may wait. While prompts queue, steps grow until they take so
long. Where they may not grow further, decodes skip steps.

Slow decodes hold their memory longer. Where memory is short that costs more than it gains:
requests then wait for memory, and not for compute. So decodes are fast there.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch.batch_form import CHUNK_TOKENS
from kunserve.policy.batch.cost import Size, decode_cost, experts_cost, own_cost, tokens_beside

CALM_SHARE = 0.5
"""Of the objective, what a step may take however few prompts queue."""
PROMPT_SHARE = 0.25
"""Of what decodes leave of the objective, what prompts have however few queue. Otherwise many
decodes would keep a prompt from its end while it holds its memory."""
QUEUE_PER_STEP = 2
"""A step may have one token more for so many that queue. First tokens come sooner from small
steps, so a short queue makes none large."""


@dataclass(frozen=True, slots=True)
class PaceView:
    """What the next step depends on."""

    max_num_batched_tokens: int
    """What the user allows, whatever happens."""
    num_queued_tokens: int
    """Prompt tokens of this group that are not computed yet."""
    prefix: int
    """Tokens of KV that the first of these prompts has already."""
    num_decodes: int
    """In flight or not."""
    num_context_tokens: int
    """Of all decodes together."""
    num_stages: int
    is_memory_short: bool
    """A request waits for memory."""


class Pace(NamedTuple):
    """A decision about the next microbatch."""

    max_num_tokens: int
    decode_rounds: int
    """A decode runs once in so many rounds; in a round each stage gets one microbatch."""


def choose_pace(view: PaceView, tpot_slo_s: float, cost: CostCoefficients) -> Pace:
    """How many tokens the next microbatch may have, and how often decodes run.

    A decode waits ``tpot_slo_s`` for its next token at most, as far as ``cost`` can tell: it must
    be measured. Prompts get ``CHUNK_TOKENS`` in every step, even where decodes alone take longer.
    """
    most = view.max_num_batched_tokens
    decodes = -(-view.num_decodes // view.num_stages)
    decodes_s = decode_cost(cost, view.num_decodes, view.num_context_tokens) / view.num_stages
    all_decodes = Size(decodes, decodes)
    decodes_s += experts_cost(cost, all_decodes)
    fixed_s = decodes_s + cost.shared_s

    def within(seconds: float) -> int:
        prompts = tokens_beside(cost, view.prefix, seconds - fixed_s, all_decodes, most)
        return min(most, decodes + max(CHUNK_TOKENS, int(prompts)))

    calm = within(max(CALM_SHARE * tpot_slo_s, fixed_s + PROMPT_SHARE * (tpot_slo_s - fixed_s)))
    if view.is_memory_short:
        return Pace(calm, 1)
    # In a pipeline lookahead parts the queue, and leaves each stage several microbatches.
    wanted = most if view.num_stages > 1 else decodes + view.num_queued_tokens // QUEUE_PER_STEP
    size = max(calm, min(wanted, within(tpot_slo_s)))
    prompts = size - decodes
    if size < most or prompts <= 0:
        return Pace(size, 1)
    steps_of_queue = view.num_queued_tokens // (prompts * view.num_stages)
    prompts_s = cost.shared_s + own_cost(cost, view.prefix, prompts)
    prompts_s += experts_cost(cost, Size(prompts, 1))
    rounds = min(steps_of_queue, int((tpot_slo_s - decodes_s) / prompts_s))
    return Pace(size, max(1, rounds))
