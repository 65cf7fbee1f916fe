"""Lookahead batch formation: microbatches of equal predicted time over all queued work (4.3).

The paper halves one microbatch of everything by cost, again and again, until a half has too few
tokens. Halving n times cuts the line of all prompt tokens, in order of arrival, where its
cumulated cost passes k / 2^n of the whole; here any number m of parts is cut at k / m, in one
vectorised pass instead of a recursion, so that m need not be a power of two and all parts cost
the same (a recursion that stops by tokens leaves neighbours that differ by a factor of two).

Decodes are no part of that line: each runs once per round of S microbatches, so an S-th of all,
by cost, belongs to every microbatch.

What a sparse model's experts cost belongs to a microbatch and to no place of the line. Cuts take
the tangent at the size that microbatches will have about (``near_size``), because there most
experts are touched anyway. Predicted costs, and the microbatch that a slot gets, are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch.batch_form import (
    CHUNK_TOKENS,
    FormationView,
    FormBatch,
    Microbatch,
    OngoingFormation,
    PromptShare,
    PromptWork,
    form_token_budget,
    share_of_decodes,
)
from kunserve.policy.batch.cost import (
    Array,
    Size,
    added_cost,
    decode_cost,
    experts_cost,
    near_size,
    tokens_beside,
)
from kunserve.policy.batch.work_line import WorkLine

ROUNDS_OF_SHORT_QUEUE = 4
"""A queue is split into up to so many microbatches per stage while each has
``ROUNDS_LEAST_FACTOR`` times ``min_tokens``. Stages idle less when prompts and decodes mix in
smaller steps."""
ROUNDS_LEAST_FACTOR = 3
"""See ``ROUNDS_OF_SHORT_QUEUE``."""
ROUNDS_OF_BACKLOG = 32
"""The same while more requests wait for memory, with parts of ``min_tokens``. Prompts then come
one by one, as others end, and stages idle least when they come evenly. Nobody is served later,
because the queue waits for memory."""
HORIZON = 512
"""Full microbatches of queue that a formation looks at. It is made anew before more are planned."""
NUM_PASSES = 2
"""A cut inside a prompt costs a chunk more, which moves the cuts: settled after two passes."""
NUM_TRIES = 8
"""Of a number of parts, until none exceeds a step's limits."""
HEADROOM = 1.002
"""Of the next number of parts, so that rounding does not cost one more try."""
EPSILON = 1e-9
BY_TOKENS = CostCoefficients(attention_s=0.0, token_s=1.0, chunk_s=0.0, shared_s=0.0)
"""Where nobody gave coefficients, every token costs the same."""
DECODES_CHANGED = 0.125
"""Share of all decodes that must have come or gone for a formation to be made anew."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How to look ahead."""

    cost: CostCoefficients
    min_tokens: int
    """Microbatches are not made smaller than this to have more of them."""


@dataclass(frozen=True, slots=True)
class Formation:
    """All queued prompt tokens, cut into microbatches of equal cost."""

    bounds: npt.NDArray[np.int64]
    """[m + 1] where the line of prompt tokens is cut, from 0 to its end."""
    costs: Array
    """[m] predicted seconds of each, its share of the decodes included."""

    @property
    def num_microbatches(self) -> int:
        """m."""
        return len(self.costs)

    @property
    def imbalance(self) -> float:
        """Largest cost over the mean."""
        return float(self.costs.max() / self.costs.mean())

    def shares(self, k: int, prompts: Sequence[PromptWork]) -> list[PromptShare]:
        """The prompt tokens of microbatch ``k``; ``prompts`` are those it was formed from."""
        shares, position = [], 0
        first, end = int(self.bounds[k]), int(self.bounds[k + 1])
        for index, work in enumerate(prompts):
            taken = min(end, position + work.remaining) - max(first, position)
            if taken > 0:
                shares.append(PromptShare(index, taken))
            position += work.remaining
        return shares


