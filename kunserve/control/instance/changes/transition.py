"""One instance's part in a change of groups: prepare, commit, switch, exchange (paper 4.2, 4.4).

    (preparing ->) prepared -> committing -> exchanging -> over

A drop and a restore are the same here: sequences are handed over, layers are dropped or already
restored, and every request's KV moves from where it lies by the old layout to where it belongs
by the new one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.body import Remap
from kunserve.control.instance.changes.change import Change, ChangeWord
from kunserve.control.instance.changes.exchange import Exchange
from kunserve.control.instance.changes.exchange_leader import ExchangeLeader
from kunserve.control.instance.changes.handover import Handovers
from kunserve.control.instance.changes.settling import settle
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState, Preemption
from kunserve.core.ids import InstanceId, PrefixId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import (
    Commit,
    Committed,
    ExchangeProgress,
    Handover,
    KvDropped,
    KvMoved,
    LayersDropped,
    OfferKv,
    Outputs,
    Prepare,
    Prepared,
    Returned,
    SequenceState,
    TokenOutput,
)
from kunserve.core.request import FinishReason
from kunserve.core.transfer import KvPull
from kunserve.policy.exchange.moves import MovePlan, choose_piece_blocks, find_obstacle, float_units

Phase: TypeAlias = Literal["preparing", "prepared", "committing", "exchanging", "over"]
Enter: TypeAlias = Callable[[GroupLayout, float], Membership]
"""Has the instance stand in a new group."""


class TransitionMember(Change):
    """One transition, from this instance's consent to the end of its exchange."""

    occupation = "another transition is under way"

    def __init__(
        self,
        state: InstanceState,
        membership: Membership,
        enter: Enter,
        proposal: Prepare,
        before: Change,
    ) -> None:
        super().__init__(state)
        self.before = before
        """What loaded the layers for this transition, if any; it goes on at a rollback."""
        self._membership = membership
        self._enter = enter
        self._proposal = proposal
        self._phase: Phase = "preparing"
        self._committed_s = 0.0
        self._has_handed_over = False
        self._handovers = Handovers(state, proposal)
        spare = float_units(
            state.me, proposal.old, proposal.new, choose_piece_blocks(proposal.specs)
        )
        self._exchange = Exchange(state, proposal.transition_id, spare)
        self._leader: ExchangeLeader | None = None
        self._last_reported: tuple[int, bool] | None = None

    @classmethod
    def begin(
        cls,
        state: InstanceState,
        membership: Membership,
        enter: Enter,
        proposal: Prepare,
        before: Change,
        obstacle: str | None,
        now_s: float,
    ) -> "TransitionMember | None":
        """Answer whether the transition can be done here; None if not.

        Nothing changes, but what may fail of the remap is done, or begun: then the answer is late.
        """
        refusal = obstacle or _find_refusal(state, membership, proposal, now_s)
        if refusal is not None:
            state.send(None, Prepared(proposal.transition_id, state.me, refusal))
            return None
        state.specs.update((spec.instance_id, spec) for spec in proposal.specs)
        begun = cls(state, membership, enter, proposal, before)
        return begun if begun.prepare() is begun else None

    @property
    def is_preparing(self) -> bool:
        """Memory is mapped a second time, some granules at once."""
        return self._phase == "preparing"

    def prepare(self) -> Change:
        """Answer when all of it is done; at a refusal nothing has begun."""
        state, new = self._state, _layout_of(self._state.me, self._proposal.new)
        layers = None if new is None else new.layers_of(state.me)
        assert self.is_preparing and layers is not None, (self._phase, self._proposal)
        refusal = state.body.memory.prepare(layers)
        if refusal is None and state.body.memory.is_preparing:
            return self
        state.send(None, Prepared(self.change_id, state.me, refusal))
        self._phase = "prepared"
        return self if refusal is None else self.before

    def roll_back(self) -> Change:
        """Forget what was prepared; what loaded the layers gives them back."""
        assert self._phase in ("preparing", "prepared"), "a rollback after the commit"
        self._state.body.memory.prepare(self._state.held)
        return self.before.roll_back()

    @property
    def change_id(self) -> TransitionId:
        """Which transition it is."""
        return self._proposal.transition_id

    @property
    def is_quiescing(self) -> bool:
        """No further step of the old group may start here."""
        return self._phase == "committing"

    @property
    def has_switched(self) -> bool:
        """Whether the instance stands in its new group."""
        return self._phase in ("exchanging", "over")

    @property
    def is_over(self) -> bool:
        """Nothing of the transition is left here."""
        return self._phase == "over"

    def on(self, message: ChangeWord | OfferKv, now_s: float) -> None:
        """The controller's commit, old leaders' sequences, and peers' word of the exchange."""
        match message:
            case Commit():
                self._commit(now_s)
            case Handover() if not self.has_switched:
                # Its sender has committed, so this instance may too.
                self._commit(now_s)
                self._handovers.note(message)
            case LayersDropped() if not self.has_switched:
                self.before.on(message, now_s)
            case KvMoved():
                self._exchange.moved(message)
            case KvDropped(_, request_id):
                self._exchange.dropped(request_id)
            case ExchangeProgress(_, source):
                self._exchange.open(source)
                if self._leader is not None and self._leader.read_progress(message, now_s):
                    self._leader = None

    # Commit

    def _commit(self, now_s: float) -> None:
        """Stop at the next step boundary and change groups."""
        if self._phase == "prepared":
            self._phase = "committing"
            self._committed_s = now_s

    def advance(self, now_s: float) -> None:
        """Take whatever step of the transition has become possible."""
        if self._phase == "committing" and not self._state.is_running:
            scheduler = self._membership.scheduler
            if not self._has_handed_over and scheduler is not None and not scheduler.num_in_flight:
                self._hand_over(scheduler)
            if self._handovers.plan is not None:
                self._switch(self._handovers.plan, now_s)
        if self.is_exchanging:
            self._exchange.advance(now_s, self._state.is_running)
            self._report_progress()
        if self._phase == "exchanging" and not self.is_exchanging and self._leader is None:
            self._phase = "over"

    def _hand_over(self, scheduler: Scheduler) -> None:
        state = self._state
        self._has_handed_over = True
        old_group = self._membership.layout.group_id
        returned = scheduler.give_back_all()
        if returned:
            state.send(None, Returned(state.me, returned))
        prefixes = scheduler.cache.export()
        sequences = scheduler.export()
        state.preemptions.extend(Preemption(*item) for item in scheduler.drain_preemptions())
        self._handovers.give(old_group, sequences, prefixes)

    # The switch

    def _switch(self, plan: MovePlan, now_s: float) -> None:
        state, proposal, old = self._state, self._proposal, self._membership
        layout = _layout_of(state.me, proposal.new)
        assert layout is not None, (state.me, proposal)
        settle(state, plan, layout.group_id)
        gap_s = now_s - max(old.last_step_s, self._committed_s)
        remap = self._remap(layout)
        membership = self._membership = self._enter(layout, now_s)
        membership.former_requests = self._find_new_leaders(plan)
        self._exchange.begin(plan)
        self.is_exchanging = True
        sequences: tuple[RequestId, ...] = ()
        if membership.scheduler is not None:
            sequences = self._adopt_sequences(membership, membership.scheduler, plan, now_s)
        state.send(
            None,
            Committed(
                transition_id=proposal.transition_id,
                instance_id=state.me,
                held=state.held,
                kv_units=remap.kv_units,
                freed_bytes=remap.moved_bytes,
                remap_s=remap.seconds,
                gap_s=gap_s + remap.seconds,
                prepare_s=remap.prepare_s,
                tidy_s=state.await_tidying(proposal.transition_id),
                sequences=sequences,
                totals=state.totals.so_far(),
            ),
        )
        self._phase = "exchanging"
        self._handovers = Handovers(state, proposal)
        self._report_progress(_members_of(proposal.old))

    def _find_new_leaders(self, plan: MovePlan) -> dict[RequestId, InstanceId]:
        """Where the sequences go that this instance led."""
        leaders = {layout.group_id: layout.leader for layout in self._proposal.new}
        found: dict[RequestId, InstanceId] = {}
        for layout in self._proposal.old:
            if layout.leader != self._state.me:
                continue
            for handed_over in self._handovers.of(layout):
                request_id = handed_over.request_id
                leader = leaders[plan.homes[request_id]]
                if leader != self._state.me:
                    found[request_id] = leader
        return found

    def _remap(self, new: GroupLayout) -> Remap:
        """Keep what the new group needs; before blocks grow back to all layers, pack them."""
        state = self._state
        layers = new.layers_of(state.me)
        assert layers is not None, (state.me, new)
        if not self._membership.layers.covers(layers):
            state.copy_units(state.table.vacate(state.table.used_units) or ())
        return state.keep_only(layers)

    def _adopt_sequences(
        self, membership: Membership, scheduler: Scheduler, plan: MovePlan, now_s: float
    ) -> tuple[RequestId, ...]:
        """On a new leader: take the group's sequences. Their ids."""
        state, group_id = self._state, membership.layout.group_id
        moving = {move.request_id for move in plan.moves}
        taken: list[SequenceState] = []
        for sequence in self._handovers.led_here(group_id):
            request_id = sequence.request.request_id
            if sequence.num_blocks and request_id not in moving:
                state.note_preemption(request_id, sequence.num_computed)
                sequence = _without_kv(sequence)
            elif sequence.shared:
                sequence = replace(sequence, shared=plan.shared[request_id])
            if self._fits(sequence, membership):
                taken.append(sequence)
            else:
                state.send(None, Outputs(state.me, (_failed(sequence),)))
        self._leader = ExchangeLeader(
            state, membership, scheduler, self.change_id, plan, taken, now_s
        )
        return tuple(sequence.request.request_id for sequence in taken)

    def _fits(self, sequence: SequenceState, membership: Membership) -> bool:
        """Whether the group can ever hold the sequence.

        ``prepare`` is refused otherwise, so only a request that came after it may not.
        """
        tokens = len(sequence.request.prompt_token_ids) + len(sequence.output_token_ids)
        return tokens <= self._state.spec.blocks.tokens_in(membership.capacity_blocks)

    # The exchange

    def pulled_kv(self, piece: KvPull, ok: bool) -> None:
        """The mover filled a piece, or its source could not give it."""
        self._exchange.pulled(piece, ok)

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks, also in the middle of an exchange."""
        self._exchange.release(request_id)

    def evict(self, prefix_id: PrefixId, end_block: int) -> None:
        """Free blocks of the prefix cache, also in the middle of an exchange."""
        self._exchange.evict(prefix_id, end_block)

    def abort(self, request_id: RequestId) -> bool:
        """On the leader: nobody shall wait for the request's KV."""
        if self._leader is not None:
            self._leader.abort(request_id)
        return False

    def _report_progress(self, to: tuple[InstanceId, ...] = ()) -> None:
        """Tell the leader (and once, at the beginning, everybody) what has changed."""
        state = self._state
        for src, ack in self._exchange.drain_acks():
            state.send(src, ack)
        progress = self._exchange.progress()
        account = (progress.extra_units, progress.is_finished)
        if (
            account != self._last_reported
            or progress.arrived
            or progress.lost
            or progress.moved_bytes
        ):
            self._last_reported = account
            for member in to or (self._membership.layout.leader,):
                state.send(member, progress)
        self.is_exchanging = not progress.is_finished

    def check(self) -> None:
        """Assert the exchange's accounts."""
        self._exchange.check()
        if self._leader is not None:
            self._leader.check()


