"""Which instance computes which layers."""

from dataclasses import dataclass
from typing import NamedTuple

from kunserve.core.ids import GroupId, InstanceId


class LayerRange(NamedTuple):
    """Layers [first, end)."""

    first: int
    end: int

    @property
    def num_layers(self) -> int:
        """Layers in the range; 0 when empty."""
        return max(0, self.end - self.first)

    def intersect(self, other: "LayerRange") -> "LayerRange":
        """The layers in both ranges (possibly empty)."""
        return LayerRange(max(self.first, other.first), min(self.end, other.end))

    def covers(self, other: "LayerRange") -> bool:
        """Whether every layer of ``other`` is here."""
        return other.num_layers == 0 or (self.first <= other.first and other.end <= self.end)

    def without(self, other: "LayerRange") -> tuple["LayerRange", ...]:
        """The layers of this range that are not in ``other``: at most two ranges, in order."""
        if not self.intersect(other).num_layers:
            return (self,) if self.num_layers else ()
        parts = (LayerRange(self.first, other.first), LayerRange(other.end, self.end))
        return tuple(part for part in parts if part.num_layers)


class VocabRange(NamedTuple):
    """Rows [first, end) of the output head: one for each token of the vocabulary."""

    first: int
    end: int

    @property
    def num_rows(self) -> int:
        """Rows in the range; 0 when empty."""
        return self.end - self.first


class Stage(NamedTuple):
    """One instance's share of a group's model."""

    instance_id: InstanceId
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Instances that together hold one whole model, in layer order. The first is the leader."""

    group_id: GroupId
    stages: tuple[Stage, ...]

    @property
    def leader(self) -> InstanceId:
        """The instance that schedules for the group (stage 0)."""
        return self.stages[0].instance_id

    @property
    def members(self) -> tuple[InstanceId, ...]:
        """The group's instances, in stage order."""
        return tuple(stage.instance_id for stage in self.stages)

    def layers_of(self, instance_id: InstanceId) -> LayerRange | None:
        """The layers that the instance computes here, or None if it is no member."""
        for stage in self.stages:
            if stage.instance_id == instance_id:
                return stage.layers
        return None

    def check(self, num_layers: int) -> None:
        """Assert that the stages are distinct and cover [0, num_layers) without a gap."""
        assert len(set(self.members)) == len(self.stages), self
        position = 0
        for stage in self.stages:
            assert stage.layers.first == position and stage.layers.num_layers > 0, self
            position = stage.layers.end
        assert position == num_layers, (self, num_layers)
