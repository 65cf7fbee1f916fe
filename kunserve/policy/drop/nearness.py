"""How far two instances are from each other, and what the way between them costs.

Nearness counts before Algorithm 1's order, and never before need. Groups of one host merge first,
as deep as it gains anything; then those of one rack; then any. So a merge across hosts is made
when those within hosts do not give enough, and never instead of one of equal value within a host.
Among merges that are equally near, Algorithm 1 decides. The reason: a pipeline's depth costs the
same wherever it stands, but each of its steps pays the link, and its exchange does, too.

Within a host bytes move through memory, which is not counted. Between hosts the busiest link
counts (``exchange_s``). Requests whose KV moves stand still meanwhile, so a merge is not made when
its exchange would outlast the shortage.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, Stage
from kunserve.core.place import Place
from kunserve.policy.drop.capacity import Specs

SAME_HOST, SAME_RACK, ANYWHERE = 0, 1, 2
"""Distances."""
Site = tuple[str, ...]
"""What all members of a group have in common at a distance."""


def distance(one: Place, other: Place) -> int:
    """Between two instances."""
    if one.rack != other.rack:
        return ANYWHERE
    return SAME_HOST if one.host == other.host else SAME_RACK


def site_of(members: Iterable[InstanceId], specs: Specs, reach: int) -> Site | None:
    """The host, the rack or the cluster that has all members; None if they are in several."""
    if reach == ANYWHERE:
        return ()
    sites = {_site(specs[member].place, reach) for member in members}
    return sites.pop() if len(sites) == 1 else None


def _site(place: Place, reach: int) -> Site:
    return (place.rack,) if reach == SAME_RACK else (place.rack, place.host)


def reaches(layouts: Iterable[GroupLayout], specs: Specs) -> tuple[int, ...]:
    """Distances that tell these groups apart, and the last one, at which all are together."""
    places = {specs[member].place for layout in layouts for member in layout.members}
    racks = {_site(place, SAME_RACK) for place in places}
    hosts = {_site(place, SAME_HOST) for place in places}
    found = []
    if len(hosts) > 1:
        found.append(SAME_HOST)
    if 1 < len(racks) < len(hosts):
        found.append(SAME_RACK)
    return (*found, ANYWHERE)


def exchange_s(
    old: Sequence[GroupLayout],
    new: Sequence[Stage],
    used_blocks: Mapping[GroupId, int],
    specs: Specs,
) -> float:
    """How long the KV of groups is on its way when they become one: the busiest link's time.

    Each direction of a host's link carries its own bytes. A link whose rate nobody told is free.
    """
    out_bytes: Counter[Place] = Counter()
    in_bytes: Counter[Place] = Counter()
    for layout in old:
        blocks = used_blocks.get(layout.group_id, 0)
        for src, had in layout.stages:
            for dst, has in new:
                here, there = specs[src].place, specs[dst].place
                if distance(here, there) != SAME_HOST:
                    layers = max(0, had.intersect(has).num_layers)
                    num_bytes = blocks * layers * specs[src].unit_bytes
                    out_bytes[here] += num_bytes
                    in_bytes[there] += num_bytes
    return max(
        (
            num_bytes * 8.0 / (place.link_gbps * 1e9)
            for each in (out_bytes, in_bytes)
            for place, num_bytes in each.items()
            if place.link_gbps is not None
        ),
        default=0.0,
    )
