"""One instance's brain: steps, groups, transitions. Sans-I/O; a driver feeds and empties it.

The same agent runs over the CPU engine, the fake body of the tests and a simulated body.
A driver calls ``on`` for every message, ``next_work`` when the body is idle, ``finished`` when
a step is done, and sends what is in ``outbox``. Messages may come while a step runs.
"""

from dataclasses import replace
from typing import Any

from kunserve.control.instance.arrivals import Arrivals
from kunserve.control.instance.block_table import BlockTable
from kunserve.control.instance.body import Body, Mover, RunsAhead, StepOutcome, StepWork
from kunserve.control.instance.changes.change import Change, ChangeOrder, ChangeWord
from kunserve.control.instance.changes.change_slot import ChangeSlot
from kunserve.control.instance.changes.formation import FormationSlot
from kunserve.control.instance.inbox import Inbox, Mail, Moment, is_plain
from kunserve.control.instance.localize import localize, localize_ahead
from kunserve.control.instance.membership import Membership, enter_group, next_plan
from kunserve.control.instance.state import AgentConfig, InstanceState, Outgoing, Preemption
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.messages import (
    Abort,
    Activation,
    AllowParking,
    FinalRows,
    Form,
    Formed,
    HeadPart,
    Message,
    Outputs,
    Ready,
    Rejoin,
    Report,
    ResetPrefixCache,
    Returned,
    ReturnWaiting,
    Rollback,
    Sampled,
    Shutdown,
    Submit,
    TokenOutput,
    TransferProgress,
)
from kunserve.core.request import FinishReason
from kunserve.core.step import StepPlan, StepResult
from kunserve.core.transfer import KvPull


