"""The groups that requests may be sent to: those that have room, and those about to stand.

A request that starts sooner in a group that is about to stand is promised to it, and stays in the
backlog. Promises are worked out anew whenever something may be sent.
"""

from collections.abc import Set
from dataclasses import replace

from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.backlog import SentAhead
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.load import GroupLoad


class OpenGroups:
    """All groups are gone through for each choice: a cluster has a hundred or so.

    ``look_at`` comes before choosing for one request or for many. Each that is chosen is told of
    by ``sent`` or ``promise`` before the next choice.
    """

    def __init__(
        self, placement: Placement, ahead: SentAhead, *, are_all_roomy: bool = False
    ) -> None:
        """``are_all_roomy``: however much a group was sent ahead, it has room."""
        self._placement = placement
        self._ahead = ahead
        self._are_all_roomy = are_all_roomy
        self.loads: dict[GroupId, GroupLoad] = {}
        """Of all that may be chosen: where no group has room now, of none."""
        self._priority = 0
        self._num_roomy = 0
        """Of these, the ones that stand."""
        self._promised_tokens: dict[GroupId, int] = {}

    def look_at(self, priority: int, leaders: Set[InstanceId] | None = None) -> bool:
        """Choose for requests of this priority among all groups from now on, or among those that
        these instances lead.

        Groups that are about to stand may be chosen as well. False if no group has room.
        """
        placement = self._placement
        self._priority = priority
        if leaders is None:
            groups = placement.candidates()
        else:
            groups = placement.candidates_led_by(leaders)
        self.loads = {
            group.layout.group_id: group.load for group in groups if self._has_room(group)
        }
        self._num_roomy = len(self.loads)
        if self._num_roomy:
            self.loads |= {group_id: group.load for group_id, group in placement.expected.items()}
        self._promised_tokens = {}
        return self.has_room

    def narrow(self, priority: int) -> None:
        """Choose for requests of this priority from now on, which is no more urgent."""
        if priority == self._priority:
            return
        assert priority > self._priority, (priority, self._priority)
        self._priority = priority
        groups = self._placement.groups
        for group_id in [i for i in self.loads if i in groups and not self._has_room(groups[i])]:
            del self.loads[group_id]
            self._num_roomy -= 1
        if not self._num_roomy:
            self.loads.clear()

    def _has_room(self, group: Group) -> bool:
        if self._are_all_roomy:
            return True
        stages = group.layout.stages
        return self._ahead.has_room(stages[0].instance_id, len(stages), self._priority)

    @property
    def has_room(self) -> bool:
        """Whether any group may be sent one more request."""
        return self._num_roomy > 0

    def promise(self, group_id: GroupId, num_blocks: int, num_tokens: int) -> None:
        """A request waits for a group that is about to stand.

        As many do as may be sent there then.
        """
        promised_tokens = self._promised_tokens.get(group_id, 0) + num_tokens
        self._promised_tokens[group_id] = promised_tokens
        num_stages = len(self._placement.expected[group_id].layout.stages)
        if promised_tokens >= self._ahead.most_tokens(num_stages):
            del self.loads[group_id]
            return
        load = self.loads[group_id]
        self.loads[group_id] = replace(
            load,
            num_unreported=load.num_unreported + 1,
            unreported_blocks=load.unreported_blocks + num_blocks,
        )

    def sent(self, group: Group) -> None:
        """A request was sent to a group."""
        group_id = group.layout.group_id
        if self._has_room(group):
            self.loads[group_id] = group.load
            return
        del self.loads[group_id]
        self._num_roomy -= 1
        if not self._num_roomy:
            self.loads.clear()
