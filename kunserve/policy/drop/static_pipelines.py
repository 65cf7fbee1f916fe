"""Pipelines that stand from the start: vLLM's pipeline parallelism, a rival of dropping."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.policy.drop.capacity import Specs
from kunserve.policy.drop.layer_split import Member, split_layers


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
    apart: Collection[tuple[InstanceId, InstanceId]] = (),
) -> tuple[Pipeline, ...]:
    """Pipelines of ``num_stages`` instances, host by host, in order of their numbers.

    A rest stays alone. ``alone`` are groups of one instance. New groups are numbered from
    ``first_id``. Instances that cannot share the layers stay alone. Those that are to stay
    ``apart``, because they do not reach each other, come into no common pipeline.
    """

    def place_of(layout: GroupLayout) -> tuple[str, str, InstanceId]:
        place = specs[layout.leader].place
        return place.rack, place.host, layout.leader

    waiting = {layout.leader: layout for layout in sorted(alone, key=place_of)}
    cut = {frozenset(pair) for pair in apart}
    pipelines: list[Pipeline] = []
    while len(waiting) >= num_stages:
        old = _first_together(waiting.values(), num_stages, cut)
        is_whole = len(old) == num_stages
        for layout in old if is_whole else old[:1]:
            del waiting[layout.leader]
        if not is_whole:
            continue
        members = [Member(one.leader, one.stages[0].layers, specs[one.leader]) for one in old]
        num_layers = members[0].spec.num_layers
        stages = split_layers(members, num_layers, head_cost_layers=head_cost_layers)
        if stages is not None:
            new = GroupLayout(GroupId(first_id + len(pipelines)), stages)
            pipelines.append(Pipeline(old, new))
    return tuple(pipelines)


def _first_together(
    waiting: Iterable[GroupLayout], num: int, cut: set[frozenset[InstanceId]]
) -> tuple[GroupLayout, ...]:
    """The first one, and those next to it that reach each other; at most so many."""
    chosen: list[GroupLayout] = []
    for layout in waiting:
        if len(chosen) == num:
            break
        if not any(frozenset((one.leader, layout.leader)) in cut for one in chosen):
            chosen.append(layout)
    return tuple(chosen)
