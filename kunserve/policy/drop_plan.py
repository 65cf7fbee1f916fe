"""Which groups merge to free memory: the paper's Algorithm 1 (section 4.1).

    Q <- groups, keyed by number of instances
    while freed < R:
        if |Q| = 1: return plan, not enough        -> KV relief, and a scale-up request
        a, b <- pop two smallest of Q
        freed += what one copy of the parameters gives when a and b share theirs
        push a + b

Fewest instances per group, because the more stages the slower: stages of a deep pipeline read the
weights and pay the host once per microbatch. What a merge frees shrinks with depth, since a copy
is shared by ever more; one into more than two stages must be worth it (``min_deep_gain``).

Freed memory is counted in KV blocks, ``capacity(a + b) - capacity(a) - capacity(b)``, which is what
the requirement is made of and what uneven memory budgets make differ from bytes.
"""

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.capacity import Specs, stage_blocks, stage_units
from kunserve.policy.layer_split import Member, Prefer, split_layers
from kunserve.policy.moves import find_obstacle

MAX_PARTNERS = 8
"""Partners tried for a group whose merge with the smallest one gains nothing."""

MAX_EXACT_KINDS = 16
"""Different budgets beyond which splits are worked out once for budgets within 6 % of another.

What is gained is still counted for the very instances.
"""


@dataclass(frozen=True, slots=True)
class Merge:
    """Groups that become one."""

    old: tuple[GroupLayout, ...]
    new: GroupLayout
    gain_blocks: int
    """Capacity of ``new`` less the capacities of ``old``."""
    freed_bytes: int
    """Weight bytes that become KV memory, at least."""


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What to do about missing memory. Groups that are not named stay as they are."""

    merges: tuple[Merge, ...]
    required_blocks: int
    enough: bool
    """False: nothing is left to free; relieve the KV otherwise and ask for more instances."""

    @property
    def gain_blocks(self) -> int:
        """KV blocks that the plan adds to the cluster."""
        return sum(merge.gain_blocks for merge in self.merges)

    @property
    def freed_bytes(self) -> int:
        """Weight bytes that the plan turns into KV memory."""
        return sum(merge.freed_bytes for merge in self.merges)


_Kind: TypeAlias = int
"""Instances of one kind have equal memory."""


_Held: TypeAlias = tuple[tuple[LayerRange, _Kind], ...]
_Stages: TypeAlias = tuple[tuple[int, LayerRange], ...]


class _Shape(NamedTuple):
    """A group but for its instances' names: merging equal shapes gives equal results."""

    key: int
    """Equal for equal shapes made the same way."""
    held: _Held
    """What each member holds before the plan."""
    stages: _Stages
    """(index into ``held``, layers once merged), in stage order."""
    capacity_blocks: int
    gain_blocks: int
    """Less the capacities before the plan."""
    freed_bytes: int


class _Group(NamedTuple):
    """A group of the plan so far."""

    old: tuple[GroupLayout, ...]
    """Their members, in order, are those of ``shape.held``."""
    shape: _Shape


class _Rank(NamedTuple):
    """The order in which groups merge: Algorithm 1's key, then its ties, which it leaves open.

    Groups that lack memory merge first, so that the gain is where the queue is; then groups of
    like capacity, since the scarcest stage bounds the merged group; then the oldest.
    """

    num_instances: int
    has_spare: bool
    capacity_blocks: int


class _Queue:
    """Algorithm 1's priority queue of groups (by index). Equal ranks leave in order of entry.

    A heap of ranks rather than of groups: a cluster has thousands of groups, but few ranks.
    """

    def __init__(self) -> None:
        self._groups: dict[_Rank, deque[int]] = {}
        self._ranks: list[_Rank] = []
        self._num_groups = 0

    def __len__(self) -> int:
        return self._num_groups

    def push(self, rank: _Rank, index: int) -> None:
        groups = self._groups.get(rank)
        if groups is None:
            groups = self._groups[rank] = deque()
            heapq.heappush(self._ranks, rank)
        groups.append(index)
        self._num_groups += 1

    def push_back(self, rank: _Rank, index: int) -> None:
        """Undo a pop: the group goes before its equals."""
        self.push(rank, index)
        self._groups[rank].rotate(1)

    def first(self) -> _Rank:
        return self._ranks[0]

    def pop(self) -> tuple[_Rank, int]:
        rank = self._ranks[0]
        groups = self._groups[rank]
        index = groups.popleft()
        self._num_groups -= 1
        if not groups:
            del self._groups[heapq.heappop(self._ranks)]
        return rank, index

    def drain(self) -> list[int]:
        """All groups in order."""
        return [self.pop()[1] for _ in range(len(self))]


