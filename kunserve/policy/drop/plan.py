"""Which groups merge to free memory: the paper's Algorithm 1 (section 4.1).

    1. Put all groups into a priority queue Q, the one of fewest instances first.
    2. Until the memory freed is at least the requirement R:
    3.   if Q has only one group left: end without enough memory
    4.   take the two smallest groups a and b from Q
    5.   merge them: they keep one copy of the layers between them, the other copy is freed
    6.   put the merged group back into Q

Fewest instances first, because a deeper pipeline is slower: its stages read the weights and pay
the host once per microbatch.

Where ours differs, and why:

* Freed memory is counted in KV blocks, ``capacity(a + b) - capacity(a) - capacity(b)``, because R
  is in blocks, and because uneven memory budgets make blocks differ from bytes.
* A merge frees less the deeper it gets, because ever more instances share one copy. One into more
  than two stages must be worth it (``min_deep_gain``). A pair that gains nothing, or whose
  members would refuse, is skipped (``MergeQueue.pop_pair``).
* Groups that stand near each other merge first (``nearness``): of one host, of one rack, of any.
  Those that did not reach each other lately do not merge (``apart``).
* Instances of other numbers of ranks never merge, because a rank's part of KV and weights is
  another one there. Nor do those that share their weights: it would free nothing.
* Ending without enough, the caller relieves KV memory otherwise and asks for more instances.

``merge_cache`` works equal merges out once: a hundred instances are planned in milliseconds.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, Stage
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.capacity import Specs
from kunserve.policy.drop.merge_cache import MergeCache, Shape
from kunserve.policy.drop.merge_places import Meet, PlacedQueue
from kunserve.policy.drop.merge_queue import PlannedGroup
from kunserve.policy.drop.nearness import exchange_s
from kunserve.policy.exchange.moves import ranks_obstacle, weights_obstacle

_NOBODY: frozenset[InstanceId] = frozenset()
Pair = tuple[InstanceId, InstanceId]


@dataclass(frozen=True, slots=True)
class Standing:
    """The groups of a cluster, as they stand or as somebody imagines them."""

    layouts: Sequence[GroupLayout]
    specs: Specs
    first_id: GroupId
    """New groups are numbered from here, in the order of ``DropPlan.merges``."""
    used_blocks: Mapping[GroupId, int] = field(default_factory=dict)
    """What moves when a group merges."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a drop is for."""

    required_blocks: int
    """KV blocks that are to exist beside those that do."""
    pressed: Collection[GroupId] = ()
    """Groups that lack memory."""
    waiting_blocks: int = 0
    """Of the requirement, those of requests that wait: these run wherever there is memory. What
    pressed groups need beyond that is for what runs there, so first of all they merge themselves.
    """
    spare_blocks: int = 0
    """Memory that is there now for requests that wait."""
    patience_s: float = math.inf
    """After so long memory is free again by itself: no merge across hosts takes longer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What no plan does, whatever is wanted."""

    untouchable: Collection[GroupId] = ()
    """Groups that must not change now."""
    apart: Collection[Pair] = ()
    """Instances that come into no common group, because they do not reach each other."""
    max_group_size: int | None = None
    min_deep_gain: float = 0.0
    """Least share of the capacity of its groups that a merge into more than two stages adds."""
    head_cost_layers: int = 0
    """What the output head costs the last stage, in layers."""


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Merge:
    """Groups that become one."""

    old: tuple[GroupLayout, ...]
    new: GroupLayout
    gain_blocks: int
    """Capacity of ``new`` less the capacities of ``old``."""
    freed_bytes: int
    """Weight bytes that become KV memory, at least."""
    exchange_s: float = 0.0
    """How long KV is on its way between hosts, by what their links are said to carry."""


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What to do about missing memory. Groups that are not named stay as they are."""

    merges: tuple[Merge, ...]
    required_blocks: int
    enough: bool
    """False: nothing is left to free; relieve the KV otherwise and ask for more instances."""
    obstacle: str | None = None
    """Why some groups cannot merge, where it is not that they would gain nothing."""
    is_worth: bool = True
    """False: groups could merge, and would lose more than they gain; ``obstacle`` says what."""

    @property
    def gain_blocks(self) -> int:
        """KV blocks that the plan adds to the cluster."""
        return sum(merge.gain_blocks for merge in self.merges)

    @property
    def freed_bytes(self) -> int:
        """Weight bytes that the plan turns into KV memory."""
        return sum(merge.freed_bytes for merge in self.merges)

    @property
    def shortfall(self) -> str:
        """For people: why no more is freed."""
        why = "nothing is left to drop" if self.is_worth else "no drop is worth it"
        return why if self.obstacle is None else f"{why}: {self.obstacle}"


def plan_drop(standing: Standing, wanted: Wanted, limits: Limits = NO_LIMITS) -> DropPlan:
    """Merge as few instances as possible until what is wanted is there. O(N log N)."""
    specs, required = standing.specs, wanted.required_blocks
    cache = MergeCache(specs, limits.min_deep_gain, limits.head_cost_layers)
    short, fixed = frozenset(wanted.pressed), frozenset(limits.untouchable)
    groups = [
        PlannedGroup((layout,), cache.shape_of(layout), layout.group_id not in short)
        for layout in standing.layouts
        if layout.group_id not in fixed
    ]

    def takes_s(old: tuple[GroupLayout, ...], shape: Shape) -> float:
        if not queue.has_links:
            return 0.0
        return exchange_s(old, _stages_of(old, shape), standing.used_blocks, specs)

    def is_worth(one: PlannedGroup, other: PlannedGroup, merged: Shape) -> bool:
        patience_s = wanted.patience_s
        return math.isinf(patience_s) or takes_s(one.old + other.old, merged) <= patience_s

    may_meet = _together(limits.apart)
    queue = PlacedQueue(groups, cache, specs, limits.max_group_size, is_worth, may_meet)

    needed = required - min(wanted.waiting_blocks, wanted.spare_blocks, required)
    needed_there = max(0, required - wanted.waiting_blocks) if short else 0
    gain = _merge_until(queue, needed, needed_there)
    changed = [group for group in queue.drain() if len(group.old) > 1]
    merges = tuple(
        [
            _named(group, GroupId(standing.first_id + number), takes_s(group.old, group.shape))
            for number, group in enumerate(changed)
        ]
    )
    return DropPlan(merges, required, gain >= needed, _obstacle_of(groups, specs))


def _together(apart: Collection[Pair]) -> Meet | None:
    """Whether two groups have no such pair between them. None: no two have."""
    if not apart:
        return None
    without: dict[InstanceId, set[InstanceId]] = {}
    for one, other in apart:
        without.setdefault(one, set()).add(other)
        without.setdefault(other, set()).add(one)

    def may_meet(one: PlannedGroup, other: PlannedGroup) -> bool:
        members = {member for layout in other.old for member in layout.members}
        return not any(
            without.get(member, _NOBODY) & members
            for layout in one.old
            for member in layout.members
        )

    return may_meet


def _obstacle_of(groups: Sequence[PlannedGroup], specs: Specs) -> str | None:
    """Why some of the groups could not merge, whatever they would gain."""
    leaders = [specs[group.old[0].leader] for group in groups]
    sizes = (spec.tensor_parallel_size for spec in leaders)
    return weights_obstacle(leaders) or ranks_obstacle(sizes)


def _merge_until(queue: PlacedQueue, needed: int, needed_there: int) -> int:
    """Merge until so many blocks are gained, and so many where memory is short; the gain."""
    gain = gain_there = 0
    while gain < needed or gain_there < needed_there:
        pair = queue.pop_pair(is_pressed=gain_there < needed_there)
        if pair is None and gain_there < needed_there:
            needed_there = 0  # they cannot merge: what they lack may wait, and run elsewhere
            continue
        if pair is None:
            break
        a, b, merged = pair
        more = merged.capacity_blocks - a.shape.capacity_blocks - b.shape.capacity_blocks
        has_spare = a.has_spare and b.has_spare
        gain += more
        gain_there += 0 if has_spare else more
        queue.push(PlannedGroup(a.old + b.old, merged, has_spare))
    return gain


def _named(group: PlannedGroup, group_id: GroupId, takes_s: float) -> Merge:
    """A group of the finished plan, with its instances' names."""
    old, shape, _ = group
    layout = GroupLayout(group_id, _stages_of(old, shape))
    return Merge(old, layout, shape.gain_blocks, shape.freed_bytes, takes_s)


def _stages_of(old: tuple[GroupLayout, ...], shape: Shape) -> tuple[Stage, ...]:
    members = [member for layout in old for member, _ in layout.stages]
    return tuple([Stage(members[index], layers) for index, layers in shape.stages])


def blocks_for_bytes(num_bytes: int, specs: Mapping[InstanceId, InstanceSpec]) -> int:
    """The requirement in blocks when somebody asks for bytes (``POST /kunserve/drop``)."""
    block_bytes = max(spec.num_layers * spec.unit_bytes for spec in specs.values())
    return max(1, -(-num_bytes // block_bytes))
