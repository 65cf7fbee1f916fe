"""The groups that a new request may be sent to, kept ready: a dispatch looks at few of them.

Going through all groups for each request takes milliseconds in a large cluster. So those that have
room are kept in a ``GroupChooser``, and whatever changes a group's load changes its entry.
"""

from kunserve.control.cluster.backlog import SentAhead
from kunserve.control.cluster.placement import Group, Placement
from kunserve.core.ids import GroupId
from kunserve.policy.affinity import Saved
from kunserve.policy.placing import GroupChooser


class RoomyGroups:
    """Follows ``Placement`` and ``SentAhead``; owns no fact of its own."""

    def __init__(self, placement: Placement, ahead: SentAhead) -> None:
        self._placement = placement
        self._ahead = ahead
        self._version = -1
        self._chooser = GroupChooser(())
        self._num_roomy = 0
        self._eligible: set[GroupId] = set()
        """Groups that may be sent a request once they have room."""

    def choose(self, request_blocks: int, saved: Saved) -> GroupId | None:
        """The group where a request starts soonest: one with room, or one that will stand soon.

        None if there is none, or if none has room now.
        """
        if self._placement.version != self._version:
            self._begin_anew()
        self.follow()
        return self._chooser.choose(request_blocks, saved) if self._num_roomy else None

    def follow(self) -> None:
        """Called often, so that little has changed since. Other groups are looked at when a request
        comes, because many may change before that.
        """
        placement, ahead = self._placement, self._ahead
        if placement.version != self._version:
            return
        if ahead.changed:
            for leader in ahead.changed:
                group = placement.led_by(leader)
                if group is not None:
                    placement.changed.add(group.layout.group_id)
            ahead.changed.clear()
        if placement.changed:
            for group_id in placement.changed & self._eligible:
                self._put(placement.groups[group_id])
            placement.changed.clear()

    def _begin_anew(self) -> None:
        placement = self._placement
        self._version = placement.version
        self._chooser = GroupChooser(group.load for group in placement.expected.values())
        self._num_roomy = 0
        candidates = placement.candidates()
        self._eligible = {group.layout.group_id for group in candidates}
        for group in candidates:
            self._put(group)
        placement.changed.clear()
        self._ahead.changed.clear()

    def _put(self, group: Group) -> None:
        group_id, chooser = group.layout.group_id, self._chooser
        was_there = group_id in chooser
        if self._ahead.has_room(group.layout.leader, len(group.layout.stages)):
            chooser.put(group.load)
            self._num_roomy += not was_there
        elif was_there:
            chooser.close(group_id)
            self._num_roomy -= 1
