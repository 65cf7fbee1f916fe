"""How deep a drop is worth what it costs, where more waits than it makes room for.

A drop lets those begin at once that fit into what it frees. Everybody who waits behind them waits
longer: a pair computes about a tenth less than its instances did alone where compute is short, a
pipeline of four a quarter less, because each stage reads its weights and pays the host once per
microbatch. With W blocks of requests that find no room, G blocks freed, and a part p of the
compute lost, the last of them begins sooner while

    (W - G) / (1 - p) < W        that is        p * W < G        or nearly so

W goes on to grow while a burst lasts, and pipelines stand for a minute or more. So pairs are made
while W is at most ``most`` times what they free, and deeper pipelines while what waits behind pairs
is at most ``most - 1`` times what they add. With the default of 1 these are made only where a group
is short while others have room. A longer queue waits for compute. It shrinks as the burst ends.

What schedulers keep back at admission is not free: nobody who waits begins there. But where prompts
take little of the compute (``LITTLE``), nobody waits for compute yet, and deeper pipelines are made
while no more than that waits.

Where weights take most of the memory, it is memory that the throughput lacks: a drop that adds much
of it (``MUCH``) is made however long the queue is.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kunserve.core.load import GroupLoad
from kunserve.policy.drop.monitor import HEADROOM, headroom_blocks
from kunserve.policy.drop.plan import DropPlan, Limits, Standing, Wanted, plan_drop

MUCH = 0.5, 0.25
"""Of the memory that there is: so much added by pairs, and by deeper pipelines, makes up for the
compute that they lose."""
LITTLE = 1 / 3
"""Of the compute, taken by prompts lately: 0.27 where fours gained most, and 0.43-0.61 where they
lost (docs/decisions/drop-worth.md)."""
LATELY_S = 3.0
"""Time constant of that: a prompt of 16 K tokens keeps an instance busy for as long."""
ALL_BLOCKS = 1 << 62
"""More than any cluster frees."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits, beside what there is."""

    unplaced_blocks: int
    """See the function of this name."""
    capacity_blocks: int
    """Of all groups."""
    prompt_share: float
    """Of the compute, taken by prompts lately."""
    most: float
    """How many times what is freed may wait for it."""


def unplaced_blocks(groups: Iterable[GroupLoad], coming_blocks: int = 0) -> int:
    """Blocks of all requests that wait, beyond what is free and what transitions will free.

    What schedulers keep back at admission is not free: nobody who waits begins there.
    """
    groups = tuple(groups)
    queue = sum(group.queue_blocks for group in groups)
    free = sum(map(_free_blocks, groups))
    return max(0, queue - free - max(0, coming_blocks))


def _free_blocks(group: GroupLoad) -> int:
    capacity = group.capacity_blocks
    return max(0, capacity - headroom_blocks(capacity) - group.report.used_blocks)


def plan_worth(standing: Standing, wanted: Wanted, limits: Limits, queue: Queue) -> DropPlan:
    """The plan for what is wanted, no deeper than is worth it; without merges if no drop is."""
    plan = plan_drop(standing, wanted, limits)
    unplaced = queue.unplaced_blocks
    deepest = max((len(merge.new.stages) for merge in plan.merges), default=1)
    if deepest == 1 or unplaced == 0:
        return plan
    if deepest == 2 and unplaced <= queue.most * plan.gain_blocks:
        return plan
    all_of_it, num_instances = replace(wanted, required_blocks=ALL_BLOCKS), len(standing.specs)
    largest = min(num_instances, limits.max_group_size or num_instances)
    gains = (
        (size, plan_drop(standing, all_of_it, replace(limits, max_group_size=size)).gain_blocks)
        for size in _sizes(largest)
    )
    size = deepest_worth(gains, unplaced, queue.most, queue.capacity_blocks, queue.prompt_share)
    if size == 1:
        return DropPlan((), wanted.required_blocks, False, _why(unplaced), is_worth=False)
    if size < deepest:
        plan = plan_drop(standing, wanted, replace(limits, max_group_size=size))
        if not plan.merges:  # what could merge has merged, and deeper is not worth it
            plan = replace(plan, obstacle=_why(unplaced), is_worth=False)
    return plan


def deepest_worth(
    gains: Iterable[tuple[int, float]],
    unplaced: float,
    most: float,
    capacity: float,
    prompt_share: float = math.inf,
) -> int:
    """The most instances that a group may have, 1 if no drop is worth it.

    ``gains``: (instances of a group at most, what all merges up to there free), rising. All in
    blocks, or all in tokens. ``prompt_share``: see ``Queue``; unknown, it is much.
    """
    deepest, freed = 1, 0.0
    kept_back = HEADROOM * capacity if prompt_share < LITTLE else 0.0
    for size, gain in gains:
        added, is_deep = gain - freed, size > 2
        is_much = added >= MUCH[is_deep] * (capacity + freed)
        may_wait = added * max(0.0, most - 1.0) + kept_back if is_deep else added * most
        if added > 0 and not is_much and unplaced - freed > may_wait:
            break
        deepest, freed = size, gain
    return deepest


def _sizes(largest: int) -> Iterator[int]:
    """Pairs, fours and so on, and at last the largest."""
    size = 2
    while size < largest:
        yield size
        size *= 2
    yield largest


def _why(unplaced: int) -> str:
    return f"{unplaced} blocks of requests wait for room, and a drop frees too few"
