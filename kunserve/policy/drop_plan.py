"""Which groups merge to free memory: the paper's Algorithm 1 (section 4.1).

    Q <- groups, keyed by number of instances
    while freed < R:
        if |Q| = 1: return plan, not enough        -> KV relief, and a scale-up request
        a, b <- pop two smallest of Q
        freed += what one copy of the parameters gives when a and b share theirs
        push a + b

Fewest instances per group, because the more stages the slower. Freed memory is counted in KV
blocks, ``capacity(a + b) - capacity(a) - capacity(b)``, which is what the requirement is made of
and what uneven memory budgets make differ from bytes.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.capacity import Specs, stage_blocks, stage_units
from kunserve.policy.layer_split import Member, Prefer, split_layers

MAX_PARTNERS = 8
"""Partners tried for a group whose merge with the smallest one gains nothing."""


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


class _Shape(NamedTuple):
    """A group but for its instances' names: merging equal shapes gives equal results."""

    key: int
    """Equal for equal shapes made the same way."""
    held: tuple[tuple[LayerRange, _Kind], ...]
    """What each member holds now, in the order of ``_Group.members``."""
    stages: tuple[tuple[int, LayerRange], ...]
    """(index into ``held``, layers once merged), in stage order."""
    capacity_blocks: int


class _Group(NamedTuple):
    """A group of the plan so far."""

    members: tuple[InstanceId, ...]
    old: tuple[GroupLayout, ...]
    shape: _Shape


_Entry: TypeAlias = tuple[int, bool, int, int, _Group]
"""(instances, whether it has memory to spare, capacity, position, group): the heap's order.

Algorithm 1 leaves ties open. Groups that lack memory merge first, so that the gain is where the
queue is; then groups of like capacity, since the scarcest stage bounds the merged group.
"""


def plan_drop(
    layouts: Sequence[GroupLayout],
    specs: Specs,
    required_blocks: int,
    *,
    first_id: GroupId,
    pressed: Collection[GroupId] = (),
    untouchable: Collection[GroupId] = (),
    max_group_size: int | None = None,
    head_cost_layers: int = 0,
) -> DropPlan:
    """Merge as few instances as possible until ``required_blocks`` more KV blocks exist.

    New groups are numbered from ``first_id`` in the order of ``DropPlan.merges``. ``pressed``
    groups lack memory; ``untouchable`` ones are in transition. O(N log N) and N / 2 distinct
    merges at most: merges of equal shapes are worked out once.
    """
    shapes = _Shapes(specs, head_cost_layers)
    short, fixed = frozenset(pressed), frozenset(untouchable)
    heap: list[_Entry] = []
    for position, layout in enumerate(layouts):
        if layout.group_id not in fixed:
            shape = shapes.of_layout(layout)
            group = _Group(layout.members, (layout,), shape)
            spare = layout.group_id not in short
            heap.append((len(layout.stages), spare, shape.capacity_blocks, position, group))
    heapq.heapify(heap)

    position = len(layouts)
    settled: list[_Group] = []
    gain = 0
    while gain < required_blocks and len(heap) > 1:
        size, spare, capacity, _, group = heapq.heappop(heap)
        found = _merge_with_smallest(heap, size, group, shapes, max_group_size)
        if found is None:
            settled.append(group)
            continue
        merged, (_, other_spare, other_capacity, _, _) = found
        gain += merged.shape.capacity_blocks - capacity - other_capacity
        entry = (
            len(merged.members),
            spare and other_spare,
            merged.shape.capacity_blocks,
            position,
            merged,
        )
        heapq.heappush(heap, entry)
        position += 1

    changed = [entry for entry in sorted(heap) if len(entry[4].old) > 1]
    groups = [g for g in settled if len(g.old) > 1] + [entry[4] for entry in changed]
    merges = tuple(
        shapes.finish(group, GroupId(first_id + number)) for number, group in enumerate(groups)
    )
    return DropPlan(merges, required_blocks, gain >= required_blocks)


