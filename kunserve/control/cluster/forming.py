"""Groups that form: since when, and whether anything still comes to their members.

A member that reads its layers from a disk that hangs beats and turns, so nobody else would see it.
"""

from dataclasses import dataclass

from kunserve.control.cluster.commands import Condemn, Outbox
from kunserve.control.cluster.placement import Placement
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.snapshots import FormingGroup

PATIENCE_S = 120.0
"""How long nothing may come to a member. However slow its disk is, bytes that come count."""
TOLD_AFTER_S = 10.0
"""A group that forms for longer is told of to people."""


@dataclass(slots=True)
class _Member:
    group_id: GroupId
    since_s: float
    moved_s: float
    """When bytes came last, or when it was told to form."""
    is_condemned: bool = False


class FormingWatch:
    """Owner of the clocks of members that have not said ``Formed``."""

    def __init__(self, placement: Placement, outbox: Outbox) -> None:
        self._placement = placement
        self._outbox = outbox
        self._members: dict[InstanceId, _Member] = {}

    def progressed(self, instance_id: InstanceId, now_s: float) -> None:
        """Bytes have come to an instance."""
        member = self._members.get(instance_id)
        if member is not None:
            member.moved_s = now_s

    def look(self, now_s: float) -> None:
        """Condemn whoever nothing comes to. Called at every tick."""
        before, self._members = self._members, {}
        for group_id, group in self._placement.groups.items():
            for instance_id in group.forming:
                member = before.get(instance_id)
                if member is None or member.group_id != group_id:
                    member = _Member(group_id, now_s, now_s)
                self._members[instance_id] = member
                still_s = now_s - member.moved_s
                if still_s > PATIENCE_S and not member.is_condemned:
                    member.is_condemned = True
                    reason = f"it forms a group, and nothing has come to it for {still_s:.0f} s"
                    self._outbox.append(Condemn(instance_id, reason))

    def snapshots(self) -> tuple[FormingGroup, ...]:
        """For people: each group that forms, and its members that are not done."""
        found: dict[GroupId, FormingGroup] = {}
        for instance_id, member in sorted(self._members.items()):
            group = found.get(member.group_id)
            members = (instance_id,) if group is None else (*group.members, instance_id)
            found[member.group_id] = FormingGroup(member.group_id, members, member.since_s)
        return tuple(found.values())

    def reason_texts(self, now_s: float) -> tuple[str, ...]:
        """Why some groups serve nobody, for people."""
        return tuple(
            f"group {one.group_id} forms since {now_s - one.since_s:.0f} s: instances "
            f"{list(one.members)} load weights"
            for one in self.snapshots()
            if now_s - one.since_s > TOLD_AFTER_S
        )
