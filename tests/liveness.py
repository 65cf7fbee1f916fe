"""Every wait ends: nothing in an in-process cluster waits for longer than it may.

Ages are of *fair* time: of time in which mail comes, steps end, and bytes move, all but what a
fault holds back. What makes progress begins a new age. So a wait without an end fails at the moment
at which it has lasted too long, whatever it is that nobody looks at any more.
"""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from kunserve.control.cluster.standing import Standing
from kunserve.control.cluster.transition import Phase
from kunserve.control.instance.changes.layer_restore import LayerRestore
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import InstanceId
from kunserve_lab.world.by_choice import ChosenMember, ChosenWorld

SLACK_S = 10.0
"""Beside each patience: words take their time, and bytes are told of every 5 s."""
FORMING_S = 120.0
"""A group forms, and no layer comes."""
TEST_BEGINS_S = 150.0
"""A group is reserved for a test that does not begin."""
TEST_S = 120.0
"""A test in which nobody makes a token."""
HELD_S = ClusterConfig().start_timeout_s - 2 * SLACK_S
"""A request is suspected, and nobody is tested; later it would end with an error."""
PHASES_S = {
    Phase.LOADING: 120.0,
    Phase.PREPARING: 10.0,
    Phase.COMMITTING: 60.0,
    Phase.EXCHANGING: 60.0,
}
"""A phase of a transition in which no byte comes. Figures of its own, because a patience that is
raised has to be seen here."""
STEPS_BESIDE = 4
"""Steps of each member that a phase may take beside: members read mail between two steps."""
MIGRATION_S = 60.0
"""A migration of which no block comes, and that makes no token."""
STANDS_STILL_S = FORMING_S + 100.0
"""Requests wait, and nobody gets a token."""
AT_ONCE_S = 10.0
"""What lasts some messages and the end of a step."""


class Wait(NamedTuple):
    """Something that must come to an end, and how long that may take."""

    longest_s: float
    progress: Hashable = None
    """With another value the wait begins anew."""


class LivenessWatch:
    """Knows since when each thing waits. Belongs to one world."""

    def __init__(self, world: ChosenWorld) -> None:
        self._world = world
        self._since: dict[str, tuple[Hashable, float]] = {}

    def look(self, fair_s: float) -> None:
        """Assert that nothing has waited for too long. ``fair_s``: fair time so far."""
        since: dict[str, tuple[Hashable, float]] = {}
        for what, wait in self._waits():
            known = self._since.get(what)
            if known is None or known[0] != wait.progress:
                known = wait.progress, fair_s
            since[what] = known
            waited_s = fair_s - known[1]
            assert waited_s <= wait.longest_s + SLACK_S, f"{what} for {waited_s:.0f} s"
        self._since = since

    def _waits(self) -> Iterator[tuple[str, Wait]]:
        yield from self._of_groups()
        yield from self._of_changes()
        for instance_id, member in self._world.members.items():
            for what, wait in _of_instance(member):
                yield f"instance {instance_id}: {what}", wait

    def _bytes_taken(self, members: frozenset[InstanceId]) -> int:
        """What has come to these instances so far."""
        living = self._world.members
        return sum(living[i].mover.num_bytes_taken for i in members & living.keys())

    def _tokens(self) -> tuple[int, int]:
        """What clients have got, and how many have got all."""
        accounts = self._world.accounts.values()
        return sum(len(a.token_ids) for a in accounts), sum(a.end is not None for a in accounts)

    def _of_groups(self) -> Iterator[tuple[str, Wait]]:
        controller = self._world.controller
        placement, quarantine = controller.placement, controller._requests.quarantine
        for group_id, group in placement.groups.items():
            if group.forming:
                taken = self._bytes_taken(frozenset(group.layout.members))
                yield f"group {group_id} forms", Wait(FORMING_S, (len(group.forming), taken))
        if quarantine.tested:
            progress = (tuple(quarantine.tested), self._tokens())
            yield f"requests {sorted(quarantine.tested)} are tested", Wait(TEST_S, progress)
        elif placement.reserved is not None:
            yield f"group {placement.reserved} waits for a test", Wait(TEST_BEGINS_S)
        else:
            for request_id in self._world.unfinished:
                if quarantine.holds(request_id):
                    yield f"request {request_id} is held", Wait(HELD_S, quarantine.num_quarantined)
        for group_id in placement.closing:
            if Standing.CHANGING not in placement.groups[group_id].standing:
                yield f"group {group_id} closes without a transition", Wait(AT_ONCE_S)
        if self._world.unfinished and placement.groups:
            yield "everything stands still", Wait(STANDS_STILL_S, self._tokens())

    def _of_changes(self) -> Iterator[tuple[str, Wait]]:
        controller = self._world.controller
        groups = controller.placement.groups.values()
        for transition_id, transition in controller.transitions.active.items():
            members = frozenset(transition.members)
            steps_s = [g.step_s for g in groups if not members.isdisjoint(g.layout.members)]
            longest_s = PHASES_S[transition.phase]
            longest_s += STEPS_BESIDE * len(members) * max(steps_s, default=0.0)
            counts = len(transition.waits_for), len(transition.exchanging)
            progress = (transition.phase, counts, self._bytes_taken(members))
            yield f"transition {transition_id} {transition.phase}", Wait(longest_s, progress)
        for migration_id, migration in controller.balance._active.items():
            sides = frozenset((migration.source, migration.target))
            moved = (self._bytes_taken(sides), self._tokens())
            yield f"migration {migration_id}", Wait(MIGRATION_S, moved)


def _of_instance(member: ChosenMember) -> Iterator[tuple[str, Wait]]:
    agent = member.agent
    change = agent.change
    if isinstance(change, LayerRestore) and change.phase == "returning":
        yield "a restore that was called off", Wait(AT_ONCE_S)
    membership = agent.membership
    if membership is None or membership.scheduler is None or change.change_id is not None:
        return
    capacity_blocks = membership.scheduler.capacity_blocks
    if capacity_blocks != membership.capacity_blocks:
        yield f"its ledger has {capacity_blocks} of {membership.capacity_blocks} blocks", Wait(0.0)
