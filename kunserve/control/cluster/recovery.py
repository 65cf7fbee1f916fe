"""Fault tolerance (paper section 4.4): what the cluster does when an instance or a front dies.

the dead one's group    its survivors hold parts of the model only: each forms a group alone
its transition          rolled back before the commit, failed after it; then its members form too
its requests            run again elsewhere, from the prompt and the tokens already delivered
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from kunserve.control.cluster.commands import Outbox
from kunserve.control.cluster.instances import Instances
from kunserve.control.cluster.migrations import Migrations
from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.requests.quarantine import NOBODY, Blame
from kunserve.control.cluster.requests.requests import Requests
from kunserve.control.cluster.scaling import Scaling
from kunserve.control.cluster.transition import Transition
from kunserve.control.cluster.transitions import Transitions
from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.messages import LinkBroken, Rejoin


def choose_standing(events: Iterable[Rejoin]) -> list[GroupLayout]:
    """The groups that can stand again as they were; newest first, because ids only grow."""
    by_instance = {event.ready.spec.instance_id: event for event in events}
    claimed = {
        event.layout.group_id: event.layout
        for event in by_instance.values()
        if event.layout is not None
    }

    def can_take_part(instance_id: InstanceId, layers: LayerRange) -> bool:
        event = by_instance.get(instance_id)
        return event is not None and event.layout is not None and event.held.covers(layers)

    standing: list[GroupLayout] = []
    taken: set[InstanceId] = set()
    for _, layout in sorted(claimed.items(), reverse=True):
        is_free = not taken & set(layout.members)
        if is_free and all(can_take_part(i, layers) for i, layers in layout.stages):
            standing.append(layout)
            taken |= set(layout.members)
    return standing


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
        max_num_seqs: int,
        partners: Callable[[InstanceId], set[InstanceId]],
    ) -> None:
        """``partners``: with whom an instance stands in a group, a transition or a migration."""
        self._partners = partners
        self._instances = instances
        self._placement = placement
        self._transitions = transitions
        self._requests = requests
        self._migrations = migrations
        self._scaling = scaling
        self._outbox = outbox
        self._max_num_seqs = max_num_seqs
        self.num_deaths = 0
        """Instances that died so far."""

    def lost(self, instance_id: InstanceId, reason: str, now_s: float, blame: Blame) -> bool:
        """An instance died: its group's survivors start anew, its requests are run again.

        Whatever ran there may be why, as far as ``blame`` says. False if it was not known to live.
        """
        if not self._instances.forget(instance_id):
            return False
        self.num_deaths += 1
        num_suspects = self._num_suspects(instance_id) if blame.cause else {}
        affected = self._end_all_of(
            (instance_id,), f"instance {instance_id} died ({reason})", now_s
        )
        self._start_over(affected, num_suspects, blame)
        return True

    def link_broken(self, event: LinkBroken, now_s: float) -> None:
        """Words between two instances are lost: all that they are part of starts anew.

        Both ends form anew, because the sender's ``Form`` makes the link whole again. Where there
        is no connection this is so for those only who stand together now: what they have only
        been asked for ends, a transition that may roll back, or a migration.
        """
        ends = (event.instance_id, event.peer)
        if not all(end in self._instances for end in ends):
            return  # the other end has died, and what it was part of starts anew for that
        if event.is_down:
            self._transitions.cuts.found(*ends, now_s)
        if event.is_down and event.peer not in self._partners(event.instance_id):
            return  # should anything be lost, the numbers will tell when there is a connection
        groups = [self._placement.with_member(end) for end in ends]
        lost = f"the link from instance {event.peer} to {event.instance_id} broke ({event.reason})"
        transition = self._transitions.with_member(event.instance_id)
        if event.is_down and groups[0] is not groups[1]:
            if transition is None or event.peer not in transition.members:
                self._migrations.end_between(ends)
                return
            if transition.may_roll_back:
                self._transitions.roll_back(transition, lost, now_s)
                return
        if all(group is not None and group.forming for group in groups):
            return  # the other direction has been told of before
        self._start_over(self._end_all_of(ends, lost, now_s), {})

    def _end_all_of(
        self, instances: Iterable[InstanceId], reason: str, now_s: float
    ) -> set[InstanceId]:
        """End the transitions that these take part in; whoever must start anew with them."""
        affected = set(instances)
        for instance_id in tuple(affected):
            group = self._placement.with_member(instance_id)
            if group is not None:
                affected |= set(group.layout.members)
            transition = self._transitions.with_member(instance_id)
            if transition is None:
                continue
            if transition.may_roll_back:
                self._transitions.roll_back(transition, reason, now_s)
            else:
                affected |= transition.members
                self._transitions.fail(transition, reason, now_s)
        return affected

    def _num_suspects(self, dead: InstanceId) -> dict[InstanceId, int]:
        """How many requests of each leader can have run in the dead one's last steps: those that
        came first. Of its group; in a commit, once it has switched, of all that become one.

        The last report tells what ran then. Since then at most as many more have been admitted as
        may run at once, in each stage.
        """
        own, transition = self._placement.with_member(dead), self._transitions.with_member(dead)
        groups = [] if own is None else [own]
        if transition is not None and transition.has_switched(dead):
            groups = [self._placement.groups[group_id] for group_id in transition.old_groups]
        return {
            group.layout.leader: group.report.num_running
            + group.report.num_stalled
            + self._max_num_seqs * len(group.layout.stages)
            for group in groups
        }

    def give_up(self, transition: Transition, now_s: float) -> None:
        """Members of a committed transition do not answer: all of them start anew."""
        affected = transition.members
        self._transitions.fail(transition, transition.silence, now_s)
        self._start_over(affected, {})

    def begin_empty(self, layout: GroupLayout) -> None:
        """The same members form the group again; what still ran there runs again elsewhere."""
        self._placement.remove((layout,))
        self._instances.form(layout.stages)
        self._requests.rerun({layout.leader}, {})

    def _start_over(
        self,
        affected: set[InstanceId],
        num_suspects: Mapping[InstanceId, int],
        blame: Blame = NOBODY,
    ) -> None:
        self._form_anew(affected)
        self._scaling.keep_all()
        self._migrations.end_with(affected)
        self._requests.rerun(affected, num_suspects, blame)

    def begin_anew(self, instances: Iterable[InstanceId], now_s: float) -> None:
        """These say their first word. Should they stand somewhere, as far as is known, they do so
        no more, and their requests run again.

        A driver tells of each death before that. Else an instance would stand in two groups.
        """
        known = [i for i in instances if self._instances.forget(i)]
        if known:
            reason = f"instances {known} said their first word again"
            self._start_over(self._end_all_of(known, reason, now_s), {})

    def rejoin(self, events: Sequence[Rejoin], now_s: float) -> None:
        """Instances of an earlier front are back: their groups stand again, without requests.

        What was only prepared is forgotten by that. Of what was half committed the newest groups
        stand whose members all have their layers; the others form groups alone.
        """
        members = {event.ready.spec.instance_id for event in events}
        self.begin_anew(sorted(members), now_s)
        for event in events:
            self._instances.rejoined(event)
        standing = choose_standing(events)
        for layout in standing:
            self._instances.form(layout.stages)
        in_groups = {member for layout in standing for member in layout.members}
        for member in sorted(members - in_groups):
            self._instances.form_alone(member)

    def _form_anew(self, members: Iterable[InstanceId]) -> None:
        """Those of them that live become groups of their own, without any request."""
        gone = sorted(members)
        for member in gone:
            standing = self._placement.with_member(member)
            if standing is not None:
                self._placement.remove((standing.layout,))
        for survivor in gone:
            if survivor in self._instances:
                self._instances.form_alone(survivor)
