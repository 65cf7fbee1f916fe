"""Instances whose processes were asked to end (SIGTERM): each gives its requests away first.

An operator replaces instances one by one like that, and a node that is drained asks all of its own.
The instance's place stays: whoever watches processes starts it anew.
"""

from kunserve.control.cluster.commands import Outbox, Send
from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.requests.requests import Requests
from kunserve.control.cluster.standing import Act, Standing
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Shutdown


class Departures:
    """Knows who wants to leave, and since when."""

    def __init__(
        self, placement: Placement, requests: Requests, outbox: Outbox, patience_s: float
    ) -> None:
        """After ``patience_s`` an instance leaves at once: its requests then run anew elsewhere."""
        self._placement = placement
        self._requests = requests
        self._outbox = outbox
        self._patience_s = patience_s
        self._since_s: dict[InstanceId, float] = {}
        self._dismissed: set[InstanceId] = set()

    def wish(self, instance_id: InstanceId, now_s: float) -> None:
        """The instance would leave. It says so again and again, and may be gone since."""
        if self._placement.with_member(instance_id) is not None:
            self._since_s.setdefault(instance_id, now_s)

    def forget(self, instance_id: InstanceId) -> None:
        """It is over, or another process is in its place."""
        self._since_s.pop(instance_id, None)
        self._dismissed.discard(instance_id)

    def pursue(self, now_s: float) -> None:
        """Called at every tick: empty those who leave, and let go who is empty."""
        for instance_id, since_s in self._since_s.items():
            if instance_id in self._dismissed:
                continue
            if now_s - since_s >= self._patience_s or self._is_empty(instance_id):
                self._dismissed.add(instance_id)
                self._outbox.append(Send(instance_id, Shutdown()))

    def _is_empty(self, instance_id: InstanceId) -> bool:
        """Whether nobody would miss it; if it may, it begins to give its requests away.

        It serves on while nobody else could take them, and while it is a stage of a pipeline.
        """
        placement = self._placement
        group = placement.with_member(instance_id)
        if group is None or len(group.layout.stages) > 1:
            return False
        if Standing.DEPARTING not in group.standing:
            others = placement.candidates()
            if Act.LEAVE in group.may and any(other is not group for other in others):
                placement.mark(group.layout.group_id, Standing.DEPARTING)
            return False
        return Act.END in group.may and self._requests.num_at(instance_id) == 0

    def check(self) -> None:
        """Assert that a group departs only because its instance wants to."""
        wanted = self._since_s.keys()
        for group_id in self._placement.standing_as(Standing.DEPARTING):
            leader = self._placement.groups[group_id].layout.leader
            assert leader in wanted, (group_id, wanted)
        assert self._dismissed <= wanted, (self._dismissed, wanted)
