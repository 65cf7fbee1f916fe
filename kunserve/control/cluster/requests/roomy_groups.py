"""The groups that requests may be sent to, kept ready: a dispatch looks at few of them.

Going through all groups for each request takes milliseconds in a large cluster. So those that have
room are kept in a ``GroupChooser`` beside those that are about to stand. Whatever changes a group's
load, or whether it may be sent requests, changes its entry alone.

A request that starts sooner in a group that is about to stand is promised to it, and stays in the
backlog. Promises are worked out anew whenever something may be sent. Where many groups are about to
stand they are kept until the next tick, because that took most of the controller's time.
"""

from collections.abc import Set

from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.backlog import SentAhead
from kunserve.control.cluster.requests.live import Live
from kunserve.core.ids import GroupId, InstanceId
from kunserve.policy.dispatch.affinity import Saved
from kunserve.policy.dispatch.placing import GroupChooser

FEW_EXPECTED = 8
"""Of no more groups that are about to stand are promises worked out anew each time."""


class RoomyGroups:
    """Follows ``Placement`` and ``SentAhead``; owns no fact of its own.

    ``begin`` comes before choosing for one request or for many. Of those that are chosen one after
    the other each is told of by ``sent`` or ``promise`` before the next choice.
    """

    def __init__(self, placement: Placement, ahead: SentAhead) -> None:
        self._placement = placement
        self._ahead = ahead
        self._chooser = GroupChooser(())
        self._roomy: set[GroupId] = set()
        """Those in ``_chooser`` that have room; the others are about to stand."""
        self._among = self._chooser
        """Where is chosen now."""
        self._left = self._roomy
        """Of those that may be chosen now, the ones that have room."""
        self._promises: dict[GroupId, list[int]] = {}
        """To groups that are about to stand: blocks of each request."""
        self._promised_tokens: dict[GroupId, int] = {}
        """Of all these requests together."""
        self._epoch = 0
        """Promises of an earlier one are void."""

    def follow(self) -> None:
        """Called often, so that little has changed since."""
        placement, ahead = self._placement, self._ahead
        if ahead.changed:
            for leader in ahead.changed:
                group = placement.led_by(leader)
                if group is not None:
                    placement.changed.add(group.layout.group_id)
            ahead.changed.clear()
        if placement.changed:
            for group_id in placement.changed:
                self._look_at(group_id)
            placement.changed.clear()

    def _look_at(self, group_id: GroupId) -> None:
        placement = self._placement
        expected = placement.expected.get(group_id)
        if expected is not None:
            if group_id not in self._promises:
                self._chooser.put(expected.load)
            return
        if self._promises.pop(group_id, None) is not None:
            del self._promised_tokens[group_id]
        if placement.takes(group_id) and self._has_room(placement.groups[group_id]):
            self._chooser.put(placement.groups[group_id].load)
            self._roomy.add(group_id)
        else:
            self._take_out(group_id)

    def _has_room(self, group: Group) -> bool:
        return self._ahead.has_room(group.layout.leader, len(group.layout.stages))

    def _take_out(self, group_id: GroupId) -> None:
        self._roomy.discard(group_id)
        if group_id in self._chooser:
            self._chooser.close(group_id)

    def begin(self, leaders: Set[InstanceId] | None = None) -> bool:
        """Choose among all groups from now on, or among those that these instances lead.

        Groups that are about to stand may be chosen as well. False if no group has room.
        """
        if not self._keeps_promises:
            self._forget_promises()
        self.follow()
        self._among, self._left = self._chooser, self._roomy
        if leaders is not None:
            self._narrow(leaders)
        return bool(self._left)

    def _narrow(self, leaders: Set[InstanceId]) -> None:
        """Choose among those only that these lead, in the way that takes less time."""
        led = [self._placement.led_by(leader) for leader in leaders]
        wanted = {group.layout.group_id for group in led if group is not None} & self._roomy
        expected = self._placement.expected
        if not wanted:
            self._left = wanted
        elif len(self._roomy) - len(wanted) <= len(expected):
            for group_id in self._roomy - wanted:
                self._take_out(group_id)
                self._placement.changed.add(group_id)  # it is back when this is looked at next
        else:
            groups = [self._placement.groups[group_id] for group_id in sorted(wanted)]
            self._among = GroupChooser([group.load for group in (*groups, *expected.values())])
            self._left = wanted
            for group_id, promises in self._promises.items():
                for num_blocks in promises:
                    self._among.sent(group_id, num_blocks)
                if self._is_full(group_id):
                    self._among.close(group_id)

    @property
    def has_room(self) -> bool:
        """Whether any group may be sent one more request."""
        return bool(self._left)

    def choose(self, request_blocks: int, saved: Saved) -> GroupId | None:
        """The group where a request starts soonest: one with room, or one that will stand soon.

        None if there is none, or if none has room now.
        """
        return self._among.choose(request_blocks, saved) if self._left else None

    def promise(self, live: Live, group_id: GroupId, num_blocks: int, num_tokens: int) -> None:
        """A request waits for a group that is about to stand.

        As many do as may be sent there then.
        """
        live.promise = group_id, self._epoch
        self._promises.setdefault(group_id, []).append(num_blocks)
        promised_tokens = self._promised_tokens.get(group_id, 0) + num_tokens
        self._promised_tokens[group_id] = promised_tokens
        is_full = self._is_full(group_id)
        for chooser in {id(one): one for one in (self._among, self._chooser)}.values():
            chooser.sent(group_id, num_blocks)
            if is_full:
                chooser.close(group_id)

    def _is_full(self, group_id: GroupId) -> bool:
        num_stages = len(self._placement.expected[group_id].layout.stages)
        return self._promised_tokens[group_id] >= self._ahead.most_tokens(num_stages)

    def is_promised(self, live: Live) -> bool:
        """Whether the request waits for a group that is about to stand."""
        promise = live.promise
        return (
            promise is not None
            and promise[1] == self._epoch
            and promise[0] in self._placement.expected
        )

    def end_promises(self) -> bool:
        """Called at every tick: what is promised is looked at anew. Whether anything was kept."""
        is_kept = bool(self._promises) and self._keeps_promises
        self._forget_promises()
        return is_kept

    def _forget_promises(self) -> None:
        if self._promises:
            self._epoch += 1
            self._placement.changed.update(self._promises)
            self._promises, self._promised_tokens = {}, {}

    @property
    def _keeps_promises(self) -> bool:
        return len(self._placement.expected) > FEW_EXPECTED

    def sent(self, group: Group, num_blocks: int) -> None:
        """A request was sent to a group."""
        group_id = group.layout.group_id
        self._among.sent(group_id, num_blocks)
        if not self._has_room(group):
            self._among.close(group_id)
            self._left.discard(group_id)
