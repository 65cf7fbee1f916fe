"""Fault tolerance (paper section 4.4): what the rest of the cluster does when an instance dies.

the dead one's group    its survivors hold parts of the model only: each forms a group alone
its transition          rolled back before the commit, failed after it; then its members form too
its requests            run again elsewhere, from the prompt and the tokens already delivered
"""

from collections.abc import Iterable

from kunserve.control.cluster.commands import Outbox, Respawn
from kunserve.control.cluster.instances import Instances
from kunserve.control.cluster.migrations import Migrations
from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.requests import Requests
from kunserve.control.cluster.scaling import Scaling
from kunserve.control.cluster.transitions import Transition, Transitions
from kunserve.core.ids import InstanceId


class Recovery:
    """Mends the cluster after a death."""

    def __init__(
        self,
        instances: Instances,
        placement: Placement,
        transitions: Transitions,
        requests: Requests,
        migrations: Migrations,
        scaling: Scaling,
        outbox: Outbox,
    ) -> None:
        self._instances = instances
        self._placement = placement
        self._transitions = transitions
        self._requests = requests
        self._migrations = migrations
        self._scaling = scaling
        self._outbox = outbox

    def lost(self, instance_id: InstanceId, reason: str, now_s: float) -> None:
        """An instance died: its group's survivors start anew, its requests are run again."""
        if not self._instances.forget(instance_id):
            return
        affected = {instance_id}
        group = self._placement.with_member(instance_id)
        if group is not None:
            affected |= set(group.layout.members)
        transition = self._transitions.with_member(instance_id)
        died = f"instance {instance_id} died ({reason})"
        if transition is not None:
            if transition.may_roll_back:
                self._transitions.roll_back(transition, died, now_s)
            else:
                affected |= transition.members
                self._transitions.fail(transition, died, now_s)
        self._start_over(affected)
        self._outbox.add(Respawn(instance_id))

    def give_up(self, transition: Transition, now_s: float) -> None:
        """Members of a committed transition do not answer: all of them start anew."""
        affected = transition.members
        self._transitions.fail(transition, transition.silence, now_s)
        self._start_over(affected)

    def _start_over(self, affected: set[InstanceId]) -> None:
        self._form_anew(affected)
        self._scaling.keep_all()
        self._migrations.end_with(affected)
        self._requests.rerun(affected)

    def _form_anew(self, members: Iterable[InstanceId]) -> None:
        """Those of them that live become groups of their own, without any request."""
        gone = set(members)
        for standing in tuple(self._placement.groups.values()):
            if gone & set(standing.layout.members):
                self._placement.remove((standing.layout,))
        for survivor in sorted(gone):
            if survivor in self._instances:
                self._instances.form_alone(survivor)