class InstanceAgent:
    """Routes messages, localizes step plans, and lets the change under way advance.

    Owner of the fact in which group the instance stands. What changes there is in ``changes``,
    what came before its time in ``inbox``.
    """

    def __init__(self, config: AgentConfig, body: Body, mover: Mover) -> None:
        spec = body.spec
        whole = LayerRange(0, spec.num_layers)
        table = BlockTable(spec.num_layers, spec.kv_units, 64, 64)
        mover.offer_layers(whole)
        self.state = InstanceState(config, body, mover, table, whole, {spec.instance_id: spec})
        self.membership: Membership | None = None
        """None until the first ``Form``."""
        self.inbox = Inbox()
        self._changes = ChangeSlot(self.state, self._enter)
        self.num_read = 0
        """Requests of the controller that were read. ``Form`` sets it, because what came before
        that and was not read is never read."""
        self._report_number = 0
        self.forming = FormationSlot(self.state)
        self._arrivals = Arrivals()
        self._lacks_units = False
        """The next step waits for units that an exchange will free."""
        self.is_stopping = False

    # What the driver calls

    def on(self, message: Message, now_s: float, hidden: Any = None) -> None:
        """Take one message from the controller or a peer."""
        mail = Mail(message, hidden)
        if self._is_plain(message) or self.inbox.accept(mail, self._moment()):
            self._read(mail, now_s)
        self._advance(now_s)

    def _is_plain(self, message: Message) -> bool:
        """Whether it is read now whatever changes here, as nearly all mail is."""
        membership = self.membership
        if membership is None or self.forming.is_forming:
            return False
        is_calm = not (self.change.is_quiescing or self.inbox.has_mail)
        return is_plain(message, membership.layout.group_id, is_calm=is_calm)

    def pulled_kv(self, piece: KvPull, ok: bool, now_s: float) -> None:
        """The mover filled a piece, or its source would not give it."""
        self.change.pulled_kv(piece, ok)
        self._advance(now_s)

    def pulled_layers(
        self, layers: LayerRange, src: InstanceId | None, ok: bool, now_s: float
    ) -> None:
        """The mover filled weights, or could not."""
        self.forming.pulled(layers, src, ok)
        self.change.pulled_layers(layers, src, ok)
        self._advance(now_s)

    def next_work(self, now_s: float) -> Work | None:
        """The next step for the body, or None. ``finished`` must come before the next call."""
        assert not self.state.is_running
        self.state.began_s = now_s
        while (membership := self.membership) is not None:
            head_work = None if membership.head is None else membership.head.next_work()
            if head_work is not None:
                self.state.is_running = True
                return head_work
            if membership.has_ready:
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

    def next_ahead(self, now_s: float, device: RunsAhead) -> Work | None:
        """While a step runs: the next, if what is not there yet is but its input; both finish."""
        membership = self.membership if self._is_calm else None
        return localize_ahead(self.state, self.change, membership, now_s, device)

    @property
    def _is_calm(self) -> bool:
        """Whether nothing is under way here beside steps."""
        waits = self.inbox.may_be_due or self.state.to_self or self.forming.is_forming
        return self._changes.is_empty and not waits

    def finished(self, work: Work, outcome: StepOutcome, now_s: float) -> None:
        """The body ran the step."""
        assert self.state.is_running and self.membership is not None
        self.state.step_ended(now_s, is_calm=self._is_calm and self.membership.is_alone)
        if isinstance(work.step, StepWork):
            self._forward(self.membership, work.step, outcome, now_s)
        elif (head := self.membership.head) and (result := head.finished(work.step, outcome)):
            self._complete(self.membership, result, now_s)
        self._advance(now_s)

    @property
    def outbox(self) -> list[Outgoing]:
        """Messages to send now, in order. Whoever has sent them clears it."""
        return self.state.outbox

    def drain_preemptions(self) -> list[Preemption]:
        """Preemptions since the last call."""
        preemptions, self.state.preemptions = self.state.preemptions, []
        return preemptions

    def has_ready_work(self) -> bool:
        """Whether ``next_work`` may have something, so that the driver should not sleep."""
        membership = self.membership
        if membership is None or self.has_head_work:
            return membership is not None
        if membership.has_ready:
            return not self._lacks_units
        scheduler = membership.scheduler
        return scheduler is not None and not self.change.is_quiescing and scheduler.can_schedule

    @property
    def has_head_work(self) -> bool:
        """Whether ``next_work`` gives a part of the output head, or what follows from all parts."""
        head = None if self.membership is None else self.membership.head
        return head is not None and head.has_work

    @property
    def is_exchanging(self) -> bool:
        """Whether KV is on its way: mail and ends of pulls may come in the middle of a step."""
        return self.change.is_exchanging

    @property
    def layout(self) -> GroupLayout | None:
        """The group in which the instance stands; None before the first."""
        return None if self.membership is None else self.membership.layout

    @property
    def num_in_flight(self) -> int | None:
        """Microbatches on their way through the group; None where another instance leads."""
        if self.membership is None or self.membership.scheduler is None:
            return None
        return self.membership.scheduler.num_in_flight

    @property
    def is_in_transition(self) -> bool:
        """Whether a change of groups or of layers, or a migration, is under way here."""
        return self.forming.is_forming or self.change.change_id is not None

    @property
    def is_preparing(self) -> bool:
        """Whether ``prepare`` has something to do, so that the driver should not sleep."""
        return self.change.is_preparing

    def prepare(self, now_s: float) -> None:
        """Have memory do a piece of what a change prepares, between two steps or beside one."""
        self._changes.prepare()
        self._advance(now_s)

    @property
    def change(self) -> Change:
        """What is under way here beside steps, if anything."""
        return self._changes.change

    def rejoin(self, ready: Ready) -> Rejoin:
        """What a new front must know; ``ready`` is what the instance said at first.

        While layers are being loaded, memory is neither as in the group nor as in the next one:
        then the instance cannot go on with its group.
        """
        state, membership = self.state, self.membership
        layout = None if membership is None or self.change.is_loading else membership.layout
        return Rejoin(ready, state.held, state.table.num_units, layout, state.totals.so_far())

    def report(self, now_s: float) -> None:
        """Queue a load report (leaders only): ten times a second, and when memory gets short."""
        self._advance(now_s)
        num_bytes = self.state.mover.num_bytes_taken
        if self._arrivals.are_told(self.is_in_transition, num_bytes, now_s):
            self.state.send(None, TransferProgress(self.state.me, num_bytes))
        self.state.tell_tidied()
        self._send_report(now_s)

    def _send_report(self, now_s: float) -> None:
        if self.membership is None or self.membership.scheduler is None:
            return
        self._report_number += 1
        load = self.membership.scheduler.load(self._report_number, self.num_read, now_s)
        self.state.send(None, Report(self.state.me, load))

    def check(self) -> None:
        """Assert every owner's invariants and their agreement."""
        state, membership = self.state, self.membership
        state.table.check()
        self.change.check()
        self.inbox.check(self._moment())
        if membership is not None:
            assert state.held.covers(membership.layers), (state.held, membership.layers)
            if membership.scheduler is not None:
                membership.scheduler.check()
            if membership.head is not None:
                membership.head.check()
        assert self.forming.is_forming or not state.to_self, state.to_self

    # Messages

    def _moment(self) -> Moment:
        """What decides when a message is read."""
        membership, change = self.membership, self.change
        return Moment(
            group_id=None if membership is None else membership.layout.group_id,
            formed_id=self.forming.formed_id,
            leads=membership is not None and membership.scheduler is not None,
            is_forming=self.forming.is_forming,
            is_quiescing=change.is_quiescing,
            change_id=change.change_id,
            has_switched=change.has_switched,
            knows=self._knows,
        )

    def _knows(self, request_id: RequestId) -> bool:
        # A method, because two moments are equal only if this is.
        membership = self.membership
        return membership is not None and (
            membership.knows(request_id) or self.change.awaits(request_id)
        )

    def _advance(self, now_s: float) -> None:
        """Read what has become due, and let the change take every step that it can."""
        self._lacks_units = False
        if self._is_calm:  # as after nearly every step
            return
        while True:
            if not self._form_if_asked(now_s):
                return
            mail = self._next_mail()
            if mail is None:
                self._changes.advance(now_s)
                mail = self._next_mail()
                if mail is None:
                    return
            self._read(mail, now_s)

    def _next_mail(self) -> Mail | None:
        """What is to be read now: own messages, then those whose time has come."""
        while self.state.to_self:
            mail = Mail(self.state.to_self.popleft(), None)
            if self.inbox.accept(mail, self._moment()):
                return mail
        return self.inbox.next_due(self._moment())

    def _read(self, mail: Mail, now_s: float) -> None:
        match mail.message:
            case Form() as form:
                self.forming.ask(form)
                self.num_read = form.num_sent
                self.inbox.start_anew()
                return
            case Shutdown():
                self.is_stopping = True
                return
        membership = self.membership
        assert membership is not None, mail.message
        match mail.message:
            case Activation(plan):
                membership.ready.append((plan, mail.hidden))
            case Sampled(result):
                self._complete(membership, result, now_s)
            case FinalRows() | HeadPart() as message:
                assert membership.head is not None, message
                membership.head.read(message, mail.hidden)
            case Submit() as submit:
                self._submit(submit, membership)
            case Abort() as abort:
                self._abort(abort, membership)
            case ReturnWaiting(request_ids):
                scheduler = membership.scheduler
                found = () if scheduler is None else scheduler.give_back(request_ids)
                self.state.send(None, Returned(self.state.me, found))
            case AllowParking():
                if membership.scheduler is not None:
                    membership.scheduler.allow_parking(now_s)
            case ResetPrefixCache():
                membership.reset_prefix_cache()
            case Rollback(transition_id):
                self._changes.roll_back(transition_id)
            case order if isinstance(order, ChangeOrder):
                self._changes.begin(order, membership, now_s)
            case word:
                assert isinstance(word, ChangeWord), f"not for an instance: {word}"
                self.change.on(word, now_s)

    def _submit(self, message: Submit, membership: Membership) -> None:
        """The leader's scheduler runs the request, unless its KV is on its way here (migration).

        What comes to another member, or after its request has changed groups, is sent on.
        """
        if message.group_id is None:
            self.num_read += 1
        if membership.scheduler is None:
            layout = membership.layout
            self.state.send(layout.leader, replace(message, group_id=layout.group_id))
        elif not self.change.accept(message):
            request = message.request
            if membership.scheduler.may_hold(request):
                membership.scheduler.add(request)
                return
            number = len(request.output_token_ids)
            end = TokenOutput(request.request_id, number, None, None, FinishReason.ERROR)
            self.state.send(None, Outputs(self.state.me, (end,)))

    def _abort(self, message: Abort, membership: Membership) -> None:
        request_id, scheduler = message.request_id, membership.scheduler
        if scheduler is not None and (self.change.abort(request_id) or scheduler.abort(request_id)):
            return
        leader = membership.former_requests.get(request_id, membership.layout.leader)
        if leader != self.state.me:
            self.state.send(leader, message)

    # Groups

    def _enter(self, layout: GroupLayout, now_s: float) -> Membership:
        """Stand in a new group."""
        self.membership = enter_group(self.state, layout, now_s)
        return self.membership

    def _form_if_asked(self, now_s: float) -> bool:
        """Form a group from nothing if that is asked; False while anything else must wait for it.

        Whatever was going on is void: fault tolerance (paper 4.4).
        """
        if self.forming.is_asked:
            if self.state.is_running:
                return False
            self.membership = None
            self._changes.clear()
            self.forming.begin()
        if not self.forming.is_forming:
            return True
        formation = self.forming.finish()
        if formation is None:
            return False
        layout = formation.form.layout
        self._enter(layout, now_s)
        self.state.send(None, Formed(self.state.me, layout.group_id, formation.loaded_bytes))
        return True

    # Steps

    def _schedule(self, membership: Membership, now_s: float) -> StepPlan | None:
        scheduler = membership.scheduler
        if scheduler is None or self.change.is_quiescing:
            return None
        was_short = scheduler.is_memory_short
        plan = next_plan(scheduler, self.state.body, now_s)
        if scheduler.is_memory_short and not was_short:
            self._send_report(now_s)
        self.state.preemptions.extend(Preemption(*item) for item in scheduler.drain_preemptions())
        return plan

    def _localize(self, membership: Membership, plan: StepPlan) -> StepWork | None:
        """Free, take and name blocks for a plan; None when that must wait for a transfer."""
        step = localize(self.state, self.change, membership, plan)
        if step is None:
            assert not self._changes.is_empty, self.state.table.free_units
            self.change.make_room()
            self._lacks_units = True
        return step

    def _forward(
        self, membership: Membership, step: StepWork, outcome: StepOutcome, now_s: float
    ) -> None:
        """Pass a microbatch on: to the next stage, or its tokens to the leader."""
        state, head = self.state, membership.head
        if outcome.is_told or (head is not None and head.ran(step, outcome)):
            return
        if not step.is_last:
            state.send(membership.following, Activation(step.plan), outcome.hidden)
            return
        result = outcome.result_of(step.plan)
        if membership.scheduler is not None:
            self._complete(membership, result, now_s)
        else:
            state.send(membership.layout.leader, Sampled(result))

    def _complete(self, membership: Membership, result: StepResult, now_s: float) -> None:
        """On the leader: a step has run on all stages."""
        assert membership.scheduler is not None, result
        membership.last_step_s = now_s
        self.change.step_landed()
        tokens = membership.scheduler.complete(result, now_s)
        if (scores := membership.scheduler.take_scores()) or tokens:
            self.state.send(None, Outputs(self.state.me, tuple(tokens), scores))
