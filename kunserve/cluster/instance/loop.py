"""Drives one agent over real sockets: read mail, run a step, send mail, report."""

import time
from collections.abc import Callable
from typing import Protocol

from kunserve.cluster.instance.beside_clock import BesideClock
from kunserve.cluster.instance.exchange_pause import ExchangePause
from kunserve.cluster.instance.heart import Heart
from kunserve.cluster.instance.lease import Hold
from kunserve.cluster.instance.long_steps import LongSteps
from kunserve.cluster.instance.mover import InstanceMover
from kunserve.cluster.instance.post import Post, Woken
from kunserve.cluster.instance.wire_lease import WireLease
from kunserve.cluster.instance.wired_body import WiredBody
from kunserve.cluster.trace import InstanceTrace
from kunserve.control.group.cache_journal import CacheEvent, CacheJournal
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.body import StepOutcome, StepWork
from kunserve.control.instance.stage_clock import StageClock
from kunserve.control.instance.work import Work
from kunserve.core.config import ClusterConfig
from kunserve.core.faults import MachineFailed, StepVoid
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.messages import LinkBroken, Ready
from kunserve.core.step import StepPlan
from kunserve.transport.peers.links import PeerLinks
from kunserve.transport.wire.channel import InstanceChannel

LOOK_GAP_S = 0.05
"""Mail is read so often in the middle of a step that lasts, because looking costs a little."""
PREPARE_SHARE = 0.1
"""Of a step: so long at most is memory mapped between it and the next, or one piece."""
FORM_PATIENCE_S = 60.0
"""So long after a void step is another group waited for."""
SHORT_WAIT_S = 0.002
"""A wait while steps may not begin."""


class KvEvents(Protocol):
    """Tells routers outside of the prefix cache (``kunserve_extras/kv_events.py``)."""

    def publish(self, events: list[CacheEvent]) -> None:
        """Called as often as the leader reports. Never waits."""
        ...