def plan_drop(
    layouts: Sequence[GroupLayout],
    specs: Specs,
    required_blocks: int,
    *,
    first_id: GroupId,
    pressed: Collection[GroupId] = (),
    untouchable: Collection[GroupId] = (),
    max_group_size: int | None = None,
    min_deep_gain: float = 0.0,
    head_cost_layers: int = 0,
) -> DropPlan:
    """Merge as few instances as possible until ``required_blocks`` more KV blocks exist.

    New groups are numbered from ``first_id`` in the order of ``DropPlan.merges``. ``pressed``
    groups lack memory; ``untouchable`` ones are in transition. Merges into more than two stages
    add at least ``min_deep_gain`` of the capacity that their groups have. O(N log N), and merges
    of equal shapes are worked out once.
    """
    shapes = _Shapes(specs, min_deep_gain, head_cost_layers)
    groups = [_Group((layout,), shapes.of_layout(layout)) for layout in layouts]
    queue = _Queue()
    short, fixed = frozenset(pressed), frozenset(untouchable)
    for index, ((layout,), shape) in enumerate(groups):
        group_id = layout.group_id
        if group_id not in fixed:
            rank = _Rank(len(shape.stages), group_id not in short, shape.capacity_blocks)
            queue.push(rank, index)

    refused: list[tuple[_Rank, int]] = []
    has_merged = False
    gain = 0
    while gain < required_blocks:
        if len(queue) < 2:
            if not (has_merged and refused):
                break
            # What found no partner may gain with the groups made since.
            for rank, index in refused:
                queue.push(rank, index)
            refused, has_merged = [], False
            continue
        rank, index = queue.pop()
        old, shape = groups[index]
        partner = _take_partner(queue, rank, shape, groups, shapes, max_group_size)
        if partner is None:
            refused.append((rank, index))
            continue
        other_rank, other_index, merged = partner
        gain += merged.capacity_blocks - rank.capacity_blocks - other_rank.capacity_blocks
        has_spare = rank.has_spare and other_rank.has_spare
        queue.push(_Rank(len(merged.stages), has_spare, merged.capacity_blocks), len(groups))
        groups.append(_Group(old + groups[other_index].old, merged))
        has_merged = True

    left = [groups[index] for index in (*queue.drain(), *(index for _, index in refused))]
    changed = [group for group in left if len(group.old) > 1]
    merges = tuple(
        [_name(group, GroupId(first_id + number)) for number, group in enumerate(changed)]
    )
    return DropPlan(merges, required_blocks, gain >= required_blocks)


def _take_partner(
    queue: _Queue,
    rank: _Rank,
    shape: _Shape,
    groups: Sequence[_Group],
    shapes: "_Shapes",
    max_group_size: int | None,
) -> tuple[_Rank, int, _Shape] | None:
    """Take the first group that gives a gain when merged with ``shape``; what they make is last."""
    refused: list[tuple[_Rank, int]] = []
    partner: tuple[_Rank, int, _Shape] | None = None
    while queue and len(refused) < MAX_PARTNERS:
        size = rank.num_instances + queue.first().num_instances
        if max_group_size is not None and size > max_group_size:
            break
        other_rank, other = queue.pop()
        merged = shapes.merged(shape, groups[other].shape)
        if merged is not None:
            partner = other_rank, other, merged
            break
        refused.append((other_rank, other))
    for other_rank, other in reversed(refused):
        queue.push_back(other_rank, other)
    return partner


def _name(group: _Group, group_id: GroupId) -> Merge:
    """A group of the finished plan, with its instances' names."""
    old, shape = group
    members = [member for layout in old for member, _ in layout.stages]
    stages = tuple([Stage(members[index], layers) for index, layers in shape.stages])
    return Merge(old, GroupLayout(group_id, stages), shape.gain_blocks, shape.freed_bytes)


