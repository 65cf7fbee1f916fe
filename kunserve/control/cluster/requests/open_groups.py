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
from kunserve.policy.dispatch.affinity import Saved
from kunserve.policy.dispatch.choice import choose_group


class OpenGroups:
    """Goes through all groups for each choice: a cluster has a hundred or so.

    ``begin`` comes before choosing for one request or for many. Of those that are chosen one after
    the other each is told of by ``sent`` or ``promise`` before the next choice.
    """

    def __init__(self, placement: Placement, ahead: SentAhead) -> None:
        self._placement = placement
        self._ahead = ahead
        self._loads: dict[GroupId, GroupLoad] = {}
        """Of all that may be chosen."""
        self._num_roomy = 0
        """Of these, the ones that stand."""
        self._promised_tokens: dict[GroupId, int] = {}

    def begin(self, leaders: Set[InstanceId] | None = None) -> bool:
        """Choose among all groups from now on, or among those that these instances lead.

        Groups that are about to stand may be chosen as well. False if no group has room.
        """
        placement = self._placement
        if leaders is None:
            groups = placement.candidates()
        else:
            groups = placement.candidates_led_by(leaders)
        self._loads = {
            group.layout.group_id: group.load for group in groups if self._has_room(group)
        }
        self._num_roomy = len(self._loads)
        self._loads |= {group_id: group.load for group_id, group in placement.expected.items()}
        self._promised_tokens = {}
        return self.has_room

    def _has_room(self, group: Group) -> bool:
        return self._ahead.has_room(group.layout.leader, len(group.layout.stages))

    @property
    def has_room(self) -> bool:
        """Whether any group may be sent one more request."""
        return self._num_roomy > 0

    def choose(self, request_blocks: int, saved: Saved) -> GroupId | None:
        """The group where a request starts soonest: one with room, or one that will stand soon.

        None if there is none, or if none has room now.
        """
        return (
            choose_group(self._loads.values(), request_blocks, saved) if self._num_roomy else None
        )

    def promise(self, group_id: GroupId, num_blocks: int, num_tokens: int) -> None:
        """A request waits for a group that is about to stand.

        As many do as may be sent there then.
        """
        promised_tokens = self._promised_tokens.get(group_id, 0) + num_tokens
        self._promised_tokens[group_id] = promised_tokens
        num_stages = len(self._placement.expected[group_id].layout.stages)
        if promised_tokens >= self._ahead.most_tokens(num_stages):
            del self._loads[group_id]
            return
        load = self._loads[group_id]
        self._loads[group_id] = replace(
            load,
            num_unreported=load.num_unreported + 1,
            unreported_blocks=load.unreported_blocks + num_blocks,
        )

    def sent(self, group: Group) -> None:
        """A request was sent to a group."""
        group_id = group.layout.group_id
        if self._has_room(group):
            self._loads[group_id] = group.load
        else:
            del self._loads[group_id]
            self._num_roomy -= 1