def _find_refusal(
    state: InstanceState, membership: Membership, proposal: Prepare, now_s: float
) -> str | None:
    """Why the transition cannot be done here, or None."""
    if membership.layout not in proposal.old:
        return f"stands in {membership.layout}, not in one of the old groups"
    new = _layout_of(state.me, proposal.new)
    layers = None if new is None else new.layers_of(state.me)
    if layers is None or not state.held.covers(layers):
        return f"holds {state.held}, which does not cover {layers}"
    specs = {spec.instance_id: spec for spec in proposal.specs}
    if membership.scheduler is not None:
        largest = membership.scheduler.load(0, 0, now_s).largest_request_blocks
        pool = max(
            min(specs[m].blocks_when_holding(held.num_layers) for m, held in layout.stages)
            for layout in proposal.new
        )
        if largest > pool:
            return f"a request of {largest} blocks is larger than any new pool ({pool})"
    return find_obstacle((state.me,), proposal.old, proposal.new, specs)


def _without_kv(sequence: SequenceState) -> SequenceState:
    """The sequence, to be computed again."""
    return replace(
        sequence,
        num_computed=0,
        num_blocks=0,
        shared=(),
        num_preemptions=sequence.num_preemptions + 1,
    )


def _failed(sequence: SequenceState) -> TokenOutput:
    """The end of a sequence that can never run."""
    position = len(sequence.output_token_ids)
    return TokenOutput(sequence.request.request_id, position, None, None, FinishReason.ERROR)


def _layout_of(me: InstanceId, layouts: tuple[GroupLayout, ...]) -> GroupLayout | None:
    for layout in layouts:
        if me in layout.members:
            return layout
    return None


def _members_of(layouts: tuple[GroupLayout, ...]) -> tuple[InstanceId, ...]:
    return tuple(member for layout in layouts for member in layout.members)
