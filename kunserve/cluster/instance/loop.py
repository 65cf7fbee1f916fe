"""Drives one agent over real sockets: read mail, run a step, send mail, report."""

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import zmq

from kunserve.cluster.instance.beside_clock import BesideClock
from kunserve.cluster.instance.lease import Hold
from kunserve.cluster.instance.mover import InstanceMover, Loaded
from kunserve.cluster.instance.peer_book import PeerBook
from kunserve.cluster.instance.prepare_gate import PrepareGate
from kunserve.cluster.instance.wire_lease import WireLease
from kunserve.cluster.trace import InstanceTrace
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.body import Body, Memory, StepOutcome, StepWork
from kunserve.control.instance.stage_clock import StageClock
from kunserve.control.instance.work import Work
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Alive, Connect, Form, HeadPart, LinkBroken, Message, Ready
from kunserve.core.step import StepPlan
from kunserve.core.transfer import KvPull
from kunserve.transport.bulk.movable_memory import MovableMemory
from kunserve.transport.bulk.sink import Pulled
from kunserve.transport.peers.links import PeerLinks
from kunserve.transport.wire.channel import InstanceChannel

logger = logging.getLogger(__name__)

HEARTBEATS_PER_TIMEOUT = 5


class WiredMemory(Memory, MovableMemory, Protocol):
    """What the brain changes, and movers read and fill."""


