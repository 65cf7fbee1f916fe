"""One instance's part in a change of groups: prepare, commit, switch, exchange (section 5).

A drop and a restore are the same here: sequences are handed over, layers are kept or already
back, and every request's KV moves from where it lies by the old layout to where it belongs by
the new one.
"""

from dataclasses import replace

from kunserve.control.instance.body import Remap
from kunserve.control.instance.exchange import Exchange
from kunserve.control.instance.exchange_leader import ExchangeLeader
from kunserve.control.instance.state import InstanceState, Preemption
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import (
    Commit,
    Committed,
    ExchangeProgress,
    Handover,
    KvDropped,
    KvMoved,
    Outputs,
    Prepare,
    Prepared,
    Rollback,
    SequenceState,
    TokenOutput,
)
from kunserve.core.request import FinishReason
from kunserve.core.transfer import KvPull
from kunserve.policy.moves import MovePlan, choose_piece_blocks, find_obstacle, float_units
from kunserve.policy.moves import plan_moves as decide_moves


class TransitionMember:
    """The instance's transition: at most one at a time."""

    def __init__(self, seat: InstanceState) -> None:
        self._seat = seat
        self._pending: Prepare | None = None
        self._is_committing = False
        self._committed_s = 0.0
        self._has_handed_over = False
        self._handovers: dict[GroupId, tuple[SequenceState, ...]] = {}
        self._early: list[KvMoved | KvDropped | ExchangeProgress] = []
        """From members that have switched before this one."""
        self._exchange: Exchange | None = None
        self._lead: ExchangeLeader | None = None
        self._last_told: tuple[int, bool] | None = None
        self._moved_to: dict[RequestId, InstanceId] = {}
        """New leaders of sequences that this instance led before the last switch."""

    # Two phases

    def prepare(self, message: Prepare, obstacle: str | None, now_s: float) -> None:
        """Answer whether the transition can be done here. Changes nothing else."""
        refusal = self._refusal(message, obstacle, now_s)
        if refusal is None:
            self._pending = message
            self._seat.specs.update((spec.instance_id, spec) for spec in message.specs)
        self._seat.send(None, Prepared(message.transition_id, self._seat.me, refusal))

    def _refusal(self, message: Prepare, obstacle: str | None, now_s: float) -> str | None:
        seat = self._seat
        if self.is_busy:
            return "another transition is under way"
        if obstacle is not None:
            return obstacle
        if seat.layout not in message.old:
            return f"stands in {seat.layout}, not in one of the old groups"
        new = _layout_of(seat.me, message.new)
        layers = None if new is None else new.layers_of(seat.me)
        if layers is None or not seat.held.covers(layers):
            return f"holds {seat.held}, which does not cover {layers}"
        specs = {spec.instance_id: spec for spec in message.specs}
        if seat.scheduler is not None:
            largest = seat.scheduler.load(0, 0, now_s).largest_request_blocks
            pool = max(
                min(specs[m].blocks_when_holding(held.num_layers) for m, held in layout.stages)
                for layout in message.new
            )
            if largest > pool:
                return f"a request of {largest} blocks is larger than any new pool ({pool})"
        return find_obstacle((seat.me,), message.old, message.new, specs)

    def commit(self, message: Commit, now_s: float) -> None:
        """Stop at the next step boundary and change groups."""
        if self._pending is not None and self._pending.transition_id == message.transition_id:
            self._quiesce(now_s)

    def rollback(self, message: Rollback) -> list[ExchangeProgress]:
        """Forget a prepared transition. Returns what was put by for it."""
        if self._pending is None or self._pending.transition_id != message.transition_id:
            return []
        assert not self._is_committing, "a rollback after the commit"
        self._pending = None
        early, self._early = self._early, []
        return [message for message in early if isinstance(message, ExchangeProgress)]

    def handover(self, message: Handover, now_s: float) -> None:
        """An old leader's sequences; it has committed, so this instance may too."""
        if self._pending is None or self._pending.transition_id != message.transition_id:
            return
        self._quiesce(now_s)
        self._handovers[message.old_group] = message.sequences

    def _quiesce(self, now_s: float) -> None:
        if not self._is_committing:
            self._is_committing = True
            self._committed_s = now_s

    @property
    def is_busy(self) -> bool:
        """A transition is prepared or under way."""
        return self._pending is not None or self._exchange is not None or self._lead is not None

    @property
    def is_quiescing(self) -> bool:
        """Whether no further step of the present group may start here."""
        return self._is_committing

    @property
    def is_exchanging(self) -> bool:
        """Whether KV is under way to or from here."""
        return self._exchange is not None

    def pump(self, now_s: float) -> None:
        """Take whatever step of the transition has become possible."""
        seat, pending = self._seat, self._pending
        if self._is_committing and pending is not None and not seat.is_running:
            scheduler = seat.scheduler
            if not self._has_handed_over and scheduler is not None and scheduler.num_in_flight == 0:
                self._hand_over(pending)
            if len(self._handovers) == len(pending.old):
                self._switch(pending, now_s)
        if self._exchange is not None:
            self._exchange.advance(now_s, seat.is_running)
            self._tell_progress(self._exchange)

    def _hand_over(self, pending: Prepare) -> None:
        seat = self._seat
        assert seat.scheduler is not None and seat.layout is not None
        self._has_handed_over = True
        message = Handover(pending.transition_id, seat.layout.group_id, seat.scheduler.export())
        seat.preemptions.extend(Preemption(*item) for item in seat.scheduler.drain_preemptions())
        self._handovers[seat.layout.group_id] = message.sequences
        for member in _members(pending.old):
            if member != seat.me:
                seat.send(member, message)

    # The switch

    def _switch(self, pending: Prepare, now_s: float) -> None:
        seat = self._seat
        specs = {spec.instance_id: spec for spec in pending.specs}
        handed_over = [(layout, self._handovers[layout.group_id]) for layout in pending.old]
        plan = decide_moves(handed_over, pending.new, specs)
        self._forget_old(pending, plan)
        new = _layout_of(seat.me, pending.new)
        assert new is not None and seat.layout is not None
        gap_s = now_s - max(seat.last_step_s, self._committed_s)
        remap = self._settle_memory(new)
        seat.enter(new, now_s)
        self._exchange = Exchange(
            pending.transition_id,
            seat.me,
            seat.table,
            seat.body,
            seat.mover,
            float_units(seat.me, pending.old, pending.new, choose_piece_blocks(pending.specs)),
        )
        self._exchange.begin(plan.moves, plan.pieces)
        sequences = self._lead_group(pending, new, plan, now_s)
        seat.send(
            None,
            Committed(
                transition_id=pending.transition_id,
                instance_id=seat.me,
                held=seat.held,
                kv_units=remap.kv_units,
                freed_bytes=remap.moved_bytes,
                remap_s=remap.seconds,
                gap_s=gap_s + remap.seconds,
                sequences=sequences,
                totals=seat.totals.so_far(),
            ),
        )
        self._pending = None
        self._is_committing = self._has_handed_over = False
        self._handovers = {}
        self._tell_progress(self._exchange, _members(pending.old))
        early, self._early = self._early, []
        for message in early:
            self.hear(message, now_s)

    def _forget_old(self, pending: Prepare, plan: MovePlan) -> None:
        """Free what does not move, and remember where this instance's sequences went."""
        seat = self._seat
        moving = {move.request_id for move in plan.moves}
        for request_id in seat.table.request_ids():
            if request_id not in moving:
                seat.table.release(request_id)
            seat.body.forget(request_id)
        leaders = {layout.group_id: layout.leader for layout in pending.new}
        assert seat.layout is not None
        self._moved_to = {}
        if seat.leads:
            for state in self._handovers[seat.layout.group_id]:
                leader = leaders[plan.homes[state.request.request_id]]
                if leader != seat.me:
                    self._moved_to[state.request.request_id] = leader

    def _settle_memory(self, new: GroupLayout) -> Remap:
        """Keep what the new group needs; before blocks grow back to all layers, pack them."""
        seat = self._seat
        layers = new.layers_of(seat.me)
        assert layers is not None
        if not seat.layers.covers(layers):
            copies = seat.table.vacate(seat.table.used_units)
            if copies:
                seat.body.copy_units(copies)
        return seat.keep_only(layers)

    def _lead_group(
        self, pending: Prepare, new: GroupLayout, plan: MovePlan, now_s: float
    ) -> tuple[RequestId, ...]:
        """On a new leader: take the group's sequences. Their ids; empty on a follower."""
        seat = self._seat
        if seat.scheduler is None:
            return ()
        moving = {move.request_id for move in plan.moves}
        states: list[SequenceState] = []
        for layout in pending.old:
            for state in self._handovers[layout.group_id]:
                request_id = state.request.request_id
                if plan.homes[request_id] != new.group_id:
                    continue
                if state.num_blocks and request_id not in moving:
                    seat.note_preemption(request_id, state.num_computed)
                    state = replace(
                        state,
                        num_computed=0,
                        num_blocks=0,
                        num_preemptions=state.num_preemptions + 1,
                    )
                if self._fits(state):
                    states.append(state)
                else:
                    end = TokenOutput(
                        request_id, len(state.output_token_ids), None, None, FinishReason.ERROR
                    )
                    seat.send(None, Outputs(seat.me, (end,)))
        self._lead = ExchangeLeader(seat, pending.transition_id, new, plan, states, now_s)
        return tuple(state.request.request_id for state in states)

    def _fits(self, state: SequenceState) -> bool:
        """Whether the group can ever hold the sequence.

        ``prepare`` is refused otherwise, so only a request that came after it may not.
        """
        tokens = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        return tokens <= self._seat.capacity_blocks() * self._seat.spec.block_size

    # The exchange

    def pulled(self, piece: KvPull, ok: bool) -> None:
        """The mover filled a piece, or its source could not give it."""
        exchange = self._exchange
        if exchange is not None and exchange.transition_id == piece.transition_id:
            exchange.pulled(piece, ok)

    def hear(self, message: KvMoved | KvDropped | ExchangeProgress, now_s: float) -> bool:
        """A peer's word about an exchange; False if it is none of this instance's."""
        if self._pending is not None and self._pending.transition_id == message.transition_id:
            self._early.append(message)
            return True
        exchange = self._exchange
        known = exchange is not None and exchange.transition_id == message.transition_id
        if exchange is not None and exchange.transition_id == message.transition_id:
            match message:
                case KvMoved():
                    exchange.moved(message)
                case KvDropped():
                    exchange.dropped(message.request_id)
                case ExchangeProgress():
                    exchange.open(message.instance_id)
        lead = self._lead
        if (
            isinstance(message, ExchangeProgress)
            and lead is not None
            and lead.transition_id == message.transition_id
        ):
            known = True
            if lead.on_progress(message, now_s):
                self._lead = None
        return known

    def release(self, request_id: RequestId) -> None:
        """Free a request's blocks, also in the middle of an exchange."""
        if self._exchange is not None:
            self._exchange.release(request_id)
        else:
            self._seat.table.release(request_id)

    def ends(self, request_id: RequestId) -> None:
        """On the leader: a request is aborted."""
        if self._lead is not None:
            self._lead.on_abort(request_id)

    def new_leader_of(self, request_id: RequestId) -> InstanceId | None:
        """Who leads a request that left this instance in the last switch."""
        return self._moved_to.get(request_id)

    def _tell_progress(self, exchange: Exchange, to: tuple[InstanceId, ...] = ()) -> None:
        """Tell the leader (and once, at the beginning, everybody) what has changed."""
        seat = self._seat
        assert seat.layout is not None
        for src, ack in exchange.drain_acks():
            seat.send(src, ack)
        progress = exchange.progress()
        told = (progress.extra_units, progress.is_finished)
        if told != self._last_told or progress.arrived or progress.lost or progress.moved_bytes:
            self._last_told = told
            for member in to or (seat.layout.leader,):
                seat.send(member, progress)
        if progress.is_finished:
            self._exchange = None
            self._last_told = None

    def check(self) -> None:
        """Assert the exchange's accounts."""
        if self._exchange is not None:
            self._exchange.check()


def _layout_of(me: InstanceId, layouts: tuple[GroupLayout, ...]) -> GroupLayout | None:
    for layout in layouts:
        if me in layout.members:
            return layout
    return None


def _members(layouts: tuple[GroupLayout, ...]) -> tuple[InstanceId, ...]:
    return tuple(member for layout in layouts for member in layout.members)