def looks_ahead(view: FormationView, min_tokens: int) -> bool:
    """Whether to look ahead: a pipeline, a prompt to split, and enough tokens for every stage.

    Otherwise there is nothing to balance, and waiting for more work would cost latency.
    """
    if view.num_stages == 1:
        return False
    num_tokens = sum(work.remaining for work in view.prompts)
    return (
        num_tokens >= 2 * CHUNK_TOKENS
        and num_tokens + _num_decodes(view) >= view.num_stages * min_tokens
    )


def choose_formation(config: SchedulerConfig, cost: CostCoefficients | None) -> FormBatch:
    """The way that the configuration wants: by lookahead, or by token budget alone.

    ``cost`` None: every token costs the same.
    """
    if not config.lookahead:
        return lambda view, ongoing: (form_token_budget(view), None)
    how = Lookahead(cost or BY_TOKENS, config.min_microbatch_tokens)
    return partial(form_lookahead, how=how)


def form_lookahead(
    view: FormationView, ongoing: OngoingFormation | None, how: Lookahead
) -> tuple[Microbatch, OngoingFormation | None]:
    """The next microbatch, and the formation to bring with the next view.

    A formation is made anew when its last microbatch has been planned, when prompts came or went,
    or when an eighth of the decodes did; until then its target stands. Without enough prompt
    tokens this is plain token-budget chunking, with decodes spread by cost in a pipeline.
    """
    if view.num_stages == 1:
        return form_token_budget(view), None
    if not view.prompts:  # as most steps are: nothing is cut, now or later
        num_decodes, _ = _take_decodes(view, _near_a_slot(view, how.cost))
        return Microbatch(range(num_decodes), []), None
    num_tokens = sum(work.remaining for work in view.prompts)
    if ongoing is None or not _holds(ongoing, view, num_tokens):
        if not looks_ahead(view, how.min_tokens):
            return cut_microbatch(view, how, inf), None
        formation = form_all(_within_horizon(view), how)
        ongoing = OngoingFormation(
            target_s=float(formation.costs.mean()),
            num_left=formation.num_microbatches,
            num_prompt_tokens=num_tokens,
            num_decodes=_num_decodes(view),
        )
    target_s = inf if ongoing.num_left == 1 else ongoing.target_s
    batch = cut_microbatch(view, how, target_s)
    taken = sum(share.num_tokens for share in batch.prompts)
    return batch, replace(
        ongoing, num_left=ongoing.num_left - 1, num_prompt_tokens=num_tokens - taken
    )


