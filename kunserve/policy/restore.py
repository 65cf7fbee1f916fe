"""Going back to whole models when the overload has faded (paper section 4.4).

The monitor says when. Here: into what, whether it fits, and where each missing layer comes from.
To which new group each request goes: ``assignment``.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport
from kunserve.core.messages import LayerSource, MemberSources
from kunserve.policy.capacity import Specs, group_capacity_blocks
from kunserve.policy.moves import choose_piece_blocks, float_units
from kunserve.policy.nearness import distance


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A group parts: into whole instances, or into shorter pipelines."""

    old: GroupLayout
    new: tuple[GroupLayout, ...]
    """In the order of their first stages in ``old``."""
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
    num_parts: int | None = None,
) -> RestorePlan | Postponed:
    """Part the group into ``num_parts`` groups numbered from ``first_id``; None: whole instances.

    ``holders`` are instances of other groups that layers may be pulled from, with what they hold:
    where they are nearer than the group's own members.

    It waits while a request may become larger than every new group's pool, and while running
    requests (with growth) exceed ``parting_capacity_blocks``.

    That bound takes the largest request as it is expected to be, not as its limit allows: one
    that outgrows the expectation while layers load costs a recomputation at worst (``plan_moves``),
    and the leader's narrowed ledger keeps memory safe whatever grows.
    """
    new = parts_of(layout, num_parts or len(layout.stages), first_id)
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
    wanted = {stage.instance_id: stage.layers for part in new for stage in part.stages}
    return RestorePlan(layout, new, choose_sources(layout, near | own, specs, wanted), capacity)


def parts_of(layout: GroupLayout, num_parts: int, first_id: GroupId) -> tuple[GroupLayout, ...]:
    """Every ``num_parts``-th stage together, so that each member keeps what it holds.

    Borders lie as near to an even split as that allows: ``{0:0-12, 1:12-24, 2:24-36, 3:36-48}``
    parts into ``{0:0-24, 2:24-48}`` and ``{1:0-24, 3:24-48}``.
    """
    num_layers = layout.stages[-1].layers.end
    parts = []
    for number in range(num_parts):
        stages = layout.stages[number::num_parts]
        borders = [0]
        for index, (one, other) in enumerate(itertools.pairwise(stages), start=1):
            even = num_layers * index // len(stages)
            borders.append(min(max(even, one.layers.end), other.layers.first))
        borders.append(num_layers)
        ranges = (LayerRange(first, end) for first, end in itertools.pairwise(borders))
        parts.append(
            GroupLayout(
                GroupId(first_id + number),
                tuple(
                    Stage(stage.instance_id, layers)
                    for stage, layers in zip(stages, ranges, strict=True)
                ),
            )
        )
    return tuple(parts)


def halves_capacity_blocks(layout: GroupLayout, specs: Specs) -> int:
    """Room for blocks in the two groups that a pipeline of more than two stages parts into; 0 of
    others, which part into whole instances.
    """
    if len(layout.stages) <= 2:
        return 0
    halves = parts_of(layout, 2, layout.group_id)
    return sum(group_capacity_blocks(half, specs) for half in halves)


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
    """The most KV blocks T with which the pipeline can surely part into ``new``.

    An exchange is memory-neutral: each member's use goes in a straight line from what it holds of
    everybody's blocks to what it holds of its new group's, within a float (``moves``). Once its
    layers are back, a member of the new group g has ``room`` units beside that float:

        held(m) * T <= room(m)    and    assigned(g) <= capacity(g) = min over m of room / wanted

    ``assign_sequences`` keeps ``assigned(g) <= share(g) * (T + (S - 1) * largest)``, where share is
    the part of the S groups' capacity that g has, which gives T. Never negative.
    """
    mine = {member: specs[member] for member in layout.members}
    piece_blocks = choose_piece_blocks(mine.values())
    most_before: list[int] = []
    total = 0
    for part in new:
        rooms = []
        for member, wanted in part.stages:
            spare = float_units(member, (layout,), new, piece_blocks)
            room = mine[member].units_when_holding(wanted.num_layers) - spare
            held = layout.layers_of(member)
            assert held is not None, (member, layout)
            most_before.append(room // held.num_layers)
            rooms.append(room // wanted.num_layers)
        total += max(0, min(rooms))
    return max(0, min(*most_before, total - (len(new) - 1) * largest_blocks))


def choose_sources(
    layout: GroupLayout,
    holders: Mapping[InstanceId, LayerRange],
    specs: Specs,
    wanted: Mapping[InstanceId, LayerRange] | None = None,
) -> tuple[MemberSources, ...]:
    """Where each member's missing layers come from: the nearest peers in even shares.

    Disk gives what no peer has. ``wanted`` are the layers that each shall hold, all when None.

    Between two borders of what peers hold the choice is the same for every layer, so each such
    segment is shared out in whole runs, more to those that give least so far.
    """
    num_layers = layout.stages[-1].layers.end
    given = dict.fromkeys(sorted(holders), 0)
    ranges = [*holders.values(), *(() if wanted is None else wanted.values())]
    borders = sorted({b for layers in ranges for b in layers} | {0, num_layers})
    members = []
    for member, layers in layout.stages:
        held = holders.get(member, layers)
        first_wanted, end_wanted = (0, num_layers) if wanted is None else wanted[member]
        sources: list[LayerSource] = []
        for gap in (LayerRange(first_wanted, held.first), LayerRange(held.end, end_wanted)):
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