class WiredBody(Body, Protocol):
    """A body whose activations can cross a wire, and whose host can read mail during a step."""

    @property
    def memory(self) -> WiredMemory:
        """See ``Body``."""
        ...

    @property
    def computes_aside(self) -> bool:
        """Whether the host is free while a step is computed."""
        ...

    def execute(
        self,
        work: StepWork,
        hidden: Any,
        look_up: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepOutcome:
        """As ``Body.execute``; calls ``look_up``, if given, between layers.

        ``meanwhile`` is called once, when the device has been asked for all of them.
        """
        ...

    def hidden_to_bytes(self, hidden: Any) -> memoryview:
        """The hidden states as bytes, without a copy where possible."""
        ...

    def hidden_from_bytes(self, data: memoryview) -> Any:
        """The inverse, on the receiving stage."""
        ...

    def part_from_bytes(self, data: memoryview) -> Any:
        """The same for a part of the output head, whose bytes ``hidden_to_bytes`` gives too."""
        ...

    def load_layers(self, layers: LayerRange) -> None:
        """Fill mapped layers from disk."""
        ...


LONG_STEP_S = 0.1
"""Once a step has taken so long, mail is read in the middle of steps of as many tokens."""
LOOK_GAP_S = 0.05
"""And that so often, because looking costs a little."""
EXCHANGE_PAUSE_S = 0.03
"""So long at most no step begins in an exchange whose KV is copied on this machine's cores: a step
would take them, and everybody whose KV moves waits for the copies."""
SHORT_WAIT_S = 0.002
"""A wait while steps may not begin, or until the members of a transition are connected."""


class Woken(enum.Enum):
    """What ended a wait for mail."""

    BUSY = enum.auto()
    """Nothing: there is work to do."""
    BY_STAGES = enum.auto()
    """Mail in the rings of other stages, and nowhere else. They wait for what follows from it."""
    BY_ANY = enum.auto()


class InstanceLoop:
    """One thread: the agent is never entered twice at once."""

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
    ) -> None:
        """``ready`` is the instance's first word; without a ``lease`` there is one front only."""
        self._ready = ready
        self._lease = lease
        # While the instance loaded, another front may have come: that one waits for ``Rejoin``.
        self._front = None if lease is None else lease.started_by
        self._awaits_group = False
        """A new front has been told where this instance stands, and will have it form a group."""
        self._agent = agent
        self._body = body
        self._channel = channel
        self._peers = peers
        self._mover = mover
        self._computes_aside = body.computes_aside
        me = body.spec.instance_id
        self._book = PeerBook(peers, mover, ready.address.machine)
        self._gate = PrepareGate(me, peers.unreached, config.link_timeout_s)
        self._trace = trace
        self._beside = None if trace is None else BesideClock()
        self._clock = StageClock(body.spec.instance_id)
        self._num_turns = 0
        self._longest_step_s = 0.0
        self._is_computing = False
        self._checks = config.check_invariants
        self._report_period_s = config.report_period_s
        self._heartbeat_period_s = config.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        self._next_report_s = 0.0
        self._read_s = 0.0
        """When mail was read last."""
        self._plan: StepPlan | None = None
        """Of the step that runs, or that has failed."""
        self._long_tokens: int | None = None
        """Of the smallest steps that last; None before the first."""
        self._exchange_since_s: float | None = None
        """When the exchange under way was first seen."""
        self._to_front: list[Message] = []
        """What the front gets once the device computes the next step."""
        self._poller = zmq.Poller()
        for socket in (*channel.poll_sockets, *peers.poll_sockets, *mover.poll_sockets):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(mover.loader.wakeup.fileno(), zmq.POLLIN)

    def run(self) -> None:
        """Until told to shut down: read mail, then take one step, over and over.

        A step has four parts, and they meet here. On the leader the agent *schedules* a plan
        (``Scheduler.schedule``) and *localizes* it: it names the blocks (``BlockTable``). Both
        happen in ``next_work``. ``_run`` has the body *execute* it. ``finished`` then *completes*
        the step: its tokens go to the leader's scheduler (``Scheduler.complete``), or its hidden
        states to the next stage, which localizes and executes the same plan.
        """
        agent = self._agent
        pulse = self._lease if isinstance(self._lease, WireLease) else None
        self._channel.start_heartbeat(self._heartbeat_period_s, self._alive, pulse)
        if pulse is not None:
            pulse.start()
        while not agent.is_stopping:
            self._turn(is_computing=False)
            woken = self._wait()
            with self._mover.quiet():  # a transition may remap what the mover reads and fills
                if woken is Woken.BY_STAGES:
                    self._read_peers(self._look(), is_brief=True)
                else:
                    self._read_mail(has_slept=woken is Woken.BY_ANY)
            self._meet_new_front()
            self._report_if_due()
            self._send_mail()
            is_idle = self._has_no_front or self._gives_way()
            work = None if is_idle else agent.next_work(time.monotonic())
            if work is not None:
                self._send_mail()
                self._run(work)
                self._send_mail()
                self._follow_up()
                continue
            self._send_mail()  # of plans that compute nothing
            if self._checks:
                agent.check()
            self._send_to_front()
        self._send_to_front()
        if self._trace is not None:
            self._trace.close()

    def _alive(self) -> Alive:
        """Called from the heartbeat's thread. What changes meanwhile, the next one tells."""
        me = self._ready.spec.instance_id
        return Alive(me, self._num_turns, self._longest_step_s, self._is_computing)

    @property
    def requests_of_step(self) -> tuple[RequestId, ...]:
        """Of the step that runs, or that has failed."""
        return () if self._plan is None else tuple(c.request_id for c in self._plan.chunks)

    @property
    def _has_no_front(self) -> bool:
        """Nobody waits for what this instance computes."""
        return self._awaits_group or (self._lease is not None and self._lease.is_alone)

    def _gives_way(self) -> bool:
        """Whether no step begins, so that an exchange is over soon."""
        if not self._agent.is_exchanging:
            self._exchange_since_s = None
            return False
        if self._computes_aside or not self._mover.copies_here:
            return False
        now_s = time.monotonic()
        if self._exchange_since_s is None:
            self._exchange_since_s = now_s
        return now_s - self._exchange_since_s < EXCHANGE_PAUSE_S

    def _meet_new_front(self) -> None:
        front = None if self._lease is None else self._lease.front
        if front is not None and front != self._front:
            self._send_to_front()
            self._front = front
            self._awaits_group = True
            self._book.forget_all()
            self._channel.send(replace(self._agent.rejoin(self._ready), front=front))
            logger.info("a new front is there, told it where this instance stands")

    def _turn(self, *, is_computing: bool, step_s: float = 0.0) -> None:
        """The loop moves on: the next heartbeat says so."""
        self._num_turns += 1
        self._is_computing = is_computing
        if step_s > self._longest_step_s:
            self._longest_step_s = step_s

    def _follow_up(self) -> None:
        """What has become due after a step, of the output head: other stages wait for it.

        It is short, and of the mail only that of the stages can bring more of it.
        """
        while not self._has_no_front:
            with self._mover.quiet():
                self._read_peers(time.monotonic(), is_brief=True)
            self._send_mail()
            if not self._agent.has_head_work:
                return
            work = self._agent.next_work(time.monotonic())
            assert work is not None
            self._run(work)
            self._send_mail()

    def _run(self, work: Work) -> None:
        """One step of this stage, and what it adds to the accounts."""
        self._plan = work.step.plan
        self._turn(is_computing=True)
        beside = None if self._beside is None else self._beside.begin_work()
        began_s = self._look()
        outcome = self._execute(work) if isinstance(work.step, StepWork) else work.run(self._body)
        ended_s = time.monotonic()
        self._clock.computed(ended_s - began_s)
        is_long = ended_s - began_s >= LONG_STEP_S
        if isinstance(work.step, StepWork) and (is_long or self._long_tokens is not None):
            self._learn(work.step.plan.num_tokens, ended_s - began_s)
        self._turn(is_computing=False, step_s=ended_s - began_s)
        if self._trace is not None and self._beside is not None:
            self._trace.computed(work.step, began_s, ended_s, self._beside.worked_s(), beside)
            self._beside.end_work()
        with self._mover.quiet():
            self._agent.finished(work, outcome, ended_s)
        self._plan = None

    def _execute(self, work: Work) -> StepOutcome:
        step, long_tokens = work.step, self._long_tokens
        assert isinstance(step, StepWork)
        may_last = long_tokens is not None and step.plan.num_tokens >= long_tokens
        look_up = self._look_up if may_last or self._agent.is_exchanging else None
        if self._computes_aside:
            return self._body.execute(step, work.hidden, look_up, self._send_to_front)
        return self._body.execute(step, work.hidden, look_up)

    def _learn(self, num_tokens: int, seconds: float) -> None:
        """Steps of so many tokens last, or do not: mail is read in the middle of those that do.

        A step in which mail is read is a call per layer, which costs short steps a part of their
        time. So a long prompt says nothing of the decodes that come after it.
        """
        if seconds >= LONG_STEP_S:
            if self._long_tokens is None or num_tokens < self._long_tokens:
                self._long_tokens = num_tokens
        elif self._long_tokens is not None and num_tokens >= self._long_tokens:
            self._long_tokens = num_tokens + 1

    def _look_up(self) -> None:
        """In the middle of a step: read what should not wait for its end.

        In an exchange a step takes as long as many pieces: peers wait for what landed here, and it
        for them. At other times a long step would hold up the answer to a transition, and aborts.
        """
        if not self._agent.is_exchanging and time.monotonic() - self._read_s < LOOK_GAP_S:
            return
        self._turn(is_computing=True)
        with self._mover.quiet():
            self._read_mail()
        self._send_mail()

    def _look(self) -> float:
        """Let the stage clock see what the group does now; returns the time."""
        now_s = time.monotonic()
        self._clock.look(self._agent.layout, self._agent.num_in_flight, now_s)
        return now_s

    def _wait(self) -> Woken:
        """Sleep until mail comes, or the next report is due; not at all if there is work to do."""
        gives_way = self._gives_way()
        if self._agent.has_ready_work() and not (self._has_no_front or gives_way):
            return Woken.BUSY  # mail is read without asking first whether there is any
        began_s = self._look()  # else a sleep after the last step would count as a bubble
        longest_s = max(0.0, self._next_report_s - began_s)
        wait_s = min(longest_s, SHORT_WAIT_S) if gives_way or self._gate.is_waiting else longest_s
        found = self._poller.poll(int(wait_s * 1000.0))
        self._peers.awake()
        if self._beside is not None:
            self._beside.slept(time.monotonic() - began_s)
        is_brief = len(found) == 1 and found[0][0] == self._peers.bell
        if is_brief and not (self._gate.is_waiting or self._agent.is_in_transition):
            return Woken.BY_STAGES
        return Woken.BY_ANY

    def _read_mail(self, *, has_slept: bool = False) -> None:
        agent, now_s = self._agent, self._look()
        self._read_s = now_s
        for message in self._channel.receive():
            if isinstance(message, Connect):
                self._book.take(message)
            elif self._gate.passes(message, now_s):
                if isinstance(message, Form):
                    self._awaits_group = False
                    self._peers.begin_anew()
                agent.on(message, now_s)
        if self._gate.is_waiting:
            self._turn_gate(now_s)
        self._read_peers(now_s)
        if not (has_slept or agent.is_in_transition):
            return  # nothing is being pulled
        ended: list[Pulled | Loaded] = [*self._mover.completed(), *self._mover.loader.completed()]
        for pull in ended:
            if self._trace is not None:
                self._trace.pulled(pull.what, pull.ok, now_s)
            if isinstance(pull.what, KvPull):
                agent.pulled_kv(pull.what, pull.ok, now_s)
            else:
                agent.pulled_layers(pull.what.layers, pull.what.src, pull.ok, now_s)

    def _turn_gate(self, now_s: float) -> None:
        passed, refused = self._gate.turn(now_s)
        for order in passed:
            self._agent.on(order, now_s)
        for answer in refused:
            self._channel.send(answer)

    def _read_peers(self, now_s: float, *, is_brief: bool = False) -> None:
        for message, payload in self._peers.receive(is_brief=is_brief):
            self._agent.on(message, now_s, self._hidden_of(message, payload))
        for peer, reason, is_down in self._peers.faults():
            logger.error("link is broken peer=%d reason=%r", peer, reason)
            self._channel.send(LinkBroken(self._body.spec.instance_id, peer, reason, is_down))

    def _hidden_of(self, message: Message, payload: memoryview | None) -> Any:
        """What came beside a message, as the body wants it."""
        if payload is None:
            return None
        if isinstance(message, HeadPart):
            return self._body.part_from_bytes(payload)
        return self._body.hidden_from_bytes(payload)

    def _report_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + self._report_period_s
            self._agent.report(now_s)
            self._peers.tell_counts()
            stage_time = self._clock.report()
            if stage_time is not None:
                self._channel.send(stage_time)
            if self._trace is not None:
                self._trace.flush()

    def _send_mail(self) -> None:
        """Peers get theirs at once, because they wait for it.

        Where a device computes and has a next step, the front's part, tokens above all, is written
        while it computes. So the device does not wait for that.
        """
        if not (self._agent.has_mail or self._to_front):
            return
        for dst, message, hidden in self._agent.drain():
            if dst is None:
                self._to_front.append(message)
            else:
                payload = None if hidden is None else self._body.hidden_to_bytes(hidden)
                self._peers.send(dst, message, payload)
                if self._trace is not None and payload is not None:
                    self._trace.sent(dst, message, payload.nbytes, time.monotonic())
        if not (self._computes_aside and self._agent.has_ready_work()):
            self._send_to_front()
        for preemption in self._agent.drain_preemptions():
            logger.info(
                "preempted request=%s lost_tokens=%d",
                preemption.request_id,
                preemption.lost_tokens,
            )

    def _send_to_front(self) -> None:
        """In the order in which the agent has said it."""
        for message in self._to_front:
            self._channel.send(message)
        self._to_front.clear()
