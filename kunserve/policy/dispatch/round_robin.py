"""Dealing requests out in turn, as a balancer does that knows nothing of its servers' load."""

from collections.abc import Iterable

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad
from kunserve.policy.dispatch.affinity import NOTHING_SAVED, Saved


class RoundRobin:
    """Remembers whose turn it was."""

    def __init__(self) -> None:
        self._last = GroupId(-1)

    def choose(
        self, groups: Iterable[GroupLoad], request_blocks: int, _saved: Saved = NOTHING_SAVED
    ) -> GroupId | None:
        """The group after the last one that can hold the request, the first one after them all.

        None if none can.
        """
        ids = sorted(group.group_id for group in groups if request_blocks <= group.capacity_blocks)
        if not ids:
            return None
        self._last = next((group_id for group_id in ids if group_id > self._last), ids[0])
        return self._last
