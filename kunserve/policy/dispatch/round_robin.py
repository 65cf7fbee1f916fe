"""Dealing requests out in turn, as a balancer does that knows nothing of its servers' load."""

from collections.abc import Iterable

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad
from kunserve.policy.dispatch.affinity import NOTHING_SAVED, Saved


class RoundRobin:
    """Remembers whose turn it was."""

    def __init__(self) -> None:
        self._last = GroupId(-1)

    def among(self, groups: Iterable[GroupLoad]) -> "RoundRobinChooser":
        """Choose among these groups; the turn goes on where it was."""
        return RoundRobinChooser(self, groups)

    def next(self, group_ids: Iterable[GroupId]) -> GroupId | None:
        """The group after the last one, the first one after them all; None of none."""
        ids = sorted(group_ids)
        if not ids:
            return None
        self._last = next((group_id for group_id in ids if group_id > self._last), ids[0])
        return self._last


class RoundRobinChooser:
    """Chooses among some groups, and remembers what was chosen."""

    def __init__(self, turn: RoundRobin, groups: Iterable[GroupLoad]) -> None:
        self._turn = turn
        self._capacities = {group.group_id: group.capacity_blocks for group in groups}

    def choose(self, request_blocks: int, _saved: Saved = NOTHING_SAVED) -> GroupId | None:
        """Whose turn it is, of those that can hold the request; None if none can."""
        fitting = (
            group_id
            for group_id, capacity in self._capacities.items()
            if request_blocks <= capacity
        )
        return self._turn.next(fitting)

    def sent(self, group_id: GroupId, request_blocks: int) -> None:
        """Load does not matter."""

    def close(self, group_id: GroupId) -> None:
        """The group is chosen no more."""
        del self._capacities[group_id]