class InstanceLoop:
    """One thread, in turns, for a body that computes on this thread. The agent is never entered
    twice at once.

    A turn gives the agent all mail that has come, and then runs one step at most, with what other
    stages wait for behind it. When it ends nothing that the agent has said is kept back: peers
    have got theirs before the front, each in the order in which it was said. While a step runs
    mail is read only in an exchange, or if as large a step has lasted. A turn without work sleeps
    until there is mail, or a report is due.
    """

    def __init__(
        self,
        agent: InstanceAgent,
        body: WiredBody,
        channel: InstanceChannel,
        peers: PeerLinks,
        mover: InstanceMover,
        config: ClusterConfig,
        ready: Ready,
        lease: Hold | None = None,
        trace: InstanceTrace | None = None,
        kv_events: KvEvents | None = None,
    ) -> None:
        """``ready`` is the instance's first word; without a ``lease`` there is one front only."""
        self._agent = agent
        self._body = body
        self._channel = channel
        self._peers = peers
        self._mover = mover
        self._post = Post(agent, body, channel, peers, mover, ready, lease, trace)
        self._pulse = lease if isinstance(lease, WireLease) else None
        self._trace = trace
        self._kv_events = kv_events
        if kv_events is not None:
            agent.state.journal = CacheJournal()
        self._beside = None if trace is None else BesideClock()
        self._clock = StageClock(body.spec.instance_id)
        self._heart = Heart(body.spec.instance_id, config.heartbeat_timeout_s)
        self._long_steps = LongSteps()
        self._config = config
        self._next_report_s = 0.0
        self._awaited_s = 0.0
        """Of the last step: until the stage before had written what it reads."""
        self._void: tuple[GroupId, float] | None = None
        """A group with a void step, and since when."""
        self._plan: StepPlan | None = None
        """Of the step that runs, or that has failed."""
        self._pause = ExchangePause()

    @property
    def _runs_ahead(self) -> bool:
        """Whether a step has been asked for that nobody has waited for."""
        return False

    @property
    def requests_of_step(self) -> tuple[RequestId, ...]:
        """Of the step that runs, or that has failed."""
        return () if self._plan is None else tuple(c.request_id for c in self._plan.chunks)

    def leave(self) -> None:
        """The process was asked to end: the front is told, and lets it go once it is empty."""
        self._heart.leave()

    def run(self) -> None:
        """Take turns until told to shut down."""
        self._channel.start_heartbeat(self._heart.period_s, self._heart.alive, self._pulse)
        if self._pulse is not None:
            self._pulse.start()
        while not self._agent.is_stopping:
            self._turn()
        self._post.send_to_front()
        if self._trace is not None:
            self._trace.close()

    def _turn(self) -> None:
        """Read mail, then take one step.

        A step has four parts, and they meet here. On the leader the agent *schedules* a plan
        (``Scheduler.schedule``) and *localizes* it: it names the blocks (``BlockTable``). Both
        happen in ``next_work``. ``_run`` has the body *execute* it. ``finished`` then *completes*
        the step: its tokens go to the leader's scheduler (``Scheduler.complete``), or its hidden
        states to the next stage, which localizes and executes the same plan.
        """
        self._heart.turn(is_computing=False)
        self._read(self._wait())
        if self._agent.is_preparing:
            self._prepare()
        self._post.meet_new_front()
        self._report_if_due()
        self._send()
        work = self._next_work()
        self._send(begins=work is not None)  # also of plans that compute nothing
        if work is not None:
            self._run(work)
            self._follow_up()
            return
        if self._config.check_invariants:
            self._agent.check()
        self._post.send_to_front()

    def _next_work(self) -> Work | None:
        """What the body does in this turn."""
        is_idle = self._post.has_no_front or self._gives_way()
        return None if is_idle else self._agent.next_work(time.monotonic())

    # Mail

    def _wait(self) -> Woken:
        """Sleep until mail comes, or the next report is due; not at all if there is work to do."""
        gives_way = self._gives_way()
        is_idle = self._post.has_no_front or gives_way
        is_ready = self._agent.has_ready_work() and not is_idle
        if self._runs_ahead or is_ready or self._agent.is_preparing:
            return Woken.BUSY  # mail is read without asking first whether there is any
        began_s = self._look()  # else a sleep after the last step would count as a bubble
        longest_s = max(0.0, self._next_report_s - began_s)
        woken = self._post.wait(min(longest_s, SHORT_WAIT_S) if gives_way else longest_s)
        if self._beside is not None:
            self._beside.slept(time.monotonic() - began_s)
        return woken

    def _read(self, woken: Woken) -> None:
        with self._mover.quiet():
            if woken is Woken.BY_STAGES:
                self._post.read_peers(self._look(), is_brief=True)
            else:
                self._post.read(self._look(), has_slept=woken is Woken.BY_ANY)

    def _send(self, *, begins: bool = False) -> None:
        """Peers get theirs first, because they wait for it. ``begins``: a step, right behind."""
        self._post.send()
        self._post.send_to_front()

    def _look(self) -> float:
        """Let the stage clock see what the group does now; returns the time."""
        now_s = time.monotonic()
        self._clock.look(self._agent.layout, self._agent.num_in_flight, now_s)
        return now_s

    def _report_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + self._config.report_period_s
            self._look_for_next_group(now_s)
            self._agent.report(now_s)
            self._peers.tell_counts()
            if self._kv_events is not None and self._agent.state.journal is not None:
                self._kv_events.publish(self._agent.state.journal.take())
            stage_time = self._clock.report()
            if stage_time is not None:
                self._channel.send(stage_time)
            if self._trace is not None:
                self._trace.flush()

    def _give_up(self, reason: str, now_s: float) -> None:
        """Tell the front that what the stage before has told of did not come. If that is dead, the
        front knows better.
        """
        layout = self._agent.layout
        if layout is None or (self._void is not None and self._void[0] == layout.group_id):
            return
        self._void = layout.group_id, now_s
        me = self._body.spec.instance_id
        places = [stage.instance_id for stage in layout.stages]
        self._channel.send(LinkBroken(me, places[places.index(me) - 1], reason))

    def _look_for_next_group(self, now_s: float) -> None:
        """The group of a void step stands still: for ever, if nobody has heard of it."""
        if self._void is None:
            return
        group_id, since_s = self._void
        layout = self._agent.layout
        if layout is None or layout.group_id != group_id:
            self._void = None
        elif now_s - since_s > FORM_PATIENCE_S:
            raise MachineFailed("a step was void, and no other group was formed")

    # Steps

    def _prepare(self) -> None:
        """Map a few granules for a change; more where steps are so long that nobody sees it."""
        until_s = time.monotonic() + PREPARE_SHARE * self._agent.state.step_s
        with self._mover.quiet():
            self._agent.prepare(time.monotonic())
            while self._agent.is_preparing and time.monotonic() < until_s:
                self._agent.prepare(time.monotonic())

    def _gives_way(self) -> bool:
        """Whether no step begins, so that an exchange is over soon."""
        if not self._agent.is_exchanging:
            self._pause.end()
            return False
        if not self._mover.copies_here:
            return False
        return self._pause.gives_way(self._mover.num_bytes_taken, time.monotonic())

    def _run(self, work: Work) -> None:
        """One step of this stage, what it adds to the accounts, and what the agent says of it."""
        self._plan = work.step.plan
        self._heart.turn(is_computing=True)
        beside = None if self._beside is None else self._beside.begin_work()
        began_s = self._look()
        self._awaited_s = 0.0
        if isinstance(work.step, StepWork):
            may_last = self._long_steps.may_last(work.step.plan)
            look_up = self._look_up if may_last or self._agent.is_exchanging else None
            try:
                outcome = self._execute(work.step, work, look_up)
            except StepVoid as void:
                self._give_up(str(void), began_s)
                outcome = StepOutcome(None, (), is_told=True)
        else:
            outcome = work.run(self._body)
        ended_s = time.monotonic()
        self._clock.computed(ended_s - began_s - self._awaited_s)
        if isinstance(work.step, StepWork):
            self._long_steps.learn(work.step.plan, ended_s - began_s)
        self._heart.turn(is_computing=False, step_s=ended_s - began_s)
        if self._trace is not None and self._beside is not None:
            input_s = began_s + self._awaited_s
            self._trace.computed(work.step, input_s, ended_s, self._beside.worked_s(), beside)
            self._beside.end_work()
        with self._mover.quiet():
            self._agent.finished(work, outcome, ended_s)
        self._plan = None
        self._send()

    def _execute(
        self, step: StepWork, work: Work, look_up: Callable[[], None] | None
    ) -> StepOutcome:
        return self._body.execute(step, work.hidden, look_up)

    def _look_up(self) -> None:
        """In the middle of a step: read what should not wait for its end.

        In an exchange a step takes as long as many pieces: peers wait for what landed here, and it
        for them. At other times a long step would hold up the answer to a transition, and aborts.
        """
        if not self._agent.is_exchanging and time.monotonic() - self._post.read_s < LOOK_GAP_S:
            return
        self._heart.turn(is_computing=True)
        plan, self._plan = self._plan, None  # what fails in here is not the step's doing
        self._read(Woken.BUSY)
        self._send()
        self._plan = plan

    def _follow_up(self) -> None:
        """What has become due after a step, of the output head: other stages wait for it.

        It is short, and of the mail only that of the stages can bring more of it.
        """
        while not self._post.has_no_front:
            with self._mover.quiet():
                self._post.read_peers(time.monotonic(), is_brief=True)
            self._send()
            if not self._agent.has_head_work:
                return
            work = self._agent.next_work(time.monotonic())
            assert work is not None
            self._run(work)
