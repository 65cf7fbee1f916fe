"""One instance's brain: steps, groups, transitions. Sans-I/O; a driver feeds and empties it.

The same agent runs over the CPU engine, the fake body of the tests and a simulated body.
A driver calls ``on`` for every message, ``next_work`` when the body is idle, ``finished`` when
a step is done, and sends what ``drain`` returns. Messages may come while a step runs.
"""

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kunserve.control.instance import host_copies
from kunserve.control.instance.block_table import BlockTable
from kunserve.control.instance.body import Body, Mover, StepOutcome, StepWork
from kunserve.control.instance.layer_restore import LayerRestore
from kunserve.control.instance.migration import Migration
from kunserve.control.instance.state import AgentConfig, InstanceState, Outgoing, Preemption
from kunserve.control.instance.transition import TransitionMember
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import LayerRange
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
    LoadLayers,
    Message,
    Migrate,
    OfferKv,
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


class Work(NamedTuple):
    """A step for the body, and the hidden states that came with it."""

    step: StepWork
    hidden: Any


class InstanceAgent:
    """Routes messages, localises step plans, and lets transitions advance between steps."""

    def __init__(self, config: AgentConfig, body: Body, mover: Mover) -> None:
        spec = body.spec
        whole = LayerRange(0, spec.num_layers)
        table = BlockTable(spec.num_layers, spec.kv_units, 64, 64)
        mover.offer_layers(whole)
        self.seat = InstanceState(config, body, mover, table, whole, specs={spec.instance_id: spec})
        self._regroup = TransitionMember(self.seat)
        self._reload = LayerRestore(self.seat)
        self._migration = Migration(self.seat)
        self._num_received = 0
        self._report_number = 0
        self._early_aborts: dict[RequestId, None] = {}
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
        self._take(message, now_s, hidden)
        self._settle(now_s)

    def pulled_kv(self, piece: KvPull, ok: bool, now_s: float) -> None:
        """The mover filled a piece, or its source would not give it."""
        self._regroup.pulled(piece, ok)
        self._migration.pulled(piece, ok)
        self._settle(now_s)

    def pulled_layers(self, layers: LayerRange, src: InstanceId, ok: bool, now_s: float) -> None:
        """The mover filled weights, or could not."""
        self._reload.pulled(layers, src, ok)
        self._settle(now_s)

    def next_work(self, now_s: float) -> Work | None:
        """The next step for the body, or None. ``finished`` must come before the next call."""
        seat = self.seat
        assert not seat.is_running
        while True:
            if seat.ready:
                plan, hidden = seat.ready.popleft()
            else:
                scheduled = self._schedule(now_s)
                if scheduled is None:
                    return None
                plan, hidden = scheduled, None
            step = self._localize(plan)
            if step is None:
                seat.ready.appendleft((plan, hidden))
                return None
            if plan.chunks:
                seat.is_running = True
                return Work(step, hidden)
            self._forward(step, StepOutcome(None, ()), now_s)
            self._settle(now_s)

    def finished(self, work: Work, outcome: StepOutcome, now_s: float) -> None:
        """The body ran the step."""
        assert self.seat.is_running
        self.seat.is_running = False
        self._forward(work.step, outcome, now_s)
        self._settle(now_s)

    def drain(self) -> list[Outgoing]:
        """Messages to send now, in order."""
        outbox, self.seat.outbox = self.seat.outbox, []
        return outbox

    def drain_preemptions(self) -> list[Preemption]:
        """Preemptions since the last call."""
        preemptions, self.seat.preemptions = self.seat.preemptions, []
        return preemptions

    def has_ready_work(self) -> bool:
        """Whether ``next_work`` may have something, so that the driver should not sleep."""
        seat = self.seat
        if seat.ready:
            return not self._lacks_units
        return (
            seat.scheduler is not None
            and not self._regroup.is_quiescing
            and seat.scheduler.can_schedule
        )

    @property
    def is_exchanging(self) -> bool:
        """Whether peers wait for KV from here or are waited for: mail should not wait for a step.

        Messages and ends of pulls may then be given in the middle of a step too.
        """
        return self._regroup.is_exchanging

    @property
    def is_in_transition(self) -> bool:
        """Whether a change of groups or of layers is prepared or under way here."""
        is_regrouping = self._regroup.is_busy or self._reload.is_busy
        return self._form is not None or is_regrouping or self._migration.is_busy

    def report(self, now_s: float) -> None:
        """Queue a load report (leaders only). Called about ten times a second on everybody.

        Between two calls a leader reports by itself the moment memory gets short.
        """
        self._settle(now_s)
        self._send_report(now_s)

    def _send_report(self, now_s: float) -> None:
        seat = self.seat
        if seat.scheduler is None:
            return
        self._report_number += 1
        load = seat.scheduler.load(self._report_number, self._num_received, now_s)
        seat.send(None, Report(seat.me, load))

    def check(self) -> None:
        """Assert every owner's invariants and their agreement."""
        seat = self.seat
        seat.table.check()
        self._regroup.check()
        if seat.layout is not None:
            assert seat.held.covers(seat.layers), (seat.held, seat.layers)
        if seat.scheduler is not None:
            seat.scheduler.check()
        assert self._form is not None or not seat.to_self, seat.to_self

    # Messages

    def _settle(self, now_s: float) -> None:
        """Let transitions take every step that has become possible, and read own mail."""
        self._lacks_units = False
        while True:
            if self._form is not None:
                if self.seat.is_running:
                    return
                self._form_group(self._form, now_s)
            self._regroup.pump(now_s)
            self._reload.pump(now_s)
            self._migration.pump()
            if self.seat.to_self:
                self._take(self.seat.to_self.popleft(), now_s, None)
            elif self._held and not self._is_between_groups:
                self._take(self._held.popleft(), now_s, None)
            elif self._later:
                message, hidden = self._later.popleft()
                self._take(message, now_s, hidden)
            else:
                return

    def _take(self, message: Message, now_s: float, hidden: Any) -> None:
        match message:
            case Activation():
                self.seat.arrived(message.plan, hidden)
            case Sampled():
                self._sampled(message.result, now_s)
            case Submit():
                self._submit(message)
            case Abort():
                self._abort(message)
            case KvMoved() | KvDropped():
                self._regroup.hear(message, now_s)
                self._migration.hear(message, self._regroup.is_busy)
            case Migrate() | HandOff() | EndMigration() | OfferKv() | WithdrawKv():
                self._migration.hear(message, self._regroup.is_busy)
            case ExchangeProgress():
                if not self._regroup.hear(message, now_s):
                    self._reload.member_back(message)
            case Handover():
                self._regroup.handover(message, now_s)
            case Prepare():
                self._regroup.prepare(message, self._obstacle(), now_s)
            case Commit():
                self._regroup.commit(message, now_s)
            case Rollback():
                self._rollback(message)
            case LoadLayers():
                self._reload.start(message, self._regroup.is_busy, now_s)
            case Form():
                self._form = message
                self._later = deque(m for m in self._later if isinstance(m[0], Activation))
            case Shutdown():
                self.is_stopping = True
            case _:
                raise AssertionError(f"not for an instance: {message}")

    # Requests

    @property
    def _is_between_groups(self) -> bool:
        """No leader to give a request to: it is handing over, or not formed yet."""
        return self.seat.layout is None or self._regroup.is_quiescing

    def _submit(self, message: Submit) -> None:
        seat = self.seat
        if message.group_id is None:
            self._num_received += 1
        elif self._formed_id is not None and message.group_id < self._formed_id:
            return  # from before a failure: the controller runs the request again
        if self._is_between_groups:
            self._held.append(message)
            return
        assert seat.layout is not None
        if seat.scheduler is None:
            seat.send(seat.layout.leader, replace(message, group_id=seat.layout.group_id))
        elif self._migration.submit(message):
            pass  # it runs as soon as its KV is here
        elif message.request.request_id in self._early_aborts:
            del self._early_aborts[message.request.request_id]
        else:
            seat.scheduler.add(message.request)

    def _abort(self, message: Abort) -> None:
        seat = self.seat
        if self._is_between_groups:
            self._held.append(message)
            return
        assert seat.layout is not None
        request_id = message.request_id
        elsewhere = self._regroup.new_leader_of(request_id)
        if seat.scheduler is None:
            seat.send(seat.layout.leader if elsewhere is None else elsewhere, message)
            return
        self._regroup.ends(request_id)
        if self._migration.abort(request_id) or seat.scheduler.abort(request_id):
            return
        if elsewhere is not None:
            seat.send(elsewhere, message)
            return
        self._early_aborts[request_id] = None
        if len(self._early_aborts) > MAX_EARLY_ABORTS:
            self._early_aborts.pop(next(iter(self._early_aborts)))

    def _sampled(self, result: StepResult, now_s: float) -> None:
        seat = self.seat
        if seat.scheduler is None or seat.layout is None:
            return
        if result.group_id != seat.layout.group_id:
            return
        seat.last_step_s = now_s
        self._reload.step_landed()
        tokens = seat.scheduler.complete(result, now_s)
        if tokens:
            seat.send(None, Outputs(seat.me, tuple(tokens)))

    # Groups

    def _obstacle(self) -> str | None:
        """What a transition would get in the way of."""
        if self._reload.is_busy:
            return "layers are being loaded"
        return "a request migrates" if self._migration.is_busy else None

    def _rollback(self, message: Rollback) -> None:
        early = self._regroup.rollback(message)
        self._reload.rollback(message.transition_id)
        for progress in early:
            self._reload.member_back(progress)

    def _form_group(self, message: Form, now_s: float) -> None:
        """Start anew, whatever was going on. No step runs."""
        seat = self.seat
        self._form = None
        seat.mover.reset()
        self._regroup = TransitionMember(seat)
        self._reload = LayerRestore(seat)
        self._migration = Migration(seat)
        self._held.clear()
        seat.to_self.clear()
        for request_id in seat.table.request_ids():
            seat.table.unpin(request_id, 0, seat.table.num_blocks(request_id))
            seat.free(request_id)
        layers = message.layout.layers_of(seat.me)
        assert layers is not None, (seat.me, message)
        whole = LayerRange(0, seat.spec.num_layers)
        if not seat.held.covers(layers):
            seat.table.set_layers(whole, seat.spec.kv_units)
            seat.body.reclaim_layers(whole)
            seat.body.load_layers(whole)
            seat.held = whole
            seat.mover.offer_layers(whole)
        seat.specs.update((spec.instance_id, spec) for spec in message.specs)
        seat.keep_only(layers)
        seat.enter(message.layout, now_s)
        self._formed_id = message.layout.group_id

    # Steps

    def _schedule(self, now_s: float) -> StepPlan | None:
        scheduler = self.seat.scheduler
        if scheduler is None or self._regroup.is_quiescing:
            return None
        was_short = scheduler.is_memory_short
        plan = scheduler.schedule(now_s)
        if scheduler.is_memory_short and not was_short:
            self._send_report(now_s)
        self.seat.preemptions.extend(Preemption(*item) for item in scheduler.drain_preemptions())
        return plan

    def _localize(self, plan: StepPlan) -> StepWork | None:
        """Free, take and name blocks for a plan, as every stage must before running it.

        None when the units are there, but scattered between blocks that are in transfer.
        """
        seat = self.seat
        table, block_size = seat.table, seat.spec.block_size
        if seat.swapped_out:
            host_copies.free_stashed(seat)
        for request_id in plan.released:
            self._migration.release(request_id)
            self._regroup.release(request_id)
            seat.body.forget(request_id)
        if plan.swapped_in:
            host_copies.make_room(seat, plan)
        counts, row_of = table.counts, table.rows
        rows: list[int] = []
        for request_id, start, num_tokens, _ in plan.chunks:
            needed = (start + num_tokens + block_size - 1) // block_size
            if counts.get(request_id, 0) < needed:
                copies = table.grow(request_id, needed)
                if copies is None:
                    in_transfer = self._regroup.is_exchanging or self._migration.is_busy
                    assert in_transfer, (plan, table.free_units)
                    self._migration.make_room()
                    self._lacks_units = True
                    return None
                if copies:
                    seat.body.copy_units(copies)
            rows.append(row_of[request_id])
        if plan.swapped_out or plan.swapped_in:
            host_copies.start_copies(seat, plan)
        layers = seat.layers
        scheduler = seat.scheduler
        return StepWork(
            plan=plan,
            layers=layers,
            is_first=layers.first == 0,
            is_last=layers.end == seat.spec.num_layers,
            token_ids=None if scheduler is None else scheduler.token_ids_of(plan),
            tables=table.tables,
            rows=np.array(rows, dtype=np.int32),
        )

    def _forward(self, step: StepWork, outcome: StepOutcome, now_s: float) -> None:
        """Pass a microbatch on: to the next stage, or its tokens to the leader."""
        seat = self.seat
        assert seat.layout is not None
        if not step.is_last:
            members = seat.layout.members
            following = members[members.index(seat.me) + 1]
            seat.send(following, Activation(step.plan), outcome.hidden)
            return
        result = StepResult(step.plan.group_id, step.plan.step_id, outcome.tokens)
        if seat.leads:
            self._sampled(result, now_s)
        else:
            seat.send(seat.layout.leader, Sampled(result))
