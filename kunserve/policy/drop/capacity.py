"""How many KV blocks a group has room for: the quantity that a drop buys (paper section 4.1).

A stage's room is counted in *units* (one layer's K and V of one block). A group's capacity in
blocks is the minimum over its stages of units // layers held, since a block needs room on every
stage.
"""

from collections.abc import Mapping

from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.core.snapshots import InstanceSpec

Specs = Mapping[InstanceId, InstanceSpec]


def group_capacity_blocks(layout: GroupLayout, specs: Specs) -> int:
    """Blocks that the group has room for: its scarcest stage's."""
    return min(
        specs[member].blocks_when_holding(layers.num_layers) for member, layers in layout.stages
    )


def undropped_capacity_blocks(layout: GroupLayout, specs: Specs) -> int:
    """Blocks that the group's members have room for when each holds the whole model."""
    return sum(specs[m].kv_units // specs[m].num_layers for m in layout.members)
