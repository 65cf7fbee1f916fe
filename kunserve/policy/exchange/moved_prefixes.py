"""Prefixes that requests share, when groups change: each moves once to every group that wants it.

Where a group parts, its requests may want the same prefix in several new groups. All but one of
these get copies, made before anything moves, so that every copy moves like a request of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kunserve.core.ids import GroupId, PrefixId, RequestId
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import PrefixState, SequenceKv


class MovedPrefix(NamedTuple):
    """A prefix on its way to one new group."""

    prefix_id: PrefixId
    """There. Of a prefix that several groups want, all but the first get copies."""
    old: PrefixState
    new_group: GroupId


class Kept(NamedTuple):
    """A sequence that may keep its KV, and its old group."""

    state: SequenceKv
    layout: GroupLayout

    @property
    def num_blocks(self) -> int:
        """Blocks of its KV."""
        return self.state.num_blocks


class Use:
    """Blocks that sequences take together, what they share counted once."""

    def __init__(self, prefixes: Mapping[PrefixId, PrefixState]) -> None:
        self.num_blocks = 0
        self._prefixes = prefixes
        self._seen: set[PrefixId] = set()

    def add(self, state: SequenceKv) -> None:
        """One more sequence."""
        self.num_blocks += state.num_blocks - state.first_own_block
        for prefix_id, _ in state.shared:
            if prefix_id not in self._seen:
                self._seen.add(prefix_id)
                self.num_blocks += len(self._prefixes[prefix_id].names)


def fair_shares(
    kept: Iterable[Kept], prefixes: Mapping[PrefixId, PrefixState]
) -> dict[RequestId, int]:
    """Blocks of each sequence, of what it shares its part; at least one."""
    kept = tuple(kept)
    users = Counter(part.prefix_id for one in kept for part in one.state.shared)

    def share(state: SequenceKv) -> int:
        parts = sum(-(-len(prefixes[p].names) // users[p]) for p, _ in state.shared)
        return state.num_blocks - state.first_own_block + parts

    return {one.state.request_id: share(one.state) for one in kept}


def _wanted(
    kept: Iterable[Kept], homes: Mapping[RequestId, GroupId]
) -> dict[PrefixId, tuple[GroupLayout, list[GroupId]]]:
    """The old group of each prefix, and the new groups that want it."""
    wanted: dict[PrefixId, tuple[GroupLayout, list[GroupId]]] = {}
    for state, layout in kept:
        for prefix_id, _ in state.shared:
            _, groups = wanted.setdefault(prefix_id, (layout, []))
            if homes[state.request_id] not in groups:
                groups.append(homes[state.request_id])
    return wanted


def has_room(
    kept: Iterable[Kept],
    homes: Mapping[RequestId, GroupId],
    capacities: Mapping[GroupId, int],
    room_of: Callable[[GroupLayout], int],
    prefixes: Mapping[PrefixId, PrefixState],
) -> bool:
    """Whether every new group can hold its sequences, and every old one the copies beside its."""
    kept = tuple(kept)
    before: dict[GroupLayout, Use] = {}
    after: dict[GroupId, Use] = {}
    for state, layout in kept:
        before.setdefault(layout, Use(prefixes)).add(state)
        after.setdefault(homes[state.request_id], Use(prefixes)).add(state)
    copied: Counter[GroupLayout] = Counter()
    for prefix_id, (layout, groups) in _wanted(kept, homes).items():
        copied[layout] += (len(groups) - 1) * len(prefixes[prefix_id].names)
    return all(use.num_blocks <= capacities[group] for group, use in after.items()) and all(
        use.num_blocks + copied[layout] <= room_of(layout) for layout, use in before.items()
    )


def prefix_ids(
    kept: Iterable[Kept], homes: Mapping[RequestId, GroupId]
) -> dict[tuple[PrefixId, GroupId], PrefixId]:
    """What each prefix is called in each new group that wants it: the oldest keeps the name."""
    ids: dict[tuple[PrefixId, GroupId], PrefixId] = {}
    for prefix_id, (_, groups) in _wanted(kept, homes).items():
        first, *others = sorted(groups)
        ids[prefix_id, first] = prefix_id
        for group in others:
            ids[prefix_id, group] = PrefixId(RequestId(f"{prefix_id}-{group}"))
    return ids
