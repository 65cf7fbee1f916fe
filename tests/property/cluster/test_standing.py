"""Nobody has a group do what it may not do where it stands, whatever happens around it.

The real controller decides everything; its instances are played. Loads, deaths, poison, sizes,
answers and their absence are drawn. Each command, and each change of a group's standing, is held
against the table.
"""

from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.control.cluster.commands import ControlCommand, Send
from kunserve.control.cluster.placement import Group
from kunserve.control.cluster.requests.quarantine import Blame, Cause
from kunserve.control.cluster.standing import Act, Standing
from kunserve.core.config import ClusterConfig, DispatchPolicy
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.messages import (
    Alive,
    Commit,
    LoadLayers,
    Message,
    Migrate,
    MigrationOver,
    MigrationReady,
    Returned,
    ReturnWaiting,
    Submit,
)
from kunserve.core.request import FinishReason
from tests.unit.control.cluster.brain import BLOCKS, Brain

MOST = 6
ENTRY = {
    Standing.CHANGING: {Act.CHANGE},
    Standing.TESTING: {Act.TEST},
    Standing.LEAVING: {Act.LEAVE},
    Standing.DEPARTING: {Act.LEAVE},
    Standing.MIGRATING: {Act.MOVE, Act.GIVE},
}
"""What a group must be allowed for this to become true of it."""