def _merge_with_smallest(
    heap: list[_Entry], size: int, group: _Group, shapes: "_Shapes", max_group_size: int | None
) -> tuple[_Group, _Entry] | None:
    """Merge with the smallest group of the heap that gives a gain, and take that out of it."""
    refused: list[_Entry] = []
    found: tuple[_Group, _Entry] | None = None
    while heap and len(refused) < MAX_PARTNERS:
        if max_group_size is not None and size + heap[0][0] > max_group_size:
            break
        entry = heapq.heappop(heap)
        other = entry[4]
        shape = shapes.merged(group.shape, other.shape)
        if shape is not None:
            merged = _Group(group.members + other.members, group.old + other.old, shape)
            found = merged, entry
            break
        refused.append(entry)
    for entry in refused:
        heapq.heappush(heap, entry)
    return found


class _Shapes:
    """Remembers what each pair of shapes makes, during one plan."""

    def __init__(self, specs: Specs, head_cost_layers: int) -> None:
        self._specs = specs
        self._head_cost_layers = head_cost_layers
        self._kinds: dict[tuple[int, int, int, int], _Kind] = {}
        self._examples: list[InstanceSpec] = []
        self._layouts: dict[tuple[tuple[LayerRange, _Kind], ...], _Shape] = {}
        self._merged: dict[tuple[int, int], _Shape | None] = {}

    def _kind(self, instance_id: InstanceId) -> _Kind:
        spec = self._specs[instance_id]
        memory = (spec.kv_units, spec.layer_bytes, spec.unit_bytes, spec.granule_bytes)
        kind = self._kinds.get(memory)
        if kind is None:
            kind = self._kinds[memory] = len(self._examples)
            self._examples.append(spec)
        return kind

    def of_layout(self, layout: GroupLayout) -> _Shape:
        """The shape of a group as it is."""
        held = tuple([(layers, self._kind(instance)) for instance, layers in layout.stages])
        shape = self._layouts.get(held)
        if shape is None:
            stages = tuple((index, layers) for index, (layers, _) in enumerate(held))
            shape = _Shape(len(self._layouts), held, stages, self._capacity(held, stages))
            self._layouts[held] = shape
        return shape

    def merged(self, one: _Shape, other: _Shape) -> _Shape | None:
        """What the two make, or None when they cannot share the layers with a gain.

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
        members = [
            Member(InstanceId(index), layers, self._examples[kind])
            for index, (layers, kind) in enumerate(held)
        ]
        num_layers = members[0].spec.num_layers
        split = split_layers(
            members, num_layers, prefer=prefer, head_cost_layers=self._head_cost_layers
        )
        if split is None:
            return None
        stages = tuple((int(index), layers) for index, layers in split)
        capacity = self._capacity(held, stages)
        if capacity <= one.capacity_blocks + other.capacity_blocks:
            return None
        return _Shape(self._next_key(), held, stages, capacity)

    def _next_key(self) -> int:
        # Shapes of layouts count up from 0, made ones down from -1.
        return -1 - len(self._merged)

    def _capacity(
        self,
        held: Sequence[tuple[LayerRange, _Kind]],
        stages: Sequence[tuple[int, LayerRange]],
    ) -> int:
        return min(stage_blocks(self._examples[held[index][1]], layers) for index, layers in stages)

    def finish(self, group: _Group, group_id: GroupId) -> Merge:
        """The merge of a group of the finished plan."""
        shape = group.shape
        old_capacity = sum(self.of_layout(layout).capacity_blocks for layout in group.old)
        freed_bytes = 0
        for index, layers in shape.stages:
            held, kind = shape.held[index]
            spec = self._examples[kind]
            units = stage_units(spec, layers) - stage_units(spec, held)
            freed_bytes += units * spec.unit_bytes
        new = GroupLayout(
            group_id,
            tuple([Stage(group.members[index], layers) for index, layers in shape.stages]),
        )
        return Merge(group.old, new, shape.capacity_blocks - old_capacity, freed_bytes)


def blocks_for_bytes(num_bytes: int, specs: Mapping[InstanceId, InstanceSpec]) -> int:
    """The requirement in blocks when somebody asks for bytes (``POST /kunserve/drop``)."""
    block_bytes = max(spec.num_layers * spec.unit_bytes for spec in specs.values())
    return max(1, -(-num_bytes // block_bytes))
