"""Algorithm 1's queue where instances stand on several hosts: near groups merge first.

One queue per site: per host at first, then per rack, then one of all. The next queues are made
when no two groups within a site gain by merging any more. On one host there is one queue, and the
order is that of ``MergeQueue``. Groups whose instances have other numbers of ranks never merge, so
they stand in queues of their own (``Kind``).
"""

import heapq
from collections.abc import Callable
from typing import TypeAlias

from kunserve.core.layout import GroupLayout
from kunserve.policy.drop.capacity import Specs
from kunserve.policy.drop.merge_cache import MergeCache, Shape
from kunserve.policy.drop.merge_queue import MergeQueue, PlannedGroup, Rank
from kunserve.policy.drop.nearness import ANYWHERE, SAME_HOST, Site, reaches, site_of

Worth = Callable[[PlannedGroup, PlannedGroup, Shape], bool]
"""Whether a merge across hosts is worth its exchange."""
Kind: TypeAlias = tuple[int, Site]
"""Ranks of each instance, and where they stand: only groups of one kind merge."""
Meet = Callable[[PlannedGroup, PlannedGroup], bool]
"""Whether the members of two groups reach each other, as far as is known."""


class PlacedQueue:
    """Groups by place, then by rank."""

    def __init__(
        self,
        groups: list[PlannedGroup],
        cache: MergeCache,
        specs: Specs,
        max_group_size: int | None,
        is_worth: Worth,
        may_meet: Meet | None = None,
    ) -> None:
        """``may_meet``: None: all do."""
        self._may_meet = may_meet
        self._cache = cache
        self._specs = specs
        self._max_group_size = max_group_size
        self._is_worth = is_worth
        layouts: list[GroupLayout] = [layout for group in groups for layout in group.old]
        self._reaches = reaches(layouts, specs)
        self._at = 0
        """Index of the present reach."""
        self._is_pressed = True
        self._queues: dict[Kind, MergeQueue] = {}
        self._numbers: dict[Kind, int] = {}
        self._apart: list[PlannedGroup] = []
        """Groups that stand in several sites."""
        self._order: list[tuple[tuple[Rank, Rank], int, Kind]] = []
        """Sites that may have a pair, by the ranks of their two first groups."""
        self._part(groups)

    @property
    def has_links(self) -> bool:
        """Whether any two groups stand on different hosts."""
        return len(self._reaches) > 1

    def push(self, group: PlannedGroup) -> None:
        """Let the group take part: it was made of the pair that came last."""
        kind = self._kind_of(group)
        assert kind is not None, group
        self._queues[kind].push(group)
        self._note(kind)

    def pop_pair(
        self, *, is_pressed: bool = False
    ) -> tuple[PlannedGroup, PlannedGroup, Shape] | None:
        """The nearest groups that gain by merging, as ``MergeQueue.pop_pair`` among these."""
        if is_pressed != self._is_pressed:
            self._is_pressed = is_pressed
            self._begin(0)
        while True:
            pair = self._pop_within()
            if pair is not None or self._at + 1 == len(self._reaches):
                return pair
            self._begin(self._at + 1)

    def drain(self) -> list[PlannedGroup]:
        """All groups: site by site in order, then those of several sites."""
        groups = [group for queue in self._queues.values() for group in queue.drain()]
        return groups + self._apart

    def _pop_within(self) -> tuple[PlannedGroup, PlannedGroup, Shape] | None:
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return queue.pop_pair(is_pressed=self._is_pressed)
        while self._order:
            _, _, kind = heapq.heappop(self._order)
            pair = self._queues[kind].pop_pair(is_pressed=self._is_pressed)
            if pair is not None:
                return pair
        return None

    def _begin(self, at: int) -> None:
        """Part the groups anew, unless there is only one way."""
        if not self.has_links and len(self._queues) < 2:
            return
        groups = self.drain()
        self._at = at
        self._part(groups)

    def _part(self, groups: list[PlannedGroup]) -> None:
        self._queues, self._apart, self._order = {}, [], []
        crosses_hosts = self.has_links and self._reach != SAME_HOST
        is_worth = _both(self._may_meet, self._is_worth if crosses_hosts else None)
        for group in groups:
            kind = self._kind_of(group)
            if kind is None:
                self._apart.append(group)
                continue
            queue = self._queues.get(kind)
            if queue is None:
                queue = MergeQueue(self._cache, self._max_group_size, is_worth)
                self._queues[kind] = queue
            queue.push(group)
        self._numbers = {kind: number for number, kind in enumerate(self._queues)}
        for kind in self._queues:
            self._note(kind)

    @property
    def _reach(self) -> int:
        return self._reaches[self._at]

    def _kind_of(self, group: PlannedGroup) -> Kind | None:
        num_ranks = self._specs[group.old[0].leader].tensor_parallel_size
        if self._reach == ANYWHERE:
            return num_ranks, ()
        members = (member for layout in group.old for member in layout.members)
        site = site_of(members, self._specs, self._reach)
        return None if site is None else (num_ranks, site)

    def _note(self, kind: Kind) -> None:
        """The queue has another first group than before."""
        if len(self._queues) > 1:
            pair = self._queues[kind].first_pair(is_pressed=self._is_pressed)
            if pair is not None:
                heapq.heappush(self._order, (pair, self._numbers[kind], kind))


def _both(may_meet: Meet | None, is_worth: Worth | None) -> Worth | None:
    """One question of two."""
    if may_meet is None:
        return is_worth
    meet, worth = may_meet, is_worth

    def may_merge(one: PlannedGroup, other: PlannedGroup, merged: Shape) -> bool:
        return meet(one, other) and (worth is None or worth(one, other, merged))

    return may_merge