class Watched(Brain):
    """Sees every command and every change of standing as it is made."""

    def __init__(self, can_resize: bool, *args: Any, **settings: Any) -> None:
        self.can_resize = can_resize
        self.seen: set[Standing | type[Message]] = set()
        super().__init__(0, *args, **settings)
        placement, outbox = self.controller.placement, self.controller._outbox
        mark, append = placement.mark, outbox.append

        def watched_mark(group_id: GroupId, standing: Standing, *, is_so: bool = True) -> None:
            group = placement.groups.get(group_id)
            if group is not None and is_so and standing not in group.standing:
                self.seen.add(standing)
                assert standing not in ENTRY or group.may & ENTRY[standing], (standing, group)
            mark(group_id, standing, is_so=is_so)

        def watched_append(command: ControlCommand) -> None:
            if isinstance(command, Send):
                self.seen.add(type(command.message))
                self.look(command.instance_id, command.message)
            append(command)

        placement.mark = watched_mark  # type: ignore[method-assign]
        outbox.append = watched_append  # type: ignore[method-assign]

    def look(self, instance_id: InstanceId, message: Message) -> None:
        placement = self.controller.placement
        group = placement.led_by(instance_id)
        is_tested = group is not None and Standing.TESTING in group.standing
        match message:
            case Submit(request) if message.migration_id is None:
                assert group is not None
                quarantine = self.controller._requests.quarantine
                may_run = is_tested and quarantine.holds(request.request_id)
                assert may_run or Act.TAKE in group.may, (group.standing, request)
                assert may_run or not quarantine.holds(request.request_id), request
            case ReturnWaiting():
                assert group is not None
                assert is_tested or Act.RETURN in group.may, group.standing
            case LoadLayers(members=members):
                sources = [source for member in members for source in member.sources]
                for source in sources:
                    if source.instance_id is not None:
                        lender = placement.with_member(source.instance_id)
                        assert self._may_lend(lender, message), (source, lender)

    def _may_lend(self, lender: Group | None, message: LoadLayers) -> bool:
        assert lender is not None
        return lender.layout.group_id == message.group_id or Act.LEND in lender.may

    # What happens

    def harm(self, which: int, cause: Cause) -> None:
        group = self._group(which)
        if group is not None:
            victim = group.layout.members[which % len(group.layout.members)]
            self.controller.lost(victim, "exit code 1", self.now_s, Blame(cause))
            self.pass_time(0.0)

    def departs(self, which: int) -> None:
        group = self._group(which)
        if group is not None:
            member = group.layout.members[which % len(group.layout.members)]
            self.tell(int(member), Alive(member, wants_to_leave=True))

    def back(self, which: int) -> None:
        """Somebody who is not there is ready, and may take its time to form a group."""
        placement = self.controller.placement
        there = {m for group in placement.groups.values() for m in group.layout.members}
        gone = [number for number in range(MOST) if InstanceId(number) not in there]
        if gone:
            number = gone[which % len(gone)]
            self.slow = {number} if which % 2 else set()
            self.start(number)

    def all_formed(self) -> None:
        self.slow = set()
        for group in tuple(self.controller.placement.groups.values()):
            for member in tuple(group.forming):
                self.formed(member)

    def committed(self, leads: dict[int, tuple[RequestId, ...]] | None = None) -> None:
        """Those that are told to, and whose transition has not failed since."""
        active = self.controller.transitions.active
        told = self.take(Commit)
        self.commands += [Send(i, m) for i, m in told if m.transition_id in active]
        super().committed(leads)

    def answer(self, step: int) -> None:
        """Some of what the controller waits for comes."""
        (self.loaded, self.prepared, self.committed, self.exchanged)[step % 4]()

    def migrated(self, which: int) -> None:
        for source, message in self.take(Migrate):
            led = self.controller._requests.led_by(source)
            if which % 2 and led:
                ready = MigrationReady(message.migration_id, source, led[0])
                self.tell(source, ready)
            if which % 3:
                self.tell(source, MigrationOver(message.migration_id, source, None))

    def returned(self) -> None:
        for instance_id, message in self.take(ReturnWaiting):
            if self.controller.placement.with_member(instance_id) is not None:
                self.tell(instance_id, Returned(instance_id, message.request_ids))

    def tells(self, which: int, used: int, num_waiting: int) -> None:
        """A leader reports: of what it was sent so many wait."""
        group = self._group(which)
        if group is None or group.forming:
            return
        num_there = self.controller._requests.num_at(group.layout.leader)
        num_waiting = min(num_waiting, num_there)
        self.report(
            group.layout.leader,
            after_s=0.3,
            used_blocks=used if num_there else 0,
            num_running=num_there - num_waiting,
            num_waiting=num_waiting,
            waiting_blocks=8 * num_waiting,
            waiting_tokens=32 * num_waiting,
            head_of_line_blocks=8 * bool(num_waiting),
        )

    def all_tell(self, used: int) -> None:
        """The first leader says that it is full, the others that they are not."""
        for number, group in enumerate(tuple(self.controller.placement.groups.values())):
            leader = group.layout.leader
            if not group.forming and self.controller.placement.led_by(leader) is group:
                self.report(leader, used_blocks=used // (number + 1), num_running=6 - number)

    def end(self, which: int) -> None:
        """A request ends where it runs."""
        group = self._group(which)
        led = [] if group is None else self.controller._requests.led_by(group.layout.leader)
        if group is not None and led:
            self.output(group.layout.leader, led[which % len(led)], FinishReason.LENGTH)

    def _group(self, which: int) -> Group | None:
        groups = list(self.controller.placement.groups.values())
        return groups[which % len(groups)] if groups else None


_what = st.sampled_from(
    [
        *("request", "request", "tells", "tells", "tells", "answer", "answer", "returned"),
        *(
            "harm",
            "poison",
            "departs",
            "back",
            "back",
            "formed",
            "drop",
            "restore",
            "resize",
            "migrated",
        ),
        *("end", "tick", "tick", "settle", "settle", "even"),
    ]
)
_events = st.lists(
    st.tuples(_what, st.integers(0, 11), st.integers(0, BLOCKS)), min_size=30, max_size=60
)


def play(brain: Watched, events: list[tuple[str, int, int]]) -> None:
    for what, which, size in events:
        match what:
            case "request":
                brain.request(prompt_tokens=4 + 4 * size, max_tokens=16)
            case "tells":
                brain.tells(which, size, which % 5)
            case "answer":
                brain.answer(which)
            case "returned":
                brain.returned()
            case "harm":
                brain.harm(which, Cause.OUTSIDE)
            case "poison":
                brain.harm(which, Cause.INSIDE)
            case "departs":
                brain.departs(which)
            case "back":
                brain.back(which)
            case "formed":
                brain.all_formed()
            case "drop":
                brain.controller.force_drop(None, brain.now_s)
            case "restore":
                brain.controller.force_restore(brain.now_s)
            case "resize" if brain.can_resize:
                brain.controller.resize(1 + which % MOST)
            case "migrated":
                brain.migrated(which)
            case "settle":
                brain.all_formed()
                brain.complete()
            case "even":
                brain.all_tell(size)
            case "end":
                brain.end(which)
            case "tick":
                brain.pass_time(0.1 if which % 4 else 40.0)
        brain.pass_time(0.0)


def brain_of(policy: str, num_stages: int, dispatch: DispatchPolicy) -> Watched:
    cluster = ClusterConfig(
        num_instances=4,
        min_instances=1 if num_stages == 1 else None,
        max_instances=MOST if num_stages == 1 else None,
        pipeline_stages=num_stages,
        dispatch_policy=dispatch,
    )
    brain = Watched(num_stages == 1, cluster, policy=policy if num_stages == 1 else "recompute")
    for number in range(4):
        brain.start(number)
    return brain


@settings(max_examples=25)
@given(
    policy=st.sampled_from(["drop", "drop", "migrate", "recompute"]),
    num_stages=st.sampled_from([1, 1, 1, 2]),
    dispatch=st.sampled_from(get_args(DispatchPolicy)),
    events=_events,
)
def test_everybody_obeys_the_table(
    policy: str, num_stages: int, dispatch: DispatchPolicy, events: list[tuple[str, int, int]]
) -> None:
    play(brain_of(policy, num_stages, dispatch), events)
