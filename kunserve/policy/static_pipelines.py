"""Pipelines that stand from the start: vLLM's pipeline parallelism, a rival of dropping."""

from collections.abc import Sequence
from typing import NamedTuple

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.policy.capacity import Specs
from kunserve.policy.layer_split import Member, split_layers


class Pipeline(NamedTuple):
    """Groups of one instance each that become one group."""

    old: tuple[GroupLayout, ...]
    new: GroupLayout


def plan_pipelines(
    alone: Sequence[GroupLayout],
    specs: Specs,
    num_stages: int,
    *,
    first_id: GroupId,
    head_cost_layers: int,
) -> tuple[Pipeline, ...]:
    """Pipelines of ``num_stages`` instances, host by host, in order of their numbers.

    A rest stays alone. ``alone`` are groups of one instance. New groups are numbered from
    ``first_id``. Instances that cannot share the layers stay alone.
    """

    def place_of(layout: GroupLayout) -> tuple[str, str, InstanceId]:
        place = specs[layout.leader].place
        return place.rack, place.host, layout.leader

    ordered = sorted(alone, key=place_of)
    pipelines: list[Pipeline] = []
    for first in range(0, len(ordered) - num_stages + 1, num_stages):
        old = tuple(ordered[first : first + num_stages])
        members = [Member(one.leader, one.stages[0].layers, specs[one.leader]) for one in old]
        num_layers = members[0].spec.num_layers
        stages = split_layers(members, num_layers, head_cost_layers=head_cost_layers)
        if stages is not None:
            new = GroupLayout(GroupId(first_id + len(pipelines)), stages)
            pipelines.append(Pipeline(old, new))
    return tuple(pipelines)