def form_all(view: FormationView, how: Lookahead) -> Formation:
    """Cut all prompt tokens of the view into as few microbatches of equal cost as its limits allow.

    At least as many as stages, if each can have ``min_tokens`` (decodes count), and several
    rounds of them if they stay well above it. No part exceeds the view's
    limits; where prompts differ so much that both bounds cannot hold, balance gives way.
    """
    decodes_s, num_decodes = _decode_share(view, how.cost)
    most = max(1, view.max_num_tokens - num_decodes)
    most_seqs = max(1, view.max_num_seqs - num_decodes)
    total = sum(work.remaining for work in view.prompts)
    least = max(min(CHUNK_TOKENS, how.min_tokens), how.min_tokens - num_decodes)
    num_rounds, factor = ROUNDS_OF_SHORT_QUEUE, ROUNDS_LEAST_FACTOR
    if view.has_backlog:
        num_rounds, factor = ROUNDS_OF_BACKLOG, 1
    spread = min(num_rounds * view.num_stages, total // (factor * least))
    wanted = max(min(view.num_stages, total // least), spread)
    parts = max(1, wanted, -(-total // most))
    near = near_size(how.cost, Size(num_decodes + total / parts, num_decodes + 1))
    line = WorkLine(view.prompts, near)
    for _ in range(NUM_TRIES):
        bounds = _cut_equally(line, parts)
        sizes = np.diff(bounds)
        excess = max(sizes.max() / most, line.num_chunks(bounds).max() / most_seqs)
        if excess <= 1.0 or sizes.min() <= least:
            break
        parts = max(parts + 1, ceil(parts * excess * HEADROOM))
    bounds = _within_limits(line, bounds, least, most, most_seqs)
    if near is not how.cost:
        line = WorkLine(view.prompts, how.cost)
    chunks = line.num_chunks(bounds).tolist()
    experts_s = [
        experts_cost(how.cost, Size(num_decodes + size, num_decodes + num))
        for size, num in zip(np.diff(bounds).tolist(), chunks, strict=True)
    ]
    return Formation(bounds, line.costs(bounds) + decodes_s + how.cost.shared_s + experts_s)


def cut_microbatch(view: FormationView, how: Lookahead, target_s: float) -> Microbatch:
    """One microbatch of that predicted cost: a share of the decodes, then prompts in order.

    It has ``min_tokens`` if there are so many, and always a token of the first prompt unless
    decodes alone reach a limit: nobody starves behind them.
    """
    cost = how.cost
    near = _near_a_slot(view, cost)
    num_decodes, decodes_s = _take_decodes(view, near)
    decodes_s -= decode_cost(near, num_decodes, 0) - decode_cost(cost, num_decodes, 0)
    taken = Size(num_decodes, num_decodes)
    left_s = target_s - cost.shared_s - decodes_s - experts_cost(cost, taken)
    tokens_left = view.max_num_tokens - num_decodes
    seqs_left = view.max_num_seqs - num_decodes
    least = max(min(CHUNK_TOKENS, how.min_tokens), how.min_tokens - num_decodes)
    owed = min(tokens_left, least)
    shares: list[PromptShare] = []
    for index, (prefix, remaining) in enumerate(view.prompts):
        if tokens_left <= 0 or len(shares) >= seqs_left:
            break
        num_tokens = _tokens_for(cost, prefix, remaining, left_s, taken)
        num_tokens = min(max(num_tokens, owed), remaining, tokens_left)
        if num_tokens == 0:
            break
        shares.append(PromptShare(index, num_tokens))
        tokens_left -= num_tokens
        owed = max(0, owed - num_tokens)
        left_s -= added_cost(cost, prefix, num_tokens, taken)
        taken = taken.plus(num_tokens)
        if num_tokens < remaining:
            break
        left_s -= cost.sample_s
    return Microbatch(range(num_decodes), shares)


def _within_horizon(view: FormationView) -> FormationView:
    """The view with no more prompts than ``HORIZON`` full microbatches hold."""
    left = HORIZON * view.max_num_tokens
    for index, work in enumerate(view.prompts):
        if left <= 0:
            return replace(view, prompts=view.prompts[:index])
        left -= work.remaining
    return view


def _holds(ongoing: OngoingFormation, view: FormationView, num_tokens: int) -> bool:
    """Whether the formation is still good: it was made from about what is there now."""
    changed = abs(_num_decodes(view) - ongoing.num_decodes)
    return (
        ongoing.num_left > 0
        and ongoing.num_prompt_tokens == num_tokens
        and changed <= DECODES_CHANGED * ongoing.num_decodes
    )


def _num_decodes(view: FormationView) -> int:
    return len(view.decodes) + view.num_decodes_in_flight


def _decode_share(view: FormationView, cost: CostCoefficients) -> tuple[float, int]:
    """(seconds, number) of the decodes that each microbatch will carry on average."""
    number = _num_decodes(view)
    context = sum(view.decodes) + view.context_in_flight
    parts = view.num_stages * view.decode_rounds
    seconds = decode_cost(cost, number, context) / parts
    return seconds, min(-(-number // parts), view.max_num_tokens - 1)


def _take_decodes(view: FormationView, cost: CostCoefficients) -> tuple[int, float]:
    """How many of the ready decodes come now, and their cost.

    As much as the S-th part of all that decode, in flight or not, and no more than leaves some
    for the other free slots: nothing packs together after a drain.
    """
    ready = len(view.decodes)
    if ready == 0:
        return 0, 0.0
    # ``decode_cost`` by its parts: a call for each is what a step of many decodes would wait for.
    each_s, token_s = decode_cost(cost, 1, 0), decode_cost(cost, 0, 1)
    ready_context = sum(view.decodes)
    all_context = ready_context + view.context_in_flight
    all_s = _num_decodes(view) * each_s + all_context * token_s
    all_s /= view.num_stages * view.decode_rounds
    ready_s = ready * each_s + ready_context * token_s
    slot_s = ready_s / (view.num_stages - view.num_in_flight) * (1.0 + EPSILON)
    most_s = all_s + ready_s / ready / 2
    most, even = min(ready, view.max_num_tokens, view.max_num_seqs), share_of_decodes(view)
    taken, taken_s = 0, 0.0
    for context in view.decodes[:most]:
        one_s = each_s + context * token_s
        # As near to the free slot's part as it goes. The S-th of all bounds it with half a decode
        # of slack: what is short in every slot would be left over in every round. Where that S-th
        # is reached in number as well, it is met as nearly, or 9 and 7 would stay 9 and 7.
        if taken and (taken_s + one_s / 2 > slot_s or taken_s >= most_s):
            break
        if taken >= even and taken_s + one_s / 2 > all_s * (1.0 + EPSILON):
            break
        taken += 1
        taken_s += one_s
    return taken, taken_s


def _near_a_slot(view: FormationView, cost: CostCoefficients) -> CostCoefficients:
    """``near_size`` of what a microbatch has about, if all that is there were shared out now."""
    if cost.expert_s == 0.0:
        return cost
    parts = view.num_stages * view.decode_rounds
    num_tokens = _num_decodes(view) + sum(work.remaining for work in view.prompts)
    num_tokens_each = min(view.max_num_tokens, num_tokens / parts)
    num_chunks_each = min(num_tokens_each, _num_decodes(view) / parts + 1)
    return near_size(cost, Size(num_tokens_each, num_chunks_each))


def _tokens_for(
    cost: CostCoefficients, prefix: int, remaining: int, seconds: float, beside: Size
) -> int:
    """How many tokens of a prompt add that long to a microbatch of that size."""
    if added_cost(cost, prefix, remaining, beside) <= seconds:
        return remaining
    return min(remaining, round(tokens_beside(cost, prefix, seconds, beside, remaining)))


def _cut_equally(line: WorkLine, parts: int) -> npt.NDArray[np.int64]:
    """Bounds of that many parts of equal cost."""
    steps = np.arange(1, parts)
    bounds = np.zeros(parts + 1, dtype=np.int64)
    bounds[-1] = line.num_tokens
    for _ in range(NUM_PASSES):
        again = line.resume_costs(bounds[:-1])
        each = (line.total_s + again.sum()) / parts
        bounds[1:-1] = line.positions(steps * each - np.cumsum(again)[:-1])
    bounds[1:-1] = np.maximum.accumulate(bounds[1:-1])
    return bounds


def _within_limits(
    line: WorkLine, bounds: npt.NDArray[np.int64], least: int, most: int, most_seqs: int
) -> npt.NDArray[np.int64]:
    """The same bounds, moved as little as it takes for every part to keep the limits."""
    sizes = np.diff(bounds)
    is_within = sizes.min() >= min(least, most) and sizes.max() <= most
    if is_within and line.num_chunks(bounds).max() <= most_seqs:
        return bounds
    kept, position, wanted = [0], 0, bounds[1:].tolist()
    while position < line.num_tokens:
        index = min(len(kept), len(wanted)) - 1
        end = max(wanted[index], position + min(least, most))
        end = min(end, position + most, line.end_of_chunks(position, most_seqs), line.num_tokens)
        kept.append(end)
        position = end
    return np.array(kept, dtype=np.int64)
