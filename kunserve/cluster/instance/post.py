"""An instance's mail: what comes goes to its agent, what the agent says goes out."""

import enum
import logging
import time
from dataclasses import replace
from typing import Any

import zmq

from kunserve.cluster.instance.lease import Hold
from kunserve.cluster.instance.mover import InstanceMover, Loaded
from kunserve.cluster.instance.peer_book import PeerBook
from kunserve.cluster.instance.prepare_gate import PrepareGate
from kunserve.cluster.instance.wired_body import WiredBody
from kunserve.cluster.trace import InstanceTrace
from kunserve.control.instance.agent import InstanceAgent
from kunserve.core.ids import GroupId, InstanceId, StepId
from kunserve.core.messages import (
    Activation,
    Connect,
    EndMigration,
    Form,
    HeadPart,
    LateContact,
    LinkBroken,
    Message,
    Migrate,
    Prepare,
    Ready,
    Rollback,
    Sampled,
)
from kunserve.core.step import StepPlan
from kunserve.core.transfer import KvPull
from kunserve.transport.bulk.sink import Pulled
from kunserve.transport.peers.links import PeerLinks
from kunserve.transport.wire.channel import InstanceChannel

logger = logging.getLogger(__name__)

GATE_WAIT_S = 0.002
"""A wait for mail until the members of a transition are connected."""


class Woken(enum.Enum):
    """What ended a wait for mail."""

    BUSY = enum.auto()
    """Nothing: there is work to do."""
    BY_STAGES = enum.auto()
    """Mail in the rings of other stages, and nowhere else. They wait for what follows from it."""
    BY_ANY = enum.auto()


