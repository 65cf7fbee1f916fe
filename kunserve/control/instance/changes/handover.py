"""What old leaders hand over at a commit: to each member what it needs, and no more.

Everybody learns which sequences have how much KV, because all members work out the same plan of
moves. Only the new leader of a sequence gets its tokens. What waits goes back to the controller.
"""

from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import Handover, PrefixState, Prepare, SequenceKv, SequenceState
from kunserve.policy.exchange.moves import MovePlan, plan_moves


class Handovers:
    """One transition's handovers, as one member gets them."""

    def __init__(self, state: InstanceState, proposal: Prepare) -> None:
        self._state = state
        self._proposal = proposal
        self._kv: dict[GroupId, tuple[SequenceKv, ...]] = {}
        """Of each old group that has ended: all its sequences."""
        self._led: dict[RequestId, SequenceState] = {}
        """Sequences that this instance leads in its new group."""
        self._prefixes: list[PrefixState] = []
        """Of all old groups that have ended, what their sequences share."""
        self.plan: MovePlan | None = None
        """Once all old groups have ended."""

    def note(self, message: Handover) -> None:
        """An old group has ended."""
        proposal = self._proposal
        self._kv[message.old_group] = message.kv
        self._prefixes += message.prefixes
        self._led.update((one.request.request_id, one) for one in message.sequences)
        if self.plan is None and len(self._kv) == len(proposal.old):
            specs = {spec.instance_id: spec for spec in proposal.specs}
            handed_over = [(layout, self._kv[layout.group_id]) for layout in proposal.old]
            self.plan = plan_moves(handed_over, proposal.new, specs, self._prefixes)

    def give(
        self,
        old_group: GroupId,
        sequences: tuple[SequenceState, ...],
        prefixes: tuple[PrefixState, ...],
    ) -> None:
        """On an old leader: its group has ended with these sequences."""
        me, proposal = self._state.me, self._proposal
        kv = tuple(sequence.kv for sequence in sequences)
        self.note(Handover(proposal.transition_id, old_group, kv, (), prefixes))
        for layout in proposal.old:
            for member in layout.members:
                theirs = self._led_by(member, sequences)
                message = Handover(proposal.transition_id, old_group, kv, theirs, prefixes)
                if member == me:
                    self._led.update((one.request.request_id, one) for one in theirs)
                else:
                    self._state.send(member, message)

    def _led_by(
        self, member: InstanceId, sequences: tuple[SequenceState, ...]
    ) -> tuple[SequenceState, ...]:
        """Those of this instance's sequences that the member leads in its new group.

        The plan says which. While it waits for other handovers there is one new group only.
        """
        for layout in self._proposal.new:
            if layout.leader != member:
                continue
            if len(self._proposal.new) == 1:
                return sequences
            assert self.plan is not None, self._proposal
            homes = self.plan.homes
            return tuple(s for s in sequences if homes[s.request.request_id] == layout.group_id)
        return ()

    def of(self, old: GroupLayout) -> tuple[SequenceKv, ...]:
        """All sequences of an old group that has ended."""
        return self._kv[old.group_id]

    def led_here(self, group_id: GroupId) -> list[SequenceState]:
        """Sequences of the new group that this instance leads, by old groups."""
        assert self.plan is not None, self._proposal
        homes = self.plan.homes
        everybody = (one for layout in self._proposal.old for one in self.of(layout))
        return [self._led[one.request_id] for one in everybody if homes[one.request_id] == group_id]
