"""How many KV blocks a group has room for: the quantity that a drop buys (paper section 4.1).

A stage's room is counted in *units* (one layer's K and V of one block). A group's capacity in
blocks is the minimum over its stages of units // layers held, since a block needs room on every
stage.
"""

from collections.abc import Mapping

from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.snapshots import InstanceSpec

Specs = Mapping[InstanceId, InstanceSpec]


def stage_units(spec: InstanceSpec, layers: LayerRange) -> int:
    """KV units of an instance that holds exactly ``layers``: what is surely freed, no more.

    The layers before and after ``layers`` are two runs (one on the first and the last stage).
    Only granules wholly inside a run are freed, so a run of b bytes frees at least
    b // granule - 1 granules however it lies.
    """
    granules = 0
    for num_dropped in (layers.first, spec.num_layers - layers.end):
        granules += max(0, num_dropped * spec.layer_bytes // spec.granule_bytes - 1)
    return spec.kv_units + granules * spec.granule_bytes // spec.unit_bytes


def stage_blocks(spec: InstanceSpec, layers: LayerRange) -> int:
    """Blocks of ``layers`` that the instance has room for."""
    return stage_units(spec, layers) // layers.num_layers


def group_capacity_blocks(layout: GroupLayout, specs: Specs) -> int:
    """Blocks that the group has room for: its scarcest stage's."""
    return min(stage_blocks(specs[stage.instance_id], stage.layers) for stage in layout.stages)


def undropped_capacity_blocks(layout: GroupLayout, specs: Specs) -> int:
    """Blocks that the group's members have room for when each holds the whole model."""
    return sum(specs[m].kv_units // specs[m].num_layers for m in layout.members)
