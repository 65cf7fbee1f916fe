"""One instance's brain: steps, groups, transitions. Sans-I/O; a driver feeds and empties it.

The same agent runs over the CPU engine, the fake body of the tests and a simulated body.
A driver calls ``on`` for every message, ``next_work`` when the body is idle, ``finished`` when
a step is done, and sends what ``drain`` returns. Messages may come while a step runs.
"""

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from kunserve.control.instance.block_table import BlockTable
from kunserve.control.instance.body import Body, Mover, StepOutcome, StepWork
from kunserve.control.instance.layer_restore import LayerRestore, answer_called_off
from kunserve.control.instance.localize import free_swapped_out, localize
from kunserve.control.instance.membership import Membership, enter_group
from kunserve.control.instance.migration_source import MigrationSource
from kunserve.control.instance.migration_target import MigrationTarget
from kunserve.control.instance.state import AgentConfig, InstanceState, Outgoing, Preemption
from kunserve.control.instance.transition import TransitionMember
from kunserve.core.ids import GroupId, InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.messages import (
    Abort,
    Activation,
    Commit,
    EndMigration,
    ExchangeProgress,
    Form,
    HandOff,
    Handover,
    KvDropped,
    KvMoved,
    LayersDropped,
    LoadLayers,
    Message,
    Migrate,
    OfferKv,
    OfferRefused,
    OfferTaken,
    Outputs,
    Prepare,
    Report,
    Rollback,
    Sampled,
    Shutdown,
    Submit,
    WithdrawKv,
)
from kunserve.core.step import StepPlan, StepResult
from kunserve.core.transfer import KvPull

MAX_EARLY_ABORTS = 1024
"""Aborted ids remembered in case their request is still on its way here."""
MAX_CALLED_OFF = 64
"""Rollbacks remembered in case their ``LoadLayers`` is still on its way here."""

Change: TypeAlias = TransitionMember | LayerRestore | MigrationSource | MigrationTarget
"""What may be under way on an instance beside steps: one at a time."""


class Work(NamedTuple):
    """A step for the body, and the hidden states that came with it."""

    step: StepWork
    hidden: Any


