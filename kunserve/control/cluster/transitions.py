"""Drops and restores under way, as the controller drives them: two phases, then the exchange.

    drop     preparing -> committing -> exchanging -> done
    restore  loading -> preparing -> committing -> exchanging -> done

Any refusal before the commit rolls all members back. Groups in a transition belong to no other.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from kunserve.control.cluster.commands import LogTransition, Outbox, Send
from kunserve.control.cluster.cut_links import CutLinks
from kunserve.control.cluster.holds import Holds
from kunserve.control.cluster.peer_discovery import PeerDiscovery
from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.standing import Standing
from kunserve.control.cluster.transition import Phase, Transition
from kunserve.core.ids import GroupId, InstanceId, TransitionId
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import (
    Commit,
    Committed,
    ExchangeDone,
    LayersLoaded,
    LoadLayers,
    Prepare,
    Prepared,
    Rollback,
    Tidied,
)
from kunserve.core.snapshots import Kind, Outcome, TransitionRecord
from kunserve.policy.drop.capacity import group_capacity_blocks

PATIENCE_S = {
    Phase.LOADING: 120.0,
    Phase.PREPARING: 10.0,
    Phase.COMMITTING: 60.0,
    Phase.EXCHANGING: 60.0,
}
"""How long a phase may take where steps take no time; from the last bytes on that have come."""
PATIENCE_STEPS = 4
"""Steps of each stage that a phase may take beside: members read mail between two steps."""
BACKOFF_S = 1.0
"""After a rolled-back transition, before the next is tried."""
MAX_RECORDS = 256
MOST_REFUSERS = 256


class Transitions:
    """All transitions under way and the latest finished ones."""

    def __init__(
        self, placement: Placement, outbox: Outbox, first_id: int, peer_discovery: PeerDiscovery
    ) -> None:
        """Members are introduced to each other before they need it."""
        self._placement = placement
        self._outbox = outbox
        self._peer_discovery = peer_discovery
        self._next_id = first_id
        self.cuts = CutLinks()
        self.refusers: Holds[tuple[Kind, InstanceId]] = Holds(BACKOFF_S, MOST_REFUSERS)
        """Who refused a drop or a restore lately, or did not answer: the others go on without."""
        self.active: dict[TransitionId, Transition] = {}
        self.records: list[TransitionRecord] = []
        self.backoff_until_s = 0.0
        """No new transition before then: one was rolled back just now."""
        self.num_drops = 0
        self.num_restores = 0
        self._last_end_s: dict[InstanceId, float] = {}
        """Of the transitions that each instance was in."""

    @property
    def coming_blocks(self) -> int:
        """KV blocks that the cluster will have more, or fewer, when all of them are over."""
        specs = self._placement.specs
        return sum(
            group_capacity_blocks(layout, specs) * sign
            for transition in self.active.values()
            for layouts, sign in (
                (transition.record.groups_after, 1),
                (transition.record.groups_before, -1),
            )
            for layout in layouts
        )

    @property
    def restoring_groups(self) -> set[GroupId]:
        """Groups whose restore can still be called off."""
        return {
            group_id
            for transition in self.active.values()
            if transition.is_restoring
            for group_id in transition.old_groups
        }

    def refusing(self, kind: Kind, now_s: float) -> set[GroupId]:
        """Groups with a member that is not to be asked for a drop, or a restore, now."""
        groups = (
            self._placement.with_member(member)
            for refused, member in self.refusers.held(now_s)
            if refused is kind
        )
        return {group.layout.group_id for group in groups if group is not None}

    def refusal_texts(self, now_s: float) -> tuple[str, ...]:
        """Who is not asked now, for people."""
        return tuple(
            f"instance {member} refused a {kind}: it is asked again in {until_s - now_s:.0f} s"
            for (kind, member), until_s in sorted(self.refusers.held(now_s).items())
        )

    def forget(self, instance_id: InstanceId) -> None:
        """Its process is gone; the next one may stand elsewhere, and have more memory."""
        self.cuts.forget(instance_id)
        self.refusers.forget(lambda one: one[1] == instance_id)

    def with_member(self, instance_id: InstanceId) -> Transition | None:
        """The transition that the instance is in."""
        for transition in self.active.values():
            if instance_id in transition.members:
                return transition
        return None

    # Beginnings

    def begin_drops(
        self,
        merges: Iterable[tuple[tuple[GroupLayout, ...], GroupLayout]],
        trigger: str,
        now_s: float,
    ) -> list[TransitionId]:
        """Ask the members of old groups to become new ones: of each pair the first and the second.

        All of them are under way before anybody is told.
        """
        begun = [
            self._begin(Kind.DROP, old, (new,), trigger, Phase.PREPARING, now_s)
            for old, new in merges
        ]
        for transition in begun:
            self._prepare(transition, now_s)
        return [transition.transition_id for transition in begun]

    def begin_restore(
        self,
        old: GroupLayout,
        new: tuple[GroupLayout, ...],
        load: Callable[[TransitionId], LoadLayers],
        trigger: str,
        now_s: float,
    ) -> TransitionId:
        """Have the members load what they lack; the regrouping follows when all have it."""
        transition = self._begin(Kind.RESTORE, (old,), new, trigger, Phase.LOADING, now_s)
        transition.load = load(transition.transition_id)
        transition.waits_for = set(old.members)
        self._peer_discovery.introduce(old.members)
        for member in transition.load.members:
            self._peer_discovery.introduce_to(member.instance_id, member.sources)
        self._outbox.append(Send(old.leader, transition.load))
        return transition.transition_id

    def new_id(self) -> TransitionId:
        """An id never used before, for whatever moves KV."""
        transition_id = TransitionId(self._next_id)
        self._next_id += 1
        return transition_id

    def _begin(
        self,
        kind: Kind,
        old: tuple[GroupLayout, ...],
        new: tuple[GroupLayout, ...],
        trigger: str,
        phase: Phase,
        now_s: float,
    ) -> Transition:
        transition_id = self.new_id()
        record = TransitionRecord(
            transition_id=transition_id,
            kind=kind,
            trigger=trigger,
            started_s=now_s,
            groups_before=old,
            groups_after=new,
        )
        transition = Transition(record, phase, now_s)
        self.active[transition_id] = transition
        self._mark(old)
        return transition

    def _prepare(self, transition: Transition, now_s: float) -> None:
        record = transition.record
        message = Prepare(
            record.transition_id,
            record.groups_before,
            record.groups_after,
            self._placement.specs_of(record.groups_before),
        )
        transition.phase, transition.phase_since_s = Phase.PREPARING, now_s
        transition.waits_for = transition.members
        self._peer_discovery.introduce(transition.members)
        for member in sorted(transition.waits_for):
            self._outbox.append(Send(member, message))

    # Answers

    def on_loaded(self, message: LayersLoaded, now_s: float) -> None:
        """A member has its layers back, or could not get them."""
        transition = self.active.get(message.transition_id)
        if transition is None or transition.phase is not Phase.LOADING:
            return
        if message.refusal is not None:
            self._refused(transition, message, now_s)
            return
        record = transition.record
        transition.record = replace(
            record,
            freed_bytes=record.freed_bytes - message.loaded_bytes,
            remap_s=max(record.remap_s, message.remap_s),
            prepare_s=max(record.prepare_s, message.prepare_s),
        )
        self._peer_discovery.has_pulled(message.instance_id)
        transition.waits_for.discard(message.instance_id)
        if not transition.waits_for:
            self._prepare(transition, now_s)

    def on_prepared(self, message: Prepared, now_s: float) -> None:
        """A member's word; the last yes commits."""
        transition = self.active.get(message.transition_id)
        if transition is None or transition.phase is not Phase.PREPARING:
            return
        for peer in message.unreached:
            self.cuts.found(message.instance_id, peer, now_s)
        if message.refusal is not None:
            self._refused(transition, message, now_s)
            return
        transition.waits_for.discard(message.instance_id)
        if transition.waits_for:
            return
        transition.phase, transition.phase_since_s = Phase.COMMITTING, now_s
        transition.waits_for = transition.members
        transition.exchanging = {g.group_id for g in transition.record.groups_after}
        self._placement.expect(transition.record.groups_before, transition.record.groups_after)
        for member in sorted(transition.waits_for):
            self._outbox.append(Send(member, Commit(transition.transition_id)))

    def _refused(
        self, transition: Transition, message: LayersLoaded | Prepared, now_s: float
    ) -> None:
        """A member cannot do it: it is left out for a while. A cut link parts a pair only."""
        is_cut = isinstance(message, Prepared) and bool(message.unreached)
        if not is_cut:
            self.refusers.found((transition.record.kind, message.instance_id), now_s)
        reason = f"instance {message.instance_id}: {message.refusal}"
        self.roll_back(transition, reason, now_s, backs_off=is_cut)

    def on_committed(self, message: Committed, now_s: float) -> Transition | None:
        """A member stands in its new group. The transition when it was the last one."""
        transition = self.active.get(message.transition_id)
        if transition is None or transition.phase is not Phase.COMMITTING:
            return None
        record = transition.record
        transition.record = replace(
            record,
            freed_bytes=record.freed_bytes + message.freed_bytes,
            remap_s=max(record.remap_s, message.remap_s),
            gap_s=max(record.gap_s, message.gap_s),
            prepare_s=max(record.prepare_s, message.prepare_s),
            tidy_s=max(record.tidy_s, message.tidy_s),
            committed_s=now_s,
        )
        for request_id in message.sequences:
            transition.followers[request_id] = message.instance_id
        transition.waits_for.discard(message.instance_id)
        if transition.waits_for:
            return None
        transition.phase, transition.phase_since_s = Phase.EXCHANGING, now_s
        self.cuts.joined(tuple(transition.members))
        self.refusers.forget(lambda one: one[0] is record.kind and one[1] in transition.members)
        leads = Counter(transition.followers.values())
        self._placement.replace(record.groups_before, record.groups_after, leads)
        self._mark(record.groups_after)
        if record.kind is Kind.DROP:
            self.num_drops += 1
        else:
            self.num_restores += 1
        self._finish_if_done(transition, now_s)
        return transition

    def on_tidied(self, message: Tidied) -> None:
        """Nothing of the remap is left on a member; its transition may have ended."""
        for number, record in enumerate(self.latest()):
            if record.transition_id != message.transition_id:
                continue
            record = replace(record, tidy_s=max(record.tidy_s, message.seconds))
            if record.transition_id in self.active:
                self.active[record.transition_id].record = record
            else:
                self.records[number] = record

    def on_exchanged(self, message: ExchangeDone, now_s: float) -> None:
        """A new leader has all KV in place."""
        transition = self.active.get(message.transition_id)
        if transition is None:
            return
        record = transition.record
        transition.record = replace(
            record,
            requests_moved=record.requests_moved + message.num_requests,
            moved_bytes=record.moved_bytes + message.moved_bytes,
            max_stall_s=max(record.max_stall_s, message.max_stall_s),
        )
        transition.exchanging.discard(message.group_id)
        self._finish_if_done(transition, now_s)

    def _finish_if_done(self, transition: Transition, now_s: float) -> None:
        if transition.is_committed and not transition.exchanging:
            self._end(transition, Outcome.DONE, None, now_s)

    # Ends

    def roll_back(
        self, transition: Transition, reason: str, now_s: float, *, backs_off: bool = True
    ) -> None:
        """Nothing has been committed: every member forgets it.

        ``backs_off``: something was wrong, so others begin a little later.
        """
        assert transition.may_roll_back, transition
        for member in sorted(transition.members):
            self._outbox.append(Send(member, Rollback(transition.transition_id)))
        if backs_off:
            self.backoff_until_s = now_s + BACKOFF_S
        self._end(transition, Outcome.ROLLED_BACK, reason, now_s)

    def fail(self, transition: Transition, reason: str, now_s: float) -> None:
        """A member died after the commit; the controller forms its groups anew."""
        record = transition.record
        self._placement.unexpect(record.groups_before, record.groups_after)
        self._end(transition, Outcome.FAILED, reason, now_s)

    def progressed(self, instance_id: InstanceId, now_s: float) -> None:
        """Bytes have come to an instance: however slow the link or the disk is, it goes on."""
        transition = self.with_member(instance_id)
        if transition is not None and transition.phase in (Phase.LOADING, Phase.EXCHANGING):
            transition.phase_since_s = now_s

    def expire(self, now_s: float) -> list[Transition]:
        """Roll back what waits for an answer too long; what has committed is for the caller."""
        overdue = []
        for transition in tuple(self.active.values()):
            waited_s = now_s - transition.phase_since_s
            if waited_s <= PATIENCE_S[transition.phase]:
                continue  # what comes on top goes through all groups to find
            if waited_s <= self._patience_s(transition):
                continue
            if transition.may_roll_back:
                for member in transition.waits_for:
                    self.refusers.found((transition.record.kind, member), now_s)
                self.roll_back(transition, transition.silence, now_s)
            else:
                overdue.append(transition)
        return overdue

    def _patience_s(self, transition: Transition) -> float:
        members = transition.members
        groups = self._placement.groups.values()
        steps_s = [group.step_s for group in groups if not members.isdisjoint(group.layout.members)]
        num_stages = max(
            len(g.stages) for g in transition.record.groups_before + transition.record.groups_after
        )
        return PATIENCE_S[transition.phase] + PATIENCE_STEPS * num_stages * max(
            steps_s, default=0.0
        )

    def _end(
        self, transition: Transition, outcome: Outcome, reason: str | None, now_s: float
    ) -> None:
        del self.active[transition.transition_id]
        for member in transition.members:
            self._peer_discovery.has_pulled(member)
        self._mark(transition.record.groups_before + transition.record.groups_after, is_so=False)
        record = replace(transition.record, outcome=outcome, reason=reason, finished_s=now_s)
        self.records.append(record)
        del self.records[:-MAX_RECORDS]
        self._outbox.append(LogTransition(record))
        if outcome is not Outcome.ROLLED_BACK or record.kind is Kind.RESTORE:
            # A drop that was rolled back has changed nothing.
            self._last_end_s.update(dict.fromkeys(transition.members, now_s))

    def _mark(self, layouts: Iterable[GroupLayout], *, is_so: bool = True) -> None:
        for layout in layouts:
            self._placement.mark(layout.group_id, Standing.CHANGING, is_so=is_so)

    def latest(self) -> tuple[TransitionRecord, ...]:
        """Finished ones, then those under way."""
        return (*self.records, *(t.record for t in self.active.values()))

    def last_end_s(self, layout: GroupLayout) -> float | None:
        """When the last transition ended that changed memory of any of these instances."""
        known = self._last_end_s
        if not known:
            return None
        ends = [known[stage[0]] for stage in layout.stages if stage[0] in known]
        return max(ends, default=None)

    def check(self) -> None:
        """Assert that the groups in them, and no others, change, close and are expected."""
        changing = self._placement.standing_as(Standing.CHANGING)
        records = [transition.record for transition in self.active.values()]
        parts = {g.group_id for one in records for g in one.groups_before + one.groups_after}
        assert changing == parts & self._placement.groups.keys(), changing
        closing, expected = self._placement.closing, self._placement.expected.keys()
        commits = [t.record for t in self.active.values() if t.phase is Phase.COMMITTING]
        assert closing == {g.group_id for one in commits for g in one.groups_before}, closing
        assert expected == {g.group_id for one in commits for g in one.groups_after}, expected
        self.cuts.check()
        self.refusers.check()
