"""The groups that requests may be sent to, where they are dealt out in turn."""

from collections.abc import Set

from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.backlog import SentAhead
from kunserve.core.ids import GroupId, InstanceId
from kunserve.policy.dispatch.affinity import Saved
from kunserve.policy.dispatch.round_robin import RoundRobin


class GroupsInTurn:
    """Has the methods of ``OpenGroups``. Here every group has room."""

    def __init__(self, placement: Placement, ahead: SentAhead) -> None:
        self._placement = placement
        self._ahead = ahead
        self._turn = RoundRobin()
        self._among = self._turn.among(())
        self._promised_tokens: dict[GroupId, int] = {}
        self.has_room = False

    def begin(self, leaders: Set[InstanceId] | None = None) -> bool:
        """See ``OpenGroups``; as are the others."""
        placement = self._placement
        if leaders is None:
            groups = placement.candidates()
        else:
            groups = placement.candidates_led_by(leaders)
        loads = [group.load for group in (*groups, *placement.expected.values())]
        self._among = self._turn.among(loads)
        self._promised_tokens = {}
        self.has_room = bool(groups)
        return self.has_room

    def choose(self, request_blocks: int, saved: Saved) -> GroupId | None:
        """Whose turn it is."""
        return self._among.choose(request_blocks, saved) if self.has_room else None

    def promise(self, group_id: GroupId, num_blocks: int, num_tokens: int) -> None:
        """A request waits for a group that is about to stand."""
        promised_tokens = self._promised_tokens.get(group_id, 0) + num_tokens
        self._promised_tokens[group_id] = promised_tokens
        num_stages = len(self._placement.expected[group_id].layout.stages)
        if promised_tokens >= self._ahead.most_tokens(num_stages):
            self._among.close(group_id)

    def sent(self, group: Group) -> None:
        """A request was sent to a group."""