class InstanceAgent:
    """Routes messages, localizes step plans, and lets the change under way advance.

    Owner of two facts: in which group the instance stands (``membership``), and what changes
    there (``_change``).
    """

    def __init__(self, config: AgentConfig, body: Body, mover: Mover) -> None:
        spec = body.spec
        whole = LayerRange(0, spec.num_layers)
        table = BlockTable(spec.num_layers, spec.kv_units, 64, 64)
        mover.offer_layers(whole)
        self.state = InstanceState(config, body, mover, table, whole, {spec.instance_id: spec})
        self.membership: Membership | None = None
        """None until the first ``Form``."""
        self._change: Change | None = None
        self._num_received = 0
        self._report_number = 0
        self._early_aborts: dict[RequestId, None] = {}
        self._called_off: dict[TransitionId, None] = {}
        self._early_plans: dict[GroupId, list[tuple[StepPlan, Any]]] = {}
        """Microbatches of groups that this instance has yet to enter."""
        self._formed_id: GroupId | None = None
        """The last group that was formed from nothing; requests of older groups are not ours."""
        self._form: Form | None = None
        """To be carried out as soon as the running step has ended."""
        self._later: deque[tuple[Message, Any]] = deque()
        """What came after that ``Form``."""
        self._held: deque[Submit | Abort] = deque()
        """Requests that come while this instance stands between two groups."""
        self._lacks_units = False
        """The next step waits for units that an exchange will free."""
        self.is_stopping = False

    # What the driver calls

    def on(self, message: Message, now_s: float, hidden: Any = None) -> None:
        """Take one message from the controller or a peer."""
        if self._form is not None and not isinstance(message, Form):
            self._later.append((message, hidden))
            return
        self._read(message, now_s, hidden)
        self._advance(now_s)

    def pulled_kv(self, piece: KvPull, ok: bool, now_s: float) -> None:
        """The mover filled a piece, or its source would not give it."""
        if isinstance(self._change, TransitionMember | MigrationTarget):
            self._change.pulled(piece, ok)
        self._advance(now_s)

    def pulled_layers(self, layers: LayerRange, src: InstanceId, ok: bool, now_s: float) -> None:
        """The mover filled weights, or could not."""
        if isinstance(self._change, LayerRestore):
            self._change.pulled(layers, src, ok)
        self._advance(now_s)

    def next_work(self, now_s: float) -> Work | None:
        """The next step for the body, or None. ``finished`` must come before the next call."""
        assert not self.state.is_running
        while (membership := self.membership) is not None:
            if membership.ready:
                plan, hidden = membership.ready.popleft()
            else:
                scheduled = self._schedule(membership, now_s)
                if scheduled is None:
                    return None
                plan, hidden = scheduled, None
            step = self._localize(membership, plan)
            if step is None:
                membership.ready.appendleft((plan, hidden))
                return None
            if plan.chunks:
                self.state.is_running = True
                return Work(step, hidden)
            self._forward(membership, step, StepOutcome(None, ()), now_s)
            self._advance(now_s)
        return None

    def finished(self, work: Work, outcome: StepOutcome, now_s: float) -> None:
        """The body ran the step."""
        assert self.state.is_running and self.membership is not None
        self.state.is_running = False
        self._forward(self.membership, work.step, outcome, now_s)
        self._advance(now_s)

    def drain(self) -> list[Outgoing]:
        """Messages to send now, in order."""
        outbox, self.state.outbox = self.state.outbox, []
        return outbox

    def drain_preemptions(self) -> list[Preemption]:
        """Preemptions since the last call."""
        preemptions, self.state.preemptions = self.state.preemptions, []
        return preemptions

    def has_ready_work(self) -> bool:
        """Whether ``next_work`` may have something, so that the driver should not sleep."""
        membership = self.membership
        if membership is None:
            return False
        if membership.ready:
            return not self._lacks_units
        scheduler = membership.scheduler
        return scheduler is not None and not self._is_quiescing and scheduler.can_schedule

    @property
    def is_exchanging(self) -> bool:
        """Whether peers wait for KV from here or are waited for: mail should not wait for a step.

        Messages and ends of pulls may then be given in the middle of a step too.
        """
        return isinstance(self._change, TransitionMember) and self._change.is_exchanging

    @property
    def is_in_transition(self) -> bool:
        """Whether a change of groups or of layers, or a migration, is under way here."""
        return self._form is not None or self._change is not None

    @property
    def change(self) -> Change | None:
        """What is under way here beside steps."""
        return self._change

    def report(self, now_s: float) -> None:
        """Queue a load report (leaders only). Called about ten times a second on everybody.

        Between two calls a leader reports by itself the moment memory gets short.
        """
        self._advance(now_s)
        self._send_report(now_s)

    def _send_report(self, now_s: float) -> None:
        if self.membership is None or self.membership.scheduler is None:
            return
        self._report_number += 1
        load = self.membership.scheduler.load(self._report_number, self._num_received, now_s)
        self.state.send(None, Report(self.state.me, load))

    def check(self) -> None:
        """Assert every owner's invariants and their agreement."""
        state, membership = self.state, self.membership
        state.table.check()
        if isinstance(self._change, TransitionMember):
            self._change.check()
        assert self._change is None or not self._change.is_over, self._change
        if membership is not None:
            assert state.held.covers(membership.layers), (state.held, membership.layers)
            if membership.scheduler is not None:
                membership.scheduler.check()
        assert self._form is not None or not state.to_self, state.to_self

    # Messages

    def _advance(self, now_s: float) -> None:
        """Let the change take every step that has become possible, and read own mail."""
        self._lacks_units = False
        while True:
            if self._form is not None:
                if self.state.is_running:
                    return
                self._form_group(self._form, now_s)
            self._forget_change_if_over()
            if self._change is not None:
                self._change.advance(now_s)
                self._forget_change_if_over()
            if self.state.to_self:
                self._read(self.state.to_self.popleft(), now_s, None)
            elif self._held and not self._is_between_groups:
                self._read(self._held.popleft(), now_s, None)
            elif self._later:
                message, hidden = self._later.popleft()
                self._read(message, now_s, hidden)
            else:
                return

    def _read(self, message: Message, now_s: float, hidden: Any) -> None:
        match message:
            case Activation():
                self._activation(message.plan, hidden)
            case Sampled():
                self._complete(message.result, now_s)
            case Submit():
                self._submit(message)
            case Abort():
                self._abort(message)
            case Prepare() | LoadLayers() | Migrate() | OfferKv():
                self._begin(message, now_s)
            case Commit() | Handover() | KvMoved() | KvDropped() | ExchangeProgress():
                self._read_of_transition(message, now_s)
            case Rollback():
                self._roll_back(message.transition_id)
            case LayersDropped():
                restore = self._layer_restore
                if restore is not None and restore.transition_id == message.transition_id:
                    restore.member_back(message.instance_id)
            case OfferTaken() | OfferRefused() | HandOff() | EndMigration() | WithdrawKv():
                self._read_of_migration(message)
            case Form():
                self._form = message
                self._later = deque(m for m in self._later if isinstance(m[0], Activation))
            case Shutdown():
                self.is_stopping = True
            case _:
                raise AssertionError(f"not for an instance: {message}")

    def _activation(self, plan: StepPlan, hidden: Any) -> None:
        """A microbatch from the stage before.

        It may come before this instance has entered the group (ids of groups only grow), or be
        left over from one that it has left.
        """
        membership = self.membership
        now = None if membership is None else membership.layout.group_id
        if membership is not None and plan.group_id == now:
            membership.ready.append((plan, hidden))
        elif now is None or plan.group_id > now:
            self._early_plans.setdefault(plan.group_id, []).append((plan, hidden))

    # Requests

    @property
    def _is_between_groups(self) -> bool:
        """No leader to give a request to: it is handing over, or not formed yet."""
        return self.membership is None or self._is_quiescing

    def _submit(self, message: Submit) -> None:
        if message.group_id is None:
            self._num_received += 1
        elif self._formed_id is not None and message.group_id < self._formed_id:
            return  # from before a failure: the controller runs the request again
        membership = self.membership
        if membership is None or self._is_quiescing:
            self._held.append(message)
            return
        layout, scheduler = membership.layout, membership.scheduler
        if scheduler is None:
            self.state.send(layout.leader, replace(message, group_id=layout.group_id))
        elif isinstance(self._change, MigrationTarget) and self._change.accept(message):
            pass  # it runs as soon as its KV is here
        elif message.request.request_id in self._early_aborts:
            del self._early_aborts[message.request.request_id]
        else:
            scheduler.add(message.request)

    def _abort(self, message: Abort) -> None:
        membership = self.membership
        if membership is None or self._is_quiescing:
            self._held.append(message)
            return
        request_id = message.request_id
        elsewhere = membership.former_requests.get(request_id)
        if membership.scheduler is None:
            leader = membership.layout.leader
            self.state.send(leader if elsewhere is None else elsewhere, message)
            return
        match self._change:
            case TransitionMember():
                self._change.abort(request_id)
            case MigrationSource():
                self._change.request_ends(request_id, "aborted")
            case MigrationTarget():
                if self._change.abort(request_id):
                    return
        if membership.scheduler.abort(request_id):
            return
        if elsewhere is not None:
            self.state.send(elsewhere, message)
            return
        self._early_aborts[request_id] = None
        if len(self._early_aborts) > MAX_EARLY_ABORTS:
            self._early_aborts.pop(next(iter(self._early_aborts)))

    # Changes: one at a time

    def _begin(self, message: Prepare | LoadLayers | Migrate | OfferKv, now_s: float) -> None:
        """Begin what is asked for, or answer why not: because something else is under way.

        Only a restore's transition follows the change that has loaded its layers.
        """
        state, membership, change = self.state, self.membership, self._change
        assert membership is not None, message
        obstacle = None if change is None else change.occupation
        begun: Change | None
        match message:
            case Prepare():
                restored = None
                if isinstance(change, LayerRestore) and change.precedes(message):
                    restored, obstacle = change, None
                begun = TransitionMember.begin(
                    state, membership, self._enter, message, restored, obstacle, now_s
                )
            case LoadLayers():
                if membership.layout.group_id != message.group_id:
                    return
                if message.transition_id in self._called_off:
                    answer_called_off(state, membership, message.transition_id)
                    return
                begun = LayerRestore.begin(state, membership, message, obstacle, now_s)
            case Migrate():
                begun = MigrationSource.begin(state, membership, message, obstacle)
            case OfferKv():
                if (
                    isinstance(change, MigrationTarget)
                    and change.migration_id == message.migration_id
                ):
                    change.extend(message)
                    return
                begun = MigrationTarget.begin(state, membership, message, obstacle)
        if begun is not None:
            self._change = begun

    def _read_of_transition(
        self, message: Commit | Handover | KvMoved | KvDropped | ExchangeProgress, now_s: float
    ) -> None:
        """Word of a transition under way; that of another is void."""
        change = self._change
        if not isinstance(change, TransitionMember):
            return
        if change.transition_id != message.transition_id:
            return
        match message:
            case Commit():
                change.commit(now_s)
            case Handover():
                change.accept_handover(message, now_s)
            case KvMoved() | KvDropped() | ExchangeProgress():
                change.read(message, now_s)

    def _read_of_migration(
        self, message: OfferTaken | OfferRefused | HandOff | EndMigration | WithdrawKv
    ) -> None:
        """Word of a migration under way; that of another is void."""
        change = self._change
        if not isinstance(change, MigrationSource | MigrationTarget):
            return
        if change.migration_id != message.migration_id:
            return
        match change, message:
            case MigrationSource(), OfferTaken(_, end_block):
                change.offer_taken(end_block)
            case MigrationSource(), OfferRefused():
                change.offer_refused()
            case MigrationSource(), HandOff():
                change.hand_off()
            case MigrationSource(), EndMigration():
                change.give_up("ended by the controller")
            case MigrationTarget(), EndMigration() | WithdrawKv():
                change.give_up()

    def _roll_back(self, transition_id: TransitionId) -> None:
        """Forget what was prepared, and give back what was loaded for it."""
        self._called_off[transition_id] = None
        if len(self._called_off) > MAX_CALLED_OFF:
            self._called_off.pop(next(iter(self._called_off)))
        change = self._change
        if isinstance(change, TransitionMember) and change.transition_id == transition_id:
            assert change.is_prepared, "a rollback after the commit"
            self._change = change.restored
        restore = self._layer_restore
        if restore is not None and restore.transition_id == transition_id:
            restore.call_off()

    def _forget_change_if_over(self) -> None:
        if self._change is not None and self._change.is_over:
            self._change = None

    @property
    def _layer_restore(self) -> LayerRestore | None:
        """What loads layers here, or has loaded them for the transition that is prepared."""
        change = self._change
        if isinstance(change, TransitionMember):
            return change.restored
        return change if isinstance(change, LayerRestore) else None

    @property
    def _is_quiescing(self) -> bool:
        """Whether no further step of the present group may start here."""
        return isinstance(self._change, TransitionMember) and self._change.is_quiescing

    # Groups

    def _enter(self, layout: GroupLayout, now_s: float) -> Membership:
        """Stand in a new group; microbatches of older ones are forgotten."""
        membership = self.membership = enter_group(self.state, layout, now_s)
        membership.ready.extend(self._early_plans.pop(layout.group_id, ()))
        self._early_plans = {g: p for g, p in self._early_plans.items() if g > layout.group_id}
        return membership

    def _form_group(self, message: Form, now_s: float) -> None:
        """Start anew, whatever was going on: fault tolerance (paper 4.4). No step runs."""
        state = self.state
        self._form = None
        self._change = None
        self._called_off.clear()
        self._held.clear()
        state.mover.reset()
        state.to_self.clear()
        for request_id in state.table.request_ids():
            state.table.unpin(request_id, 0, state.table.num_blocks(request_id))
            state.free(request_id)
        layers = message.layout.layers_of(state.me)
        assert layers is not None, (state.me, message)
        if not state.held.covers(layers):
            whole = state.whole_model
            state.table.set_layers(whole, state.spec.kv_units)
            state.body.reclaim_layers(whole)
            state.body.load_layers(whole)
            state.held = whole
            state.mover.offer_layers(whole)
        state.specs.update((spec.instance_id, spec) for spec in message.specs)
        state.keep_only(layers)
        self._enter(message.layout, now_s)
        self._formed_id = message.layout.group_id

    # Steps

    def _schedule(self, membership: Membership, now_s: float) -> StepPlan | None:
        scheduler = membership.scheduler
        if scheduler is None or self._is_quiescing:
            return None
        was_short = scheduler.is_memory_short
        plan = scheduler.schedule(now_s)
        if scheduler.is_memory_short and not was_short:
            self._send_report(now_s)
        self.state.preemptions.extend(Preemption(*item) for item in scheduler.drain_preemptions())
        return plan

    def _localize(self, membership: Membership, plan: StepPlan) -> StepWork | None:
        """Free, take and name blocks for a plan; None when that must wait for a transfer."""
        state = self.state
        if membership.swapped_out:
            free_swapped_out(state, membership)
        for request_id in plan.released:
            self._release(request_id)
            state.body.forget(request_id)
        step = localize(state, membership, plan)
        if step is None:
            assert self._change is not None, (plan, state.table.free_units)
            self._lacks_units = True
            if isinstance(self._change, MigrationSource):
                self._change.make_room()
        self._forget_change_if_over()
        return step

    def _release(self, request_id: RequestId) -> None:
        """Free a request's blocks, whatever is being done with them."""
        if isinstance(self._change, TransitionMember):
            self._change.release(request_id)
            return
        if isinstance(self._change, MigrationSource):
            self._change.request_ends(request_id, "ended or preempted")
        self.state.table.release(request_id)

    def _forward(
        self, membership: Membership, step: StepWork, outcome: StepOutcome, now_s: float
    ) -> None:
        """Pass a microbatch on: to the next stage, or its tokens to the leader."""
        state, layout = self.state, membership.layout
        if not step.is_last:
            following = layout.members[layout.members.index(state.me) + 1]
            state.send(following, Activation(step.plan), outcome.hidden)
            return
        result = StepResult(step.plan.group_id, step.plan.step_id, outcome.tokens)
        if membership.scheduler is not None:
            self._complete(result, now_s)
        else:
            state.send(layout.leader, Sampled(result))

    def _complete(self, result: StepResult, now_s: float) -> None:
        """On the leader: a step has run on all stages."""
        membership = self.membership
        if membership is None or membership.scheduler is None:
            return
        if result.group_id != membership.layout.group_id:
            return
        membership.last_step_s = now_s
        if isinstance(self._change, LayerRestore):
            self._change.step_landed()
        tokens = membership.scheduler.complete(result, now_s)
        if tokens:
            self.state.send(None, Outputs(self.state.me, tuple(tokens)))
