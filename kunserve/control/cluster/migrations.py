"""Live migrations under way, as the controller drives them: one per instance at a time.

    source <- Migrate, source -> target: offers of KV, source -> MigrationReady (request stopped),
    target <- Submit, source <- HandOff, target pulls the last blocks, source -> MigrationOver

The request changes hands here, at one moment: after every token that the source made of it, and
before any that the target makes. When a side dies, whoever has it then runs it.

A group that leaves gives its requests away one after the other, whatever the overload policy.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kunserve.control.cluster.commands import Outbox, Send
from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.requests import Requests
from kunserve.control.cluster.standing import Act, Standing
from kunserve.control.cluster.transitions import Transitions
from kunserve.core.config import OverloadConfig
from kunserve.core.ids import GroupId, InstanceId, TransitionId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.messages import (
    EndMigration,
    HandOff,
    Migrate,
    MigrationOver,
    MigrationReady,
)
from kunserve.policy.dispatch.migrate import choose_refuge, plan_migrations

FRESH_REPORTS = 2
"""Reports after a migration until a group may have a part in the next: one may be on its way."""


@dataclass(slots=True)
class _Migration:
    source: InstanceId
    target: InstanceId
    source_group: GroupId
    target_group: GroupId


class Migrations:
    """Starts migrations where the policy wants them, and sees them through."""

    def __init__(
        self,
        config: OverloadConfig,
        blocks: KvBlocks,
        max_num_seqs: int,
        placement: Placement,
        transitions: Transitions,
        requests: Requests,
        outbox: Outbox,
        introduce: Callable[[Iterable[InstanceId]], None],
    ) -> None:
        """``introduce`` has instances know each other before they need it."""
        self._introduce = introduce
        self._config = config
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._placement = placement
        self._transitions = transitions
        self._requests = requests
        self._outbox = outbox
        self._active: dict[TransitionId, _Migration] = {}
        self._wait_for_report: dict[GroupId, int] = {}
        """Groups that have migrated lately, and the number of the report that shows it."""
        self.num_moved = 0
        """Requests handed off."""

    def watch(self, now_s: float) -> None:
        """Called at every report."""
        if self._config.policy != "migrate":
            return
        free = [group for group in self._placement.groups.values() if self._free(group)]
        led = {group.layout.leader: group.layout.group_id for group in free}
        cuts = self._transitions.cuts.pairs(now_s)
        apart = {frozenset((led[a], led[b])) for a, b in cuts if a in led and b in led}
        loads = [group.load for group in free]
        for pair in plan_migrations(loads, self._blocks.block_size, apart):
            self.begin(pair.source, pair.target, pair.max_blocks)

    def drain(self, now_s: float) -> None:
        """Called at every tick: each group that is to be empty moves one running request.

        With a ring no request can move, because it writes over what has been copied.
        """
        placement = self._placement
        emptied = placement.emptied
        if not emptied or self._blocks.ring is not None:
            return
        apart = self._transitions.cuts.pairs(now_s)
        for group_id in sorted(emptied):
            source = placement.groups[group_id]
            if not source.report.num_running or not self._may(Act.GIVE, source):
                continue
            cut_off = {one for pair in apart if source.layout.leader in pair for one in pair}
            targets = [
                group.load
                for group in placement.candidates()
                if self._may(Act.MOVE, group) and group.layout.leader not in cut_off
            ]
            refuge = choose_refuge(targets, self._blocks.block_size, self._max_num_seqs)
            if refuge is not None:
                self.begin(group_id, refuge.group_id, refuge.max_blocks)

    def _free(self, group: Group) -> bool:
        number = self._wait_for_report.get(group.layout.group_id, 0)
        return self._may(Act.MOVE, group) and group.report.sequence_number >= number

    def _may(self, act: Act, group: Group) -> bool:
        """Whether a request may come there or go now, as far as the group goes."""
        return act in group.may and group.is_reported and len(group.layout.stages) == 1

    def partners(self, instance_id: InstanceId) -> set[InstanceId]:
        """With whom the instance has a part in a migration."""
        sides = [{m.source, m.target} for m in self._active.values()]
        return set().union(*(pair for pair in sides if instance_id in pair)) - {instance_id}

    def begin(self, source: GroupId, target: GroupId, max_blocks: int) -> TransitionId:
        """Have the source's leader choose a request and move it."""
        groups = self._placement.groups
        source_leader, target_leader = (groups[g].layout.leader for g in (source, target))
        migration_id = self._transitions.new_id()
        self._active[migration_id] = _Migration(source_leader, target_leader, source, target)
        for group_id in (source, target):
            self._placement.mark(group_id, Standing.MIGRATING)
        self._introduce((source_leader, target_leader))
        message = Migrate(migration_id, source, target_leader, target, max_blocks)
        self._outbox.append(Send(source_leader, message))
        return migration_id

    def on_ready(self, event: MigrationReady) -> None:
        """The request has stopped: from now on it is the target's, unless it has ended."""
        migration = self._active.get(event.migration_id)
        if migration is None:
            return
        group = self._placement.groups.get(migration.target_group)
        if group is None:
            self._end(event.migration_id, (migration.source, migration.target))
        elif self._requests.migrate(event.request_id, migration.source, group, event.migration_id):
            self._outbox.append(Send(migration.source, HandOff(event.migration_id)))
            self.num_moved += 1

    def on_over(self, event: MigrationOver) -> None:
        """Nothing is left of it at its source."""
        migration = self._active.get(event.migration_id)
        if migration is not None:
            self._end(event.migration_id, ())

    def end_with(self, instances: Iterable[InstanceId]) -> None:
        """These died, or start anew: let the other side of their migrations know."""
        gone = set(instances)
        for migration_id, migration in tuple(self._active.items()):
            sides = {migration.source, migration.target}
            if sides & gone:
                self._end(migration_id, sorted(sides - gone))

    def end_between(self, ends: tuple[InstanceId, InstanceId]) -> None:
        """These two do not reach each other: the request goes on with whoever has it."""
        for migration_id, migration in tuple(self._active.items()):
            if {migration.source, migration.target} == {*ends}:
                self._end(migration_id, sorted(ends))

    def _end(self, migration_id: TransitionId, tell: Iterable[InstanceId]) -> None:
        migration = self._active.pop(migration_id)
        for instance_id in tell:
            self._outbox.append(Send(instance_id, EndMigration(migration_id)))
        groups = self._placement.groups
        for group_id in (migration.source_group, migration.target_group):
            self._placement.mark(group_id, Standing.MIGRATING, is_so=False)
            group = groups.get(group_id)
            if group is not None and group.is_reported:
                number = group.report.sequence_number + FRESH_REPORTS
                self._wait_for_report[group_id] = number
        for group_id in self._wait_for_report.keys() - groups.keys():
            del self._wait_for_report[group_id]

    def check(self) -> None:
        """Assert that every group has a part in one migration at most."""
        parts = [m.source_group for m in self._active.values()]
        parts += [m.target_group for m in self._active.values()]
        assert len(parts) == len(set(parts)), self._active
        migrating = self._placement.migrating
        assert migrating == self._placement.groups.keys() & set(parts), migrating
