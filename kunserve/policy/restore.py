"""Going back to whole models when the overload has faded (paper section 4.4).

The monitor says when. Here: whether it fits, where each missing layer comes from, and to which
member each request goes when the pipeline splits.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport
from kunserve.core.messages import LayerSource, MemberSources
from kunserve.policy.capacity import Specs
from kunserve.policy.nearness import distance


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A group parts: each member becomes a whole group of its own."""

    old: GroupLayout
    new: tuple[GroupLayout, ...]
    """In the order of ``old``'s stages."""
    members: tuple[MemberSources, ...]
    """What each member loads first, while the pipeline still serves."""
    capacity_blocks: int
    """KV blocks that the pipeline may use from then on, so that the split fits."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """Not now. The pipeline goes on serving and nothing is lost."""

    cause: str
    """The same as long as the reason differs in its numbers only."""
    reason: str
    """For people."""


def plan_restore(
    layout: GroupLayout,
    specs: Specs,
    load: LoadReport,
    *,
    first_id: GroupId,
    holders: Mapping[InstanceId, LayerRange] | None = None,
) -> RestorePlan | Postponed:
    """Part the group into whole instances numbered from ``first_id``.

    ``holders`` are instances of other groups that layers may be pulled from, with what they hold:
    where they are nearer than the group's own members.

    It waits while a request may become larger than every member's undropped pool, and while
    running requests (with growth) exceed ``transient_capacity_blocks``.

    That bound takes the largest request as it is expected to be, not as its limit allows: one
    that outgrows the expectation while layers load costs a recomputation at worst (``plan_moves``),
    and the leader's narrowed ledger keeps memory safe whatever grows.
    """
    num_layers = layout.stages[-1].layers.end
    largest = load.largest_request_blocks
    pool = max(specs[m].kv_units // num_layers for m in layout.members)
    if largest > pool:
        return Postponed(
            "large request", f"a request of {largest} blocks is larger than a pool of {pool}"
        )
    capacity = transient_capacity_blocks(layout, specs, load.largest_expected_blocks)
    running = load.used_blocks + load.growth_blocks
    if running > capacity:
        reason = f"{running} blocks are in use or growing, {capacity} fit while parting"
        return Postponed("too much in use", reason)
    whole = LayerRange(0, num_layers)
    new = tuple(
        GroupLayout(GroupId(first_id + number), (Stage(member, whole),))
        for number, member in enumerate(layout.members)
    )
    own = {stage.instance_id: stage.layers for stage in layout.stages}
    near = _nearer_holders(layout, holders or {}, specs)
    return RestorePlan(layout, new, choose_sources(layout, near | own, specs), capacity)


def _nearer_holders(
    layout: GroupLayout, holders: Mapping[InstanceId, LayerRange], specs: Specs
) -> dict[InstanceId, LayerRange]:
    """Those that are nearer to a member than its farthest peer in the group."""
    members = {member: specs[member].place for member in layout.members}
    farthest = {
        place: max(distance(place, other) for other in members.values())
        for place in members.values()
    }
    return {
        holder: layers
        for holder, layers in holders.items()
        if holder not in members
        and any(distance(place, specs[holder].place) < far for place, far in farthest.items())
    }


def transient_capacity_blocks(layout: GroupLayout, specs: Specs, largest_blocks: int) -> int:
    """The most KV blocks T with which the pipeline can surely part.

    Once its weights are back, member m has ``kv_units(m)``. Until the last piece has moved it
    holds h(m) layers of everybody's blocks and all L layers of those assigned to it:

        h(m) * T + L * assigned(m) <= kv_units(m)

    ``assign_sequences`` keeps ``assigned(m) <= share(m) * (T + (S - 1) * largest)``, where share
    is the member's part of the S members' capacity, which gives T. Never negative.
    """
    num_layers = layout.stages[-1].layers.end
    pools = {m: specs[m].kv_units // num_layers for m in layout.members}
    total = sum(pools.values())
    slack = (len(layout.stages) - 1) * largest_blocks
    bounds = []
    for member, layers in layout.stages:
        # Times total / total, to stay in integers.
        units = specs[member].kv_units * total
        assigned_share = num_layers * pools[member]
        room = units - assigned_share * slack
        bounds.append(room // (layers.num_layers * total + assigned_share) if total else 0)
    return max(0, min(bounds))


def choose_sources(
    layout: GroupLayout, holders: Mapping[InstanceId, LayerRange], specs: Specs
) -> tuple[MemberSources, ...]:
    """Where each member's missing layers come from: the nearest peers in even shares.

    Disk gives what no peer has.

    Between two borders of what peers hold the choice is the same for every layer, so each such
    segment is shared out in whole runs, more to those that give least so far.
    """
    num_layers = layout.stages[-1].layers.end
    given = dict.fromkeys(sorted(holders), 0)
    borders = sorted({b for layers in holders.values() for b in layers} | {0, num_layers})
    members = []
    for member, layers in layout.stages:
        held = holders.get(member, layers)
        sources: list[LayerSource] = []
        for gap in (LayerRange(0, held.first), LayerRange(held.end, num_layers)):
            cuts = [gap.first, *[b for b in borders if gap.first < b < gap.end], gap.end]
            for first, end in itertools.pairwise(cuts):
                segment = LayerRange(first, end)
                if segment.num_layers > 0:
                    nearest = _nearest(segment, member, holders, specs)
                    sources += _share_out(segment, nearest, given)
        members.append(MemberSources(member, tuple(_join(sources))))
    return tuple(members)


def _nearest(
    segment: LayerRange,
    member: InstanceId,
    holders: Mapping[InstanceId, LayerRange],
    specs: Specs,
) -> list[InstanceId]:
    """The nearest of those that hold all of the segment."""
    here = specs[member].place
    nearest: list[InstanceId] = []
    least = math.inf
    for holder, layers in holders.items():
        if holder == member or not layers.covers(segment):
            continue
        far = distance(here, specs[holder].place)
        if far < least:
            nearest, least = [], far
        if far == least:
            nearest.append(holder)
    return nearest


def _share_out(
    segment: LayerRange, peers: Iterable[InstanceId], given: dict[InstanceId, int]
) -> list[LayerSource]:
    """Split a segment among peers that hold all of it; updates what each gives."""
    heap = [(given[peer], peer) for peer in peers]
    if not heap:
        return [LayerSource(segment, None)]
    heapq.heapify(heap)
    for _ in range(segment.num_layers):
        count, peer = heap[0]
        heapq.heapreplace(heap, (count + 1, peer))
    sources = []
    first = segment.first
    for count, peer in sorted(heap, key=lambda item: item[1]):
        end = first + count - given[peer]
        if end > first:
            sources.append(LayerSource(LayerRange(first, end), peer))
        given[peer], first = count, end
    return sources


def _join(sources: list[LayerSource]) -> list[LayerSource]:
    """One source for neighbouring runs from the same place."""
    joined: list[LayerSource] = []
    for source in sources:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.instance_id == source.instance_id
            and last.layers.end == source.layers.first
        ):
            both = LayerRange(last.layers.first, source.layers.end)
            joined[-1] = LayerSource(both, source.instance_id)
        else:
            joined.append(source)
    return joined


class SequenceToPlace(NamedTuple):
    """A live request of a group that parts."""

    request_id: RequestId
    num_blocks: int
    """Blocks of its KV; 0 when it waits."""
    need_blocks: int
    """Blocks it may come to need: it goes to no group with fewer."""
    arrival_s: float


def assign_sequences(
    sequences: Iterable[SequenceToPlace], capacities: Mapping[GroupId, int]
) -> dict[RequestId, GroupId] | None:
    """The new group of every request, balanced by blocks; None if no place was found for one.

    Those with KV come first, the largest first, each to the group that it leaves relatively
    emptiest: ``least (assigned + blocks) / capacity`` among those it fits. Then those that wait,
    in order of arrival, likewise but queueing where there is no room. Depends on the set of
    sequences only, not on its order: every member finds the same by itself.

    If the greedy order fails, the fullest group that fits is tried instead (best fit decreasing).
    Bin packing is hard, so None may be wrong in a tight case; ``transient_capacity_blocks`` is
    low enough that it does not happen in a planned restore.
    """
    everyone = tuple(sequences)
    running = sorted(
        (s for s in everyone if s.num_blocks > 0),
        key=lambda s: (-s.num_blocks, s.arrival_s, s.request_id),
    )
    waiting = sorted(
        (s for s in everyone if s.num_blocks == 0), key=lambda s: (s.arrival_s, s.request_id)
    )
    placed = _place(running, capacities, emptiest=True)
    if placed is None:
        placed = _place(running, capacities, emptiest=False)
    if placed is None:
        return None
    assigned = dict.fromkeys(sorted(capacities), 0)
    for sequence in running:
        assigned[placed[sequence.request_id]] += sequence.num_blocks
    for sequence in waiting:
        fitting = [g for g in assigned if sequence.need_blocks <= capacities[g]]
        if not fitting:
            return None
        # max(1): a request whose need is not known still takes a turn.
        blocks = max(1, sequence.need_blocks)
        best = min(fitting, key=lambda g: ((assigned[g] + blocks) / max(1, capacities[g]), g))
        placed[sequence.request_id] = best
        assigned[best] += blocks
    return placed


def _place(
    running: list[SequenceToPlace], capacities: Mapping[GroupId, int], *, emptiest: bool
) -> dict[RequestId, GroupId] | None:
    assigned = dict.fromkeys(sorted(capacities), 0)
    placed: dict[RequestId, GroupId] = {}
    for sequence in running:
        blocks = sequence.num_blocks
        fitting = [
            g
            for g in assigned
            if assigned[g] + blocks <= capacities[g] and sequence.need_blocks <= capacities[g]
        ]
        if not fitting:
            return None
        if emptiest:
            best = min(fitting, key=lambda g: ((assigned[g] + blocks) / capacities[g], g))
        else:
            best = min(fitting, key=lambda g: (capacities[g] - assigned[g], g))
        placed[sequence.request_id] = best
        assigned[best] += blocks
    return placed
