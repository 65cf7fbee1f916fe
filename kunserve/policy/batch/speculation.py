"""How many guessed tokens a step checks: as many as make it give more tokens in the same time.

A guess is a row more in the step. It is worth its time where it is probably right, and where rows
are cheap: a few rows cost a step hardly more than one, because reading the weights is all of its
time. So the cost of steps decides, and for each sequence how often its guesses have been right.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch.cost import BatchTotals, head_cost, layers_cost

MOST_ROWS = 32
"""Of a step with guesses. Steps have memory for the logits of so many."""
MOST_DECODES = 16
"""Sequences in a step beyond which nothing is even looked up: they would gain little, and looking
takes time of every step."""
LEAST_ROW_SHARE = 0.06
"""Of a step without guesses, what each guess takes at least. The cost model has very few rows cost
nothing; measured, two to four take 7 to 16 % more than one."""
MIN_GAIN = 1.15
"""Tokens per time against those without guesses, as predicted. Less is not worth the doubt: in
batches of eight where 1.05 was predicted, there was a loss."""
MOST_DELAY = 1.15
"""How much longer a step may take for a sequence that does not get as many more tokens itself."""
FIRST_RATE = 0.5
"""Share of guesses taken to be right before any has been checked."""
RATE_WEIGHT = 0.1
"""Of each checked guess in the moving share: it remembers about the last ten."""
TYPICAL_COST = CostCoefficients(
    attention_s=0.0, token_s=0.085, chunk_s=1.0, shared_s=1.0, sample_s=0.02
)
"""Where nobody knows what steps cost: small models on a CPU, in readings of all weights."""


class Decode(NamedTuple):
    """One sequence that the step gives a token."""

    num_context: int
    """Its tokens of KV."""
    num_found: int
    """Guesses that it has."""
    rate: float
    """Share of its guesses that are right where the one before was."""


def learned_rate(rate: float, found: Sequence[int], came: Sequence[int]) -> float:
    """The share of right guesses after one more lookup, whether they were checked in a step or not.

    ``came`` are the tokens that really followed, as far as they are known. What was found behind
    a wrong guess says nothing.
    """
    for guess, token in zip(found, came, strict=False):
        is_right = guess == token
        rate += RATE_WEIGHT * (is_right - rate)
        if not is_right:
            break
    return rate


def choose_num_guesses(
    decodes: Sequence[Decode], most_rows: int, cost: CostCoefficients | None
) -> list[int]:
    """How many of each one's guesses a step of these decodes checks, in ``most_rows`` at most.

    Those that are most probably right come first. Their number gives most tokens per time, among
    all at which nobody waits longer: each gets as many more tokens as the step takes longer, or
    the step takes ``MOST_DELAY`` as long at most.
    """
    counts = [0] * len(decodes)
    ranked = sorted(
        (-(one.rate ** (number + 1)), number, index)
        for index, one in enumerate(decodes)
        for number in range(one.num_found)
    )
    ranked = ranked[: max(0, min(most_rows, MOST_ROWS) - len(decodes))]
    if not ranked:
        return counts
    num_pairs = sum(one.num_context + 1 for one in decodes)
    num_context = sum(one.num_context for one in decodes)
    step = _StepTime(cost or TYPICAL_COST, len(decodes), num_context)
    plain_s = step.seconds(len(decodes), num_pairs)
    tokens = float(len(decodes))
    each = [1.0] * len(decodes)
    best, num_chosen = MIN_GAIN * tokens / plain_s, 0
    for num_guesses, (value, number, index) in enumerate(ranked, 1):
        tokens -= value
        each[index] -= value
        num_pairs += decodes[index].num_context + number + 2
        step_s = step.seconds(len(decodes) + num_guesses, num_pairs)
        step_s = max(step_s, (1.0 + LEAST_ROW_SHARE * num_guesses) * plain_s)
        delay = step_s / plain_s
        if tokens / step_s > best and (delay <= MOST_DELAY or delay <= min(each)):
            best, num_chosen = tokens / step_s, num_guesses
    for index, number in Counter(index for _, _, index in ranked[:num_chosen]).items():
        counts[index] = number
    return counts


class _StepTime(NamedTuple):
    """What steps of the same sequences take, by their rows."""

    cost: CostCoefficients
    num_decodes: int
    num_context: int

    def seconds(self, num_rows: int, num_pairs: int) -> float:
        """Every row is a token, and one is sampled after each."""
        totals = BatchTotals(self.num_decodes, num_rows, num_pairs, self.num_context, num_rows)
        return layers_cost(self.cost, totals) + head_cost(self.cost, totals)
