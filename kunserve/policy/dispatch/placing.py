"""``choose_group`` for many requests one after the other, in much less time.

Groups of equal capacity are ranked alike whatever the size of a request: the open ones by their
demand, the others by their need. So one choice looks at the best of each capacity, and a cluster
has few capacities however many groups it has.
"""

from collections.abc import Container, Iterable
from heapq import heapify, heappop, heappush

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad
from kunserve.policy.dispatch.affinity import NOTHING_SAVED, Saved, is_near, num_requests
from kunserve.policy.dispatch.choice import Rank, rank_of

MOST_ENTRIES = 8
"""Entries of heaps per group, out of date ones included."""
_Heap = list[tuple[int, GroupId]]


class GroupChooser:
    """Chooses as ``choose_group`` does, and remembers what was chosen.

    Entries of a heap are out of date when their value is not the group's any more.
    """

    def __init__(self, groups: Iterable[GroupLoad]) -> None:
        self._capacities: dict[GroupId, int] = {}
        self._demand: dict[GroupId, int] = {}
        self._need: dict[GroupId, int] = {}
        self._num: dict[GroupId, int] = {}
        self._num_instances: dict[GroupId, int] = {}
        self._may_be_open: set[GroupId] = set()
        self._by_demand: dict[int, _Heap] = {}
        """By capacity: those that may be open."""
        self._by_need: dict[int, _Heap] = {}
        for group in groups:
            group_id, capacity = group.group_id, group.capacity_blocks
            self._capacities[group_id] = capacity
            self._demand[group_id] = group.demand_blocks
            self._need[group_id] = group.need_blocks
            self._num[group_id] = num_requests(group)
            self._num_instances[group_id] = group.num_instances
            by_demand = self._by_demand.setdefault(capacity, [])
            if group.num_waiting <= 1:
                self._may_be_open.add(group_id)
                by_demand.append((group.demand_blocks, group_id))
            self._by_need.setdefault(capacity, []).append((group.need_blocks, group_id))
        self._heapify()

    def _heapify(self) -> None:
        for heap in (*self._by_demand.values(), *self._by_need.values()):
            heapify(heap)

    def __contains__(self, group_id: GroupId) -> bool:
        return group_id in self._capacities

    def put(self, group: GroupLoad) -> None:
        """A group has another load than before, or may be chosen from now on."""
        group_id, capacity = group.group_id, group.capacity_blocks
        if self._capacities.get(group_id, capacity) != capacity:
            self.close(group_id)
        demand, need, is_open = group.demand_blocks, group.need_blocks, group.num_waiting <= 1
        is_known = group_id in self._capacities
        was_open = group_id in self._may_be_open
        self._num[group_id] = num_requests(group)
        self._num_instances[group_id] = group.num_instances
        self._capacities[group_id] = capacity
        by_demand = self._by_demand.setdefault(capacity, [])
        by_need = self._by_need.setdefault(capacity, [])
        if not is_known or self._need[group_id] != need:
            heappush(by_need, (need, group_id))
        if is_open and not (is_known and was_open and self._demand[group_id] == demand):
            heappush(by_demand, (demand, group_id))
        self._demand[group_id], self._need[group_id] = demand, need
        (self._may_be_open.add if is_open else self._may_be_open.discard)(group_id)
        if len(by_need) + len(by_demand) > MOST_ENTRIES * (len(self._capacities) + 1):
            self._clear_out(capacity)

    def _clear_out(self, capacity: int) -> None:
        """Only what is up to date stays in the heaps of a capacity."""
        members = [i for i, one in self._capacities.items() if one == capacity]
        self._by_need[capacity] = [(self._need[i], i) for i in members]
        open_ones = [i for i in members if i in self._may_be_open]
        self._by_demand[capacity] = [(self._demand[i], i) for i in open_ones]
        self._heapify()

    def choose(self, request_blocks: int, saved: Saved = NOTHING_SAVED) -> GroupId | None:
        """The group where the request starts soonest; None if no group can ever hold it."""
        chosen = self._without_saving(request_blocks)
        if chosen is None or not saved:
            return chosen
        best = self._rank(chosen, request_blocks, saved.get(chosen, 0))
        there = self._per_instance(chosen)
        for group_id, blocks in saved.items():
            capacity = self._capacities.get(group_id)
            if capacity is None or request_blocks > capacity:
                continue
            if is_near(self._per_instance(group_id), there):
                best = min(best, self._rank(group_id, request_blocks, blocks))
        return best[-1]

    def _rank(self, group_id: GroupId, request_blocks: int, saved_blocks: int) -> Rank:
        return rank_of(
            self._demand[group_id],
            self._need[group_id],
            group_id not in self._may_be_open,
            self._capacities[group_id],
            group_id,
            request_blocks,
            saved_blocks,
        )

    def _per_instance(self, group_id: GroupId) -> float:
        return self._num[group_id] / self._num_instances[group_id]

    def _without_saving(self, request_blocks: int) -> GroupId | None:
        best: tuple[bool, float, GroupId] | None = None
        for capacity, by_need in self._by_need.items():
            if request_blocks > capacity:
                continue
            top = self._top(self._by_demand[capacity], self._demand, self._may_be_open)
            is_open = top is not None and top[0] + request_blocks <= capacity
            if not is_open:
                top = self._top(by_need, self._need, self._capacities)
            if top is None:
                continue
            rank = (not is_open, (top[0] + request_blocks) / capacity, top[1])
            if best is None or rank < best:
                best = rank
        return None if best is None else best[2]

    def _top(
        self, heap: _Heap, values: dict[GroupId, int], those: Container[GroupId]
    ) -> tuple[int, GroupId] | None:
        while heap and (values.get(heap[0][1]) != heap[0][0] or heap[0][1] not in those):
            heappop(heap)
        return heap[0] if heap else None

    def sent(self, group_id: GroupId, request_blocks: int) -> None:
        """So much more is on its way to the group."""
        capacity = self._capacities[group_id]
        self._demand[group_id] += request_blocks
        self._need[group_id] += request_blocks
        self._num[group_id] += 1
        heappush(self._by_need[capacity], (self._need[group_id], group_id))
        if group_id in self._may_be_open:
            heappush(self._by_demand[capacity], (self._demand[group_id], group_id))

    def close(self, group_id: GroupId) -> None:
        """The group is chosen no more."""
        del self._capacities[group_id], self._demand[group_id], self._need[group_id]
        del self._num[group_id], self._num_instances[group_id]
        self._may_be_open.discard(group_id)