class Post:
    """Owner of what is read and not yet taken, said and not yet sent. Belongs to the loop's thread.

    Called with ``InstanceMover.quiet`` where it reads: a transition may remap what that fills.
    """

    def __init__(
        self,
        agent: InstanceAgent,
        body: WiredBody,
        channel: InstanceChannel,
        peers: PeerLinks,
        mover: InstanceMover,
        ready: Ready,
        lease: Hold | None,
        trace: InstanceTrace | None,
    ) -> None:
        """``ready`` is the instance's first word; without a ``lease`` there is one front only."""
        self._agent = agent
        self._body = body
        self._channel = channel
        self._peers = peers
        self._mover = mover
        self._ready = ready
        self._book = PeerBook(peers, mover, ready.address.machine)
        self._gate = PrepareGate(body.spec.instance_id, peers.unreached, peers.patience_s)
        self._lease = lease
        # While the instance loaded, another front may have come: that one waits for ``Rejoin``.
        self._front = None if lease is None else lease.started_by
        self._awaits_group = False
        """A new front has been told where this instance stands, and will have it form a group."""
        self._trace = trace
        self._to_front: list[Message] = []
        self._words: dict[tuple[GroupId, StepId], memoryview] = {}
        """Of steps whose tokens are not sent yet."""
        self.read_s = 0.0
        """When all mail was read last."""
        self._poller = zmq.Poller()
        for socket in (*channel.poll_sockets, *peers.poll_sockets, *mover.poll_sockets):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(mover.loader.wakeup.fileno(), zmq.POLLIN)

    @property
    def has_no_front(self) -> bool:
        """Nobody waits for what this instance computes, or takes it."""
        if self._awaits_group or self._channel.is_behind:
            return True
        return self._lease is not None and self._lease.is_alone

    def meet_new_front(self) -> None:
        """If there is another front, tell it where the instance stands."""
        front = None if self._lease is None else self._lease.front
        if front is not None and front != self._front:
            self.send_to_front()
            self._front = front
            self._awaits_group = True
            self._book.forget_all()
            self._channel.send(replace(self._agent.rejoin(self._ready), front=front))
            logger.info("a new front is there, told it where this instance stands")

    # What comes

    def wait(self, longest_s: float) -> Woken:
        """Sleep until mail comes; whose."""
        wait_s = min(longest_s, GATE_WAIT_S) if self._gate.is_waiting else longest_s
        found = self._poller.poll(int(wait_s * 1000.0))
        self._peers.awake()
        is_brief = len(found) == 1 and found[0][0] == self._peers.bell
        if is_brief and not (self._gate.is_waiting or self._agent.is_in_transition):
            return Woken.BY_STAGES
        return Woken.BY_ANY

    def read(self, now_s: float, *, has_slept: bool = False) -> None:
        """Give the agent all that has come."""
        agent, self.read_s = self._agent, now_s
        for message in self._channel.receive():
            match message:
                case Connect():
                    self._book.take(message)
                    continue
                case Prepare() | Migrate() | Rollback() | EndMigration() if not (
                    self._gate.passes(message, now_s)
                ):
                    continue
                case Form():
                    self._gate.clear()
                    self._words.clear()
                    self._awaits_group = False
                    self._peers.begin_anew()
            agent.on(message, now_s)
        if self._gate.is_waiting:
            self._turn_gate(now_s)
        self.read_peers(now_s)
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

    def read_peers(self, now_s: float, *, is_brief: bool = False) -> None:
        """Give the agent what peers have sent; ``is_brief``: of what is in rings."""
        for message, payload in self._peers.receive(is_brief=is_brief):
            self._agent.on(message, now_s, self._hidden_of(message, payload))
        for peer, reason, is_down in self._peers.faults():
            logger.error("link is broken peer=%d reason=%r", peer, reason)
            self._channel.send(LinkBroken(self._body.spec.instance_id, peer, reason, is_down))
        for peer in self._peers.late_contacts():
            self._channel.send(LateContact(self._body.spec.instance_id, peer))

    def _hidden_of(self, message: Message, payload: memoryview | None) -> Any:
        """What came beside a message, as the body wants it."""
        if payload is None or isinstance(message, HeadPart):
            return payload  # ``Body.sample`` takes parts of the output head as they come
        if isinstance(message, Sampled):
            self._body.ahead.tokens_come(payload, message.result.group_id, message.result.step_id)
            return None
        return self._body.hidden_from_bytes(payload)

    # What goes

    def send(self) -> None:
        """Send peers what the agent says; the front's part is kept for ``send_to_front``."""
        outbox = self._agent.outbox
        if not outbox:
            return
        for dst, message, hidden in outbox:
            if dst is None:
                self._to_front.append(message)
            else:
                payload = None
                if hidden is not None:
                    payload = self._body.hidden_to_bytes(hidden, self._peers.where(dst))
                elif isinstance(message, Sampled):
                    result = message.result
                    payload = self._words.pop((result.group_id, result.step_id), None)
                self._peers.send(dst, message, payload)
                if self._trace is not None and payload is not None and hidden is not None:
                    self._trace.sent(dst, message, payload.nbytes, time.monotonic())
        outbox.clear()
        for preemption in self._agent.drain_preemptions():
            logger.info(
                "preempted request=%s lost_tokens=%d",
                preemption.request_id,
                preemption.lost_tokens,
            )

    def pass_on(self, dst: InstanceId, message: Activation, word: memoryview) -> None:
        """Send a microbatch to the next stage before its hidden states are computed, with the word
        that tells where they will be. All that was said before goes first.
        """
        self.send()
        self._peers.send(dst, message, word)
        if self._trace is not None:
            self._trace.sent(dst, message, word.nbytes, time.monotonic())

    def keep_word(self, plan: StepPlan, word: memoryview | None) -> None:
        """It tells where the step's tokens are, and goes with them."""
        if word is not None:
            self._words[plan.group_id, plan.step_id] = word

    def send_to_front(self) -> None:
        """In the order in which the agent has said it."""
        for message in self._to_front:
            self._channel.send(message)
        self._to_front.clear()
