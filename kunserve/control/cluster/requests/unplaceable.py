"""Requests that can run nowhere, and for how long that has been so."""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping

from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.requests.backlog import Backlog
from kunserve.control.cluster.requests.live import Live
from kunserve.control.cluster.requests.quarantine import Quarantine
from kunserve.control.cluster.standing import Act
from kunserve.core.ids import RequestId


class Unplaceable:
    """Owner of the times since which requests in the backlog have been homeless.

    Most of the backlog waits because others are served first. A request is homeless when it waits
    for another reason: no group is large enough for it, or it may only run in a test and no group
    is kept for tests. Whoever waits for the end of a test is not homeless: a test ends.

    No look goes through the backlog. Who has waited long enough is sorted by size, and the largest
    group of the time before says who of them had none.
    """

    def __init__(
        self,
        placement: Placement,
        quarantine: Quarantine,
        backlog: Backlog,
        live: Mapping[RequestId, Live],
    ) -> None:
        self._placement = placement
        self._quarantine = quarantine
        self._backlog = backlog
        self._live = live
        self._came: deque[tuple[float, int, tuple[int, int], int]] = deque()
        """(when first seen, blocks, place, stay) of those that wait, in order."""
        self._old: list[tuple[int, tuple[int, int], int]] = []
        """(-blocks, place, stay) of those that have waited for long: a heap."""
        self._largest: deque[tuple[float, int]] = deque()
        """(when last, blocks of the largest group), times rising and sizes falling."""
        self._held_since_s: dict[RequestId, float] = {}

    def overdue(self, now_s: float, longest_s: float) -> list[Live]:
        """Those that have been homeless for longer than ``longest_s``. Called at every tick.

        A suspect of deaths from outside only is released instead.
        """
        for entry in self._backlog.take_fresh():
            self._came.append((now_s, entry.num_blocks, entry.live.place, entry.stay))
        self._forget_gone()
        found = {live.number: live for live in self._too_large(now_s, now_s - longest_s)}
        found |= {live.number: live for live in self._untested(now_s, now_s - longest_s)}
        return [live for _, live in sorted(found.items())]

    def _too_large(self, now_s: float, since_s: float) -> Iterator[Live]:
        placement, largest = self._placement, self._largest
        groups = [g for g in placement.groups.values() if Act.TAKE in g.may or Act.TEST in g.may]
        groups += placement.expected.values()
        blocks = max((group.capacity_blocks for group in groups), default=0)
        while largest and largest[-1][1] <= blocks:
            largest.pop()
        largest.append((now_s, blocks))
        while largest[0][0] < since_s:
            largest.popleft()
        while self._came and self._came[0][0] < since_s:
            _, num_blocks, place, stay = self._came.popleft()
            heapq.heappush(self._old, (-num_blocks, place, stay))
        while self._old and -self._old[0][0] > largest[0][1]:
            _, place, stay = heapq.heappop(self._old)
            live = self._backlog.find(place, stay)
            if live is not None:
                yield live

    def _untested(self, now_s: float, since_s: float) -> list[Live]:
        held = self._quarantine.held if self._placement.reserved is None else {}
        before = self._held_since_s
        self._held_since_s = {i: before.get(i, now_s) for i in held if self._live[i].leader is None}
        overdue = [i for i, held_s in self._held_since_s.items() if held_s < since_s]
        return [self._live[i] for i in overdue if not self._quarantine.release(i)]

    def _forget_gone(self) -> None:
        """Most have been sent long before they are old."""
        if len(self._came) + len(self._old) > 4 * len(self._backlog) + 1024:
            find = self._backlog.find
            self._came = deque(one for one in self._came if find(one[-2], one[-1]))
            self._old = [one for one in self._old if find(one[-2], one[-1])]
            heapq.heapify(self._old)
