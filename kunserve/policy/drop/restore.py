"""Going back to whole models when the overload has faded (paper section 4.4).

The monitor says when. Here: whether it fits, and where each missing layer comes from. To which new
group each request goes: ``assignment``.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport
from kunserve.core.messages import LayerSource, MemberSources
from kunserve.core.place import Place
from kunserve.policy.drop.capacity import Specs, group_capacity_blocks
from kunserve.policy.drop.nearness import distance
from kunserve.policy.exchange.moves import choose_piece_blocks, float_units


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

    It waits while a request may become larger than every new group's pool, and while running
    requests (with growth) exceed ``parting_capacity_blocks``.

    That bound takes the largest request as it is expected to be, not as its limit allows: one
    that outgrows the expectation while layers load costs a recomputation at worst (``plan_moves``),
    and the leader's narrowed ledger keeps memory safe whatever grows.
    """
    new = parts_of(layout, first_id)
    largest = load.largest_request_blocks
    pool = max(group_capacity_blocks(part, specs) for part in new)
    if largest > pool:
        return Postponed(
            "large request", f"a request of {largest} blocks is larger than a pool of {pool}"
        )
    capacity = parting_capacity_blocks(layout, new, specs, load.largest_expected_blocks)
    running = load.used_blocks + load.growth_blocks
    if running > capacity:
        reason = f"{running} blocks are in use or growing, {capacity} fit while parting"
        return Postponed("too much in use", reason)
    own = {stage.instance_id: stage.layers for stage in layout.stages}
    near = _nearer_holders(layout, holders or {}, specs)
    return RestorePlan(layout, new, choose_sources(layout, near | own, specs), capacity)


def parts_of(layout: GroupLayout, first_id: GroupId) -> tuple[GroupLayout, ...]:
    """Each member as a whole instance, in the order of the stages."""
    whole = LayerRange(0, layout.stages[-1].layers.end)
    return tuple(
        GroupLayout(GroupId(first_id + number), (Stage(member, whole),))
        for number, member in enumerate(layout.members)
    )


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


def parting_capacity_blocks(
    layout: GroupLayout, new: Sequence[GroupLayout], specs: Specs, largest_blocks: int
) -> int:
    """The most KV blocks T with which the pipeline can surely part into the instances ``new``.

    An exchange is memory-neutral: each member's use goes in a straight line from what it holds of
    everybody's blocks to all L layers of its own requests, within a float (``moves``). Once its
    layers are back, a member m has ``room`` units beside that float:

        held(m) * T <= room(m)    and    assigned(m) <= capacity(m) = room(m) / L

    ``assign_sequences`` keeps ``assigned(m) <= share(m) * (T + (S - 1) * largest)``, where share is
    the part of the S members' capacity that m has, which gives T. Never negative.
    """
    mine = {member: specs[member] for member in layout.members}
    piece_blocks = choose_piece_blocks(mine.values())
    most_before: list[int] = []
    total = 0
    for member, held in layout.stages:
        spare = float_units(member, (layout,), new, piece_blocks)
        room = mine[member].kv_units - spare
        most_before.append(room // held.num_layers)
        total += max(0, room // mine[member].num_layers)
    return max(0, min(*most_before, total - (len(new) - 1) * largest_blocks))


def choose_sources(
    layout: GroupLayout,
    holders: Mapping[InstanceId, LayerRange],
    specs: Specs,
    given: Mapping[InstanceId, int] = MappingProxyType({}),
) -> tuple[MemberSources, ...]:
    """Where each member's missing layers come from: the nearest peers in even shares.

    Disk gives what no peer has. ``given``: layers that each gives to others already.

    Between two borders of what peers hold the choice is the same for every layer, so each such
    segment is shared out in whole runs, more to those that give least so far.
    """
    num_layers = layout.stages[-1].layers.end
    given = Counter(given)
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
    """The nearest of those that hold all of the segment, shared among as many ranks."""
    here, (first, end) = specs[member].place, segment
    num_ranks = specs[member].tensor_parallel_size
    by_place: dict[Place, list[InstanceId]] = {}
    for holder, (held_first, held_end) in holders.items():
        if held_first <= first and end <= held_end and holder != member:
            spec = specs[holder]
            if spec.tensor_parallel_size == num_ranks:
                by_place.setdefault(spec.place, []).append(holder)
    least = min((distance(here, place) for place in by_place), default=None)
    near = (found for place, found in by_place.items() if distance(here, place) == least)
    return [holder for found in near for holder in found]


def _share_out(
    segment: LayerRange, peers: Iterable[InstanceId], given: Counter[InstanceId]
) -> list[LayerSource]:
    """Split a segment among peers that hold all of it; updates what each gives."""
    # A heap, because it is sorted; no more than one each can be needed.
    heap = heapq.nsmallest(segment.num_layers, ((given[peer], peer) for peer in peers))
    if not heap:
        return [LayerSource(segment, None)]
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