class _Shapes:
    """Remembers what each pair of shapes makes, during one plan."""

    def __init__(self, specs: Specs, min_deep_gain: float, head_cost_layers: int) -> None:
        self._specs = specs
        self._min_deep_gain = min_deep_gain
        self._head_cost_layers = head_cost_layers
        self._kinds: dict[tuple[int, int, int, int], _Kind] = {}
        self._examples: list[InstanceSpec] = []
        self._layouts: dict[tuple[tuple[LayerRange, _Kind], ...], _Shape] = {}
        self._merged: dict[tuple[int, int], _Shape | None] = {}
        self._splits: dict[tuple[_Held, Prefer], _Stages | None] = {}
        self._near: dict[tuple[int, int], _Kind] = {}

    def _kind(self, spec: InstanceSpec) -> _Kind:
        memory = (spec.kv_units, spec.layer_bytes, spec.unit_bytes, spec.granule_bytes)
        kind = self._kinds.get(memory)
        if kind is None:
            kind = self._kinds[memory] = len(self._examples)
            self._examples.append(spec)
        return kind

    def of_layout(self, layout: GroupLayout) -> _Shape:
        """The shape of a group as it is."""
        specs = self._specs
        held = tuple([(layers, self._kind(specs[member])) for member, layers in layout.stages])
        shape = self._layouts.get(held)
        if shape is None:
            stages = tuple((index, layers) for index, (layers, _) in enumerate(held))
            capacity = self._capacity(held, stages)
            shape = _Shape(len(self._layouts), held, stages, capacity, 0, 0)
            self._layouts[held] = shape
        return shape

    def merged(self, one: _Shape, other: _Shape) -> _Shape | None:
        """What the two make, or None when they cannot share the layers with a gain, or their
        members would refuse: KV could not be exchanged in what is freed.

        A balanced split is wanted; the split of greatest capacity is the second try, for
        instances of very different memory.
        """
        pair = (one.key, other.key)
        if pair not in self._merged:
            shape = self._merge(one, other, "balance") or self._merge(one, other, "capacity")
            self._merged[pair] = shape
        return self._merged[pair]

    def _merge(self, one: _Shape, other: _Shape, prefer: Prefer) -> _Shape | None:
        held = one.held + other.held
        stages = self._split(held, prefer)
        if stages is None:
            return None
        capacity = self._capacity(held, stages)
        before = one.capacity_blocks + other.capacity_blocks
        gain = capacity - before
        if gain <= 0 or (len(stages) > 2 and gain < self._min_deep_gain * before):
            return None
        if self._has_obstacle(held, stages):
            return None
        gain += one.gain_blocks + other.gain_blocks
        # Shapes of layouts count up from 0, made ones down from -1.
        key = -1 - len(self._merged)
        return _Shape(key, held, stages, capacity, gain, self._freed_bytes(held, stages))

    def _split(self, held: _Held, prefer: Prefer) -> _Stages | None:
        """The layers of each member; chosen for nearly their memory when kinds are many."""
        if len(self._examples) > MAX_EXACT_KINDS:
            held = tuple([(layers, self._nearly(kind)) for layers, kind in held])
        if (held, prefer) not in self._splits:
            members = [
                Member(InstanceId(index), layers, self._examples[kind])
                for index, (layers, kind) in enumerate(held)
            ]
            split = split_layers(
                members,
                members[0].spec.num_layers,
                prefer=prefer,
                head_cost_layers=self._head_cost_layers,
            )
            self._splits[held, prefer] = (
                None if split is None else tuple([(int(index), layers) for index, layers in split])
            )
        return self._splits[held, prefer]

    def _nearly(self, kind: _Kind) -> _Kind:
        """The first kind seen whose KV memory has the same five leading bits."""
        units = self._examples[kind].kv_units
        shift = max(0, units.bit_length() - 5)
        return self._near.setdefault((units >> shift, shift), kind)

    def _capacity(self, held: _Held, stages: _Stages) -> int:
        return min(stage_blocks(self._examples[held[index][1]], layers) for index, layers in stages)

    def _has_obstacle(self, held: _Held, stages: _Stages) -> bool:
        """Whether a member would refuse to become this (``moves.find_obstacle``)."""
        specs = {InstanceId(index): self._examples[kind] for index, (_, kind) in enumerate(held)}
        old: list[GroupLayout] = []
        for index, (layers, _) in enumerate(held):
            stage = Stage(InstanceId(index), layers)
            if layers.first == 0:
                old.append(GroupLayout(GroupId(len(old)), (stage,)))
            else:
                old[-1] = GroupLayout(old[-1].group_id, (*old[-1].stages, stage))
        new = GroupLayout(
            GroupId(len(old)), tuple([Stage(InstanceId(index), layers) for index, layers in stages])
        )
        return find_obstacle(tuple(specs), old, (new,), specs) is not None

    def _freed_bytes(self, held: _Held, stages: _Stages) -> int:
        freed_bytes = 0
        for index, layers in stages:
            before, kind = held[index]
            spec = self._examples[kind]
            units = stage_units(spec, layers) - stage_units(spec, before)
            freed_bytes += units * spec.unit_bytes
        return freed_bytes


def blocks_for_bytes(num_bytes: int, specs: Mapping[InstanceId, InstanceSpec]) -> int:
    """The requirement in blocks when somebody asks for bytes (``POST /kunserve/drop``)."""
    block_bytes = max(spec.num_layers * spec.unit_bytes for spec in specs.values())
    return max(1, -(-num_bytes // block_bytes))
