"""What groups make when they merge, worked out once for all that are alike.

A cluster has few kinds of groups. A *shape* is a group without its instances'
names: how much memory each has, and which layers. Equal shapes merge into equal shapes, so that
a plan for many groups splits layers a few times only.
"""

from math import frexp
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.capacity import Specs
from kunserve.policy.drop.layer_split import Member, Prefer, split_layers
from kunserve.policy.exchange.moves import find_obstacle

MAX_EXACT_KINDS = 16
"""With more different budgets than this, budgets within 6 % share one computed split.

What a merge gains is still counted for the very instances.
"""
NEAR_STEPS_PER_DOUBLING = 16
"""Budgets within one such step are within 6 %."""

Kind: TypeAlias = int
"""Instances of one kind have equal memory."""
Held: TypeAlias = tuple[tuple[LayerRange, Kind], ...]
"""What each instance of a group holds."""
Stages: TypeAlias = tuple[tuple[int, LayerRange], ...]
"""(index into a ``Held``, layers once merged), in stage order."""


class Shape(NamedTuple):
    """A group but for its instances' names."""

    key: int
    """Equal for equal shapes made the same way."""
    held: Held
    """Before the plan."""
    stages: Stages
    capacity_blocks: int
    gain_blocks: int
    """Less the capacities before the plan."""
    freed_bytes: int


class MergeCache:
    """Remembers what each pair of shapes makes, during one plan."""

    def __init__(self, specs: Specs, min_deep_gain: float, head_cost_layers: int) -> None:
        self._specs = specs
        self._min_deep_gain = min_deep_gain
        self._head_cost_layers = head_cost_layers
        self._kinds: dict[tuple[int, ...], Kind] = {}
        self._examples: list[InstanceSpec] = []
        """One instance of each kind."""
        self._layouts: dict[Held, Shape] = {}
        self._merged: dict[tuple[int, int], Shape | None] = {}
        self._splits: dict[tuple[Held, Prefer], Stages | None] = {}
        self._near: dict[tuple[int, int], Kind] = {}

    def shape_of(self, layout: GroupLayout) -> Shape:
        """The shape of a group as it is."""
        specs = self._specs
        held = tuple([(layers, self._kind_of(specs[member])) for member, layers in layout.stages])
        shape = self._layouts.get(held)
        if shape is None:
            stages = tuple((index, layers) for index, (layers, _) in enumerate(held))
            capacity = self._capacity_blocks(held, stages)
            shape = Shape(len(self._layouts), held, stages, capacity, 0, 0)
            self._layouts[held] = shape
        return shape

    def merge(self, one: Shape, other: Shape) -> Shape | None:
        """What the two make; None if they cannot share the layers, or gain nothing by it.

        Or if their members would refuse, because KV could not be exchanged in what is freed. A
        balanced split is wanted. Instances of very different memory may need the split of
        greatest capacity.
        """
        pair = (one.key, other.key)
        if pair not in self._merged:
            shape = self._merge(one, other, "balance") or self._merge(one, other, "capacity")
            self._merged[pair] = shape
        return self._merged[pair]

    def _merge(self, one: Shape, other: Shape, prefer: Prefer) -> Shape | None:
        held = one.held + other.held
        stages = self._split(held, prefer)
        if stages is None:
            return None
        capacity = self._capacity_blocks(held, stages)
        before = one.capacity_blocks + other.capacity_blocks
        gain = capacity - before
        if gain <= 0 or (len(stages) > 2 and gain < self._min_deep_gain * before):
            return None
        if self._has_obstacle(held, stages):
            return None
        gain += one.gain_blocks + other.gain_blocks
        # Shapes of layouts count up from 0, made ones down from -1.
        key = -1 - len(self._merged)
        return Shape(key, held, stages, capacity, gain, self._freed_bytes(held, stages))

    def _split(self, held: Held, prefer: Prefer) -> Stages | None:
        if len(self._examples) > MAX_EXACT_KINDS:
            held = tuple([(layers, self._near_kind(kind)) for layers, kind in held])
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

    def _kind_of(self, spec: InstanceSpec) -> Kind:
        ranks, shared = spec.tensor_parallel_size, spec.shared_weights_bytes
        sizes = (spec.kv_units, spec.layer_bytes, spec.unit_bytes, spec.granule_bytes)
        memory = (*sizes, ranks, shared)
        kind = self._kinds.get(memory)
        if kind is None:
            kind = self._kinds[memory] = len(self._examples)
            self._examples.append(spec)
        return kind

    def _near_kind(self, kind: Kind) -> Kind:
        """The first kind seen whose KV memory lies in the same step."""
        fraction, doublings = frexp(self._examples[kind].kv_units)  # fraction in [1/2, 1)
        step = int(2.0 * fraction * NEAR_STEPS_PER_DOUBLING)
        return self._near.setdefault((doublings, step), kind)

    def _capacity_blocks(self, held: Held, stages: Stages) -> int:
        return min(
            self._examples[held[index][1]].blocks_when_holding(layers.num_layers)
            for index, layers in stages
        )

    def _has_obstacle(self, held: Held, stages: Stages) -> bool:
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

    def _freed_bytes(self, held: Held, stages: Stages) -> int:
        freed_bytes = 0
        for index, layers in stages:
            before, kind = held[index]
            spec = self._examples[kind]
            units = spec.units_when_holding(layers.num_layers)
            freed_bytes += (units - spec.units_when_holding(before.num_layers)) * spec.unit_bytes
        return freed_bytes
