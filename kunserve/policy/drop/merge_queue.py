"""Algorithm 1's priority queue Q: groups by number of instances, and which two merge next."""

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kunserve.core.layout import GroupLayout
from kunserve.policy.drop.merge_cache import MergeCache, Shape

MAX_PARTNERS = 8
"""Partners tried for a group whose merge with the smallest one gains nothing."""


class PlannedGroup(NamedTuple):
    """A group of the plan so far."""

    old: tuple[GroupLayout, ...]
    """Their members, in order, are those of ``shape.held``."""
    shape: Shape
    has_spare: bool
    """None of ``old`` lacks memory."""


class Rank(NamedTuple):
    """The order in which groups merge: Algorithm 1's key, then its ties, which it leaves open.

    Groups that lack memory merge first, so that the gain is where the queue is. Then come groups
    of like capacity, because the scarcest stage bounds the merged group. Then the oldest.
    """

    num_instances: int
    has_spare: bool
    capacity_blocks: int


_LAST = Rank(1 << 62, True, 0)
"""Of a queue whose groups have all been put aside."""


class MergeQueue:
    """Groups in order of rank; equal ranks leave in order of entry.

    A heap of ranks rather than of groups: a cluster has many groups, but few ranks.
    """

    def __init__(
        self,
        cache: MergeCache,
        max_group_size: int | None,
        is_worth: Callable[[PlannedGroup, PlannedGroup, Shape], bool] | None = None,
    ) -> None:
        """``is_worth`` may refuse a merge that would gain."""
        self._cache = cache
        self._is_worth = is_worth
        self._max_group_size = max_group_size
        self._groups: dict[Rank, deque[PlannedGroup]] = {}
        self._ranks: list[Rank] = []
        self._num_groups = 0
        self._refused: list[PlannedGroup] = []
        """They found no partner; they may gain with groups made since."""
        self._has_merged = False

    def push(self, group: PlannedGroup) -> None:
        """Let the group take part."""
        shape = group.shape
        rank = Rank(len(shape.stages), group.has_spare, shape.capacity_blocks)
        groups = self._groups.get(rank)
        if groups is None:
            groups = self._groups[rank] = deque()
            heapq.heappush(self._ranks, rank)
        groups.append(group)
        self._num_groups += 1

    def first_pair(self, *, is_pressed: bool) -> tuple[Rank, Rank] | None:
        """Ranks of the groups that ``pop_pair`` begins with; None if it would find no pair."""
        first = self._first_pressed() if is_pressed else min(self._ranks, default=None)
        if first is None or self._num_groups < 2:
            return None if is_pressed else (_LAST, _LAST)
        others = [rank for rank in self._ranks if rank != first or len(self._groups[rank]) > 1]
        return first, min(others)

    def _first_pressed(self) -> Rank | None:
        return min((rank for rank in self._ranks if not rank.has_spare), default=None)

    def pop_pair(
        self, *, is_pressed: bool = False
    ) -> tuple[PlannedGroup, PlannedGroup, Shape] | None:
        """The two smallest groups that gain by merging, and what they make; None: no two do.

        With ``is_pressed`` the first of them is the smallest that lacks memory.
        """
        while is_pressed and self._num_groups > 1:
            rank = self._first_pressed()
            if rank is None:
                break
            merged = self._merge_first(rank)
            if merged is not None:
                return merged
        while not is_pressed:
            if self._num_groups < 2:
                if not (self._has_merged and self._refused):
                    return None
                for group in self._refused:
                    self.push(group)
                self._refused, self._has_merged = [], False
                continue
            merged = self._merge_first(self._ranks[0])
            if merged is not None:
                return merged
        return None

    def _merge_first(self, rank: Rank) -> tuple[PlannedGroup, PlannedGroup, Shape] | None:
        """The first group of a rank with its partner; if it has none, it is put aside."""
        group = self._pop(rank)
        partner = self._pop_partner(rank, group)
        if partner is None:
            self._refused.append(group)
            return None
        self._has_merged = True
        return group, *partner

    def drain(self) -> list[PlannedGroup]:
        """All groups in order, those that found no partner last."""
        groups = [self._pop(self._ranks[0]) for _ in range(self._num_groups)]
        return [*groups, *self._refused]

    def _pop_partner(self, rank: Rank, group: PlannedGroup) -> tuple[PlannedGroup, Shape] | None:
        """Take the first group that gives a gain when merged with this one."""
        tried: list[tuple[Rank, PlannedGroup]] = []
        partner: tuple[PlannedGroup, Shape] | None = None
        while self._num_groups and len(tried) < MAX_PARTNERS:
            size = rank.num_instances + self._ranks[0].num_instances
            if self._max_group_size is not None and size > self._max_group_size:
                break
            other_rank = self._ranks[0]
            other = self._pop(other_rank)
            merged = self._cache.merge(group.shape, other.shape)
            if merged is not None and self._may_merge(group, other, merged):
                partner = other, merged
                break
            tried.append((other_rank, other))
        for other_rank, other in reversed(tried):
            self.push(other)
            self._groups[other_rank].rotate(1)  # before its equals, where it was
        return partner

    def _may_merge(self, one: PlannedGroup, other: PlannedGroup, merged: Shape) -> bool:
        return self._is_worth is None or self._is_worth(one, other, merged)

    def _pop(self, rank: Rank) -> PlannedGroup:
        groups = self._groups[rank]
        group = groups.popleft()
        self._num_groups -= 1
        if not groups:
            del self._groups[rank]
            if rank == self._ranks[0]:
                heapq.heappop(self._ranks)
            else:
                self._ranks.remove(rank)
                heapq.heapify(self._ranks)
        return group
