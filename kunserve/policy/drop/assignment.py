"""To which of several new groups each request of a group goes that parts."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kunserve.core.ids import GroupId, RequestId


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
    Bin packing is hard, so None may be wrong in a tight case; ``parting_capacity_blocks`` is
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
