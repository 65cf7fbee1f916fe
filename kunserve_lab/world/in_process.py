"""A whole cluster in one process, without threads or real time: the caller picks what happens next.

The real controller and real agents over fake bodies. Every link between two of them is a queue,
steps have a beginning and an end, and bulk pulls are under way until they are completed, so that
a test can choose any interleaving that processes and networks could produce (``actions``), or
let the cluster run by itself (``run_until_idle``).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kunserve.control.cluster.commands import (
    Deliver,
    LogObserved,
    LogQuarantine,
    LogReason,
    LogTransition,
    Respawn,
    ScaleDown,
    ScaleUp,
    Send,
)
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.requests.quarantine import NOBODY, Blame
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.membership import cached_units
from kunserve.control.instance.state import AgentConfig
from kunserve.control.instance.work import Work
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import (
    Connect,
    Event,
    Form,
    LinkBroken,
    Message,
    Ready,
)
from kunserve.core.request import Request
from kunserve.core.snapshots import InstanceSpec, TransitionRecord
from kunserve.core.transfer import LayerLoad, LayerPull, PeerAddress
from kunserve.transport.wire.codec import decode, encode
from kunserve.transport.wire.numbering import Incoming, Outgoing
from kunserve_lab.world.account import Account
from kunserve_lab.world.actions import (
    Action,
    Address,
    CompletePull,
    Delivery,
    FinishStep,
    Letter,
    StartStep,
    TellMore,
)
from kunserve_lab.world.fake_body import FakeBody, FakeModel
from kunserve_lab.world.mover import InProcessMover

NOWHERE = PeerAddress("in-process", "in-process")
STEP_S = 0.001
"""Virtual time that one action takes."""
IDLE_S = 0.6
"""Virtual time that passes when nothing else can happen."""
MAX_IDLE_ROUNDS = 20
"""Idle rounds in a row after which unfinished requests mean that the cluster hangs."""


@dataclass(slots=True)
class Member:
    """One living instance."""

    agent: InstanceAgent
    body: FakeBody
    mover: InProcessMover
    work: Work | None = None
    """The step that runs."""
    process: bytes = b""
    """Tells the instance's processes apart, one after the other."""
    known: set[InstanceId] = field(default_factory=set)
    """Peers that it has been told of: it sends to no others, and lets no others in."""
    outgoing: Outgoing = field(default_factory=Outgoing)
    incoming: Incoming = field(default_factory=Incoming)


class InProcessCluster:
    """See the module."""

    def __init__(
        self,
        model: FakeModel,
        specs: Sequence[InstanceSpec],
        config: KunServeConfig,
        max_model_len: int,
    ) -> None:
        """Instances are started at once; deliver their mail to have them form groups."""
        self.now_s = 0.0
        self.controller = Controller(config, 0, len(specs))
        self.members: dict[InstanceId, Member] = {}
        self.accounts: dict[RequestId, Account] = {}
        self.records: list[TransitionRecord] = []
        """Finished transitions."""
        self.scale_ups: list[str] = []
        self.num_ordered = 0
        """Instances that the controller wants more, and that nobody has started."""
        self.given_back: list[InstanceId] = []
        self.dead: list[InstanceId] = []
        """Instances to be started again, as the controller wished."""
        self.num_preemptions = 0
        self.num_fronts = 0
        self._num_processes = 0
        self._model = model
        self._config = config
        self._max_model_len = max_model_len
        self._specs = {spec.instance_id: spec for spec in specs}
        self.links: dict[tuple[Address, Address], deque[Letter]] = {}
        """Letters on their way, by sender and addressee, in order."""
        for spec in specs:
            self.start_instance(spec.instance_id)

    # Instances

    def start_instance(self, instance_id: InstanceId) -> None:
        """Start an instance (again): it reports for duty."""
        assert instance_id not in self.members, instance_id
        if instance_id in self.dead:
            self.dead.remove(instance_id)
        spec = self._specs[instance_id]
        body, mover = FakeBody(spec, self._model), InProcessMover()
        config = AgentConfig(
            instance_id, self._config.scheduler, self._model.eos_token_ids, self._max_model_len
        )
        self._num_processes += 1
        self.members[instance_id] = Member(
            InstanceAgent(config, body, mover),
            body,
            mover,
            process=b"%d" % self._num_processes,
        )
        self.post(instance_id, None, Ready(spec, NOWHERE, self._max_model_len, "fake"))

    def start_ordered(self, instance_id: InstanceId) -> None:
        """An instance by which the cluster grows has loaded."""
        self.num_ordered -= 1
        self.start_instance(instance_id)

    def _give_back(self, instance_id: InstanceId) -> None:
        """The cluster does without the instance; what it says still is heard by nobody."""
        self.given_back.append(instance_id)
        if instance_id in self.dead:
            self.dead.remove(instance_id)
        self.members.pop(instance_id, None)
        for link in [link for link in self.links if instance_id in link]:
            del self.links[link]

    def resize(self, num_instances: int) -> None:
        """An operator asks for so many instances."""
        self.controller.resize(num_instances)
        self.carry_out()

    def kill_instance(self, instance_id: InstanceId, blame: Blame = NOBODY) -> None:
        """An instance dies; mail that it has sent may still arrive."""
        del self.members[instance_id]
        for src, dst in list(self.links):
            if dst == instance_id:
                del self.links[src, dst]
        # What it told the controller came before the connection broke.
        while self.links.get((instance_id, None)):
            self.perform(Delivery(instance_id, None))
        self.controller.lost(instance_id, "killed", self.now_s, blame)
        self.carry_out()

    def restart_front(self, *, loses_mail: bool = False) -> None:
        """The front dies and a new one comes: requests are gone, instances keep their weights.

        Mail that was on its way to the old front reaches the new one, as over real sockets; the
        old front's own mail arrives, or is lost.
        """
        self.num_fronts += 1
        num_places = len(self.members) + len(self.dead) + self.num_ordered
        self.controller = Controller(self._config, self.num_fronts * 1000, num_places)
        for request_id in self.unfinished:
            self.accounts[request_id].is_cancelled = True
        for src, dst in list(self.links):
            while src is None and not loses_mail and self.links[src, dst]:
                self.perform(Delivery(src, dst))
            if src is None:
                self.links.pop((src, dst), None)
        events = []
        for instance_id, member in sorted(self.members.items()):
            ready = Ready(self._specs[instance_id], NOWHERE, self._max_model_len, "fake")
            member.known.clear()
            events.append(member.agent.rejoin(ready))
            letters = self.links.get((instance_id, None), deque())
            # A driver takes no word for the first one of an instance that was there before.
            for letter in [x for x in letters if isinstance(decode(x.data), Ready)]:
                letters.remove(letter)
        self.controller.rejoin(events, self.now_s)
        self.carry_out()

    # Requests

    def submit(self, request: Request) -> None:
        """A client sends a request."""
        account = self.accounts[request.request_id] = Account(request)
        self.controller.arrive(request, account.take, self.now_s)
        self.carry_out()

    def cancel(self, request_id: RequestId) -> None:
        """A client goes away."""
        self.accounts[request_id].is_cancelled = True
        self.controller.cancel(request_id)
        self.carry_out()

    @property
    def unfinished(self) -> list[RequestId]:
        """Requests that have not ended."""
        return [
            request_id
            for request_id, account in self.accounts.items()
            if account.end is None and not account.is_cancelled
        ]

    # What can happen

    def actions(self) -> list[Action]:
        """Everything that may happen next, in a fixed order."""
        found: list[Action] = [
            Delivery(src, dst)
            for (src, dst), letters in self.links.items()
            if letters and self._lets_in(dst, src)
        ]
        for instance_id, member in self.members.items():
            if member.work is not None:
                found.append(FinishStep(instance_id))
            elif member.agent.has_ready_work():
                found.append(StartStep(instance_id))
            found.extend(
                CompletePull(instance_id, i)
                for i, pull in enumerate(member.mover.pulls)
                if pull.what.src not in member.known or self._lets_in(pull.what.src, instance_id)
            )
        if self.controller.has_more_to_tell:
            found.append(TellMore())
        return found

    def _lets_in(self, dst: Address, src: Address) -> bool:
        """Whether an instance hears the other, if it hears at all: until then the words wait."""
        if src is None or dst is None or dst not in self.members:
            return True
        return src in self.members[dst].known

    def perform(self, action: Action) -> None:
        """Let it happen."""
        self.now_s += STEP_S
        match action:
            case Delivery(src, dst):
                letter = self.links[src, dst].popleft()
                self._deliver(src, dst, letter)
            case StartStep(instance_id):
                member = self.members[instance_id]
                assert member.work is None, instance_id
                member.work = member.agent.next_work(self.now_s)
            case FinishStep(instance_id):
                self._finish_step(self.members[instance_id])
            case CompletePull(instance_id, index, fails):
                self._complete_pull(self.members[instance_id], index, fails)
            case TellMore():
                self.controller.tell_more(self.now_s)
                self.carry_out()
        self.collect_mail()

    def pass_time(self, seconds: float) -> None:
        """Let time pass: load reports and the controller's tick."""
        self.now_s += seconds
        for member in self.members.values():
            member.agent.report(self.now_s)
        self.collect_mail()
        self.compare_counts()
        self.controller.tick(self.now_s)
        self.carry_out()

    def run_until_idle(self, max_actions: int = 200_000) -> None:
        """Let everything happen, in turns, until all requests and transitions have ended."""
        idle_rounds = 0
        progress = self._progress()
        for _ in range(max_actions):
            found = self.actions()
            for action in found:
                if action in self.actions():
                    self.perform(action)
            if found:
                continue
            if not self.unfinished and not self.controller.transitions.active:
                return
            idle_rounds = idle_rounds + 1 if progress == self._progress() else 0
            progress = self._progress()
            assert idle_rounds < MAX_IDLE_ROUNDS, f"hangs: {self.unfinished}"
            self.pass_time(IDLE_S)
        raise AssertionError("no end in sight")

    def _progress(self) -> tuple[int, int, int]:
        tokens = sum(len(account.token_ids) for account in self.accounts.values())
        return tokens, len(self.unfinished), len(self.records)

    # Mechanics

    def _finish_step(self, member: Member) -> None:
        work, member.work = member.work, None
        assert work is not None
        member.agent.finished(work, work.run(member.body), self.now_s)

    def _complete_pull(self, member: Member, index: int, fails: bool) -> None:
        what, entries = member.mover.pulls.pop(index)
        if isinstance(what, LayerLoad):
            member.body.load_layers(what.layers)
            member.agent.pulled_layers(what.layers, None, True, self.now_s)
            return
        is_known = what.src in member.known and not fails
        source = self.members.get(what.src) if is_known else None
        if isinstance(what, LayerPull):
            ok = source is not None and source.mover.copy_layers(what, source.body, member.body)
            member.agent.pulled_layers(what.layers, what.src, ok, self.now_s)
            return
        assert entries is not None
        ok = source is not None and source.mover.copy_kv(what, source.body, member.body, entries)
        member.agent.pulled_kv(what, ok, self.now_s)

    def post(self, src: Address, dst: Address, message: Message, hidden: Any = None) -> None:
        """Put a message on a link (lost when nobody is at its end)."""
        if dst is not None and dst not in self.members:
            return
        data = None if hidden is None else bytes(FakeBody.hidden_to_bytes(hidden))
        letter = Letter(bytes(encode(message)), data)
        if src is not None and dst is not None:
            sender = self.members[src]
            if dst not in sender.known:
                return
            letter = letter._replace(process=sender.process, stamp=sender.outgoing.next(dst))
        self.links.setdefault((src, dst), deque()).append(letter)

    def lose(self, src: InstanceId, dst: InstanceId) -> None:
        """The first message of a link between two instances is lost on its way."""
        self.links[src, dst].popleft()

    def double(self, src: InstanceId, dst: InstanceId) -> None:
        """The first message of a link between two instances will come twice."""
        letters = self.links[src, dst]
        letters.insert(1, letters[0])

    def compare_counts(self) -> None:
        """Senders tell how much they have sent; where nothing is on its way, all must be there."""
        for src, sender in self.members.items():
            for dst, receiver in self.members.items():
                count = sender.outgoing.count(dst)
                if count is None or self.links.get((src, dst)) or src not in receiver.known:
                    continue
                fault = receiver.incoming.compare(sender.process, count)
                if fault:
                    self.post(dst, None, LinkBroken(dst, src, fault))

    def _deliver(self, src: Address, dst: Address, letter: Letter) -> None:
        message = decode(letter.data)
        if src is not None and dst is not None and letter.stamp is not None:
            fault = self.members[dst].incoming.take(letter.process, letter.stamp)
            if fault:
                self.post(dst, None, LinkBroken(dst, src, fault))
            if fault is not None:
                return
        if dst is None:
            assert src is not None
            self._to_controller(src, message)
        elif isinstance(message, Connect):
            self.connect(dst, message)
        else:
            if isinstance(message, Form):
                self.members[dst].outgoing.begin_anew()
            hidden = None if letter.hidden is None else FakeBody.hidden_from_bytes(letter.hidden)
            self.members[dst].agent.on(message, self.now_s, hidden)

    def connect(self, dst: InstanceId, message: Connect) -> None:
        """An instance is told of peers."""
        member = self.members[dst]
        for peer in message.gone:
            member.known.discard(peer)
            member.outgoing.begin_anew(peer)
            for link in ((dst, peer), (peer, dst)):
                self.links.pop(link, None)
        member.known.update(peer for peer, _ in message.peers)

    def _to_controller(self, src: InstanceId, message: Message) -> None:
        assert isinstance(message, Event), message
        self.controller.on(src, message, self.now_s)
        self.carry_out()

    def collect_mail(self) -> None:
        """Put what agents want to send on the links."""
        for instance_id, member in self.members.items():
            for dst, message, hidden in member.agent.drain():
                self.post(instance_id, dst, message, hidden)
            self.num_preemptions += len(member.agent.drain_preemptions())

    def carry_out(self) -> None:
        """Carry out the controller's commands."""
        for command in self.controller.drain():
            match command:
                case Send(instance_id, message):
                    self.post(None, instance_id, message)
                case Deliver(token, client):
                    client(token)
                case Respawn(instance_id):
                    self.dead.append(instance_id)
                case LogTransition(record):
                    self.records.append(record)
                case ScaleUp(reason, is_wish):
                    self.scale_ups.append(reason)
                    self.num_ordered += not is_wish
                case ScaleDown(instance_id):
                    self._give_back(instance_id)
                case LogReason() | LogObserved() | LogQuarantine():
                    pass

    # Proof

    def check(self) -> None:
        """Every owner's invariants."""
        self.controller.check()
        for member in self.members.values():
            member.agent.check()
            table = member.agent.state.table
            assert table.num_units <= member.body.kv_units, (table.num_units, member.body.kv_units)

    def check_empty(self) -> None:
        """When idle with no request alive: nothing is left but what the prefix caches hold."""
        self.check()
        cached = cached_units(member.agent.membership for member in self.members.values())
        for instance_id, member in self.members.items():
            assert not member.agent.is_in_transition, instance_id
            used_units = member.agent.state.table.used_units
            assert used_units == cached.get(instance_id, 0), (instance_id, used_units)
            assert not member.body.known_requests, (instance_id, member.body.known_requests)
            assert member.body.host.num_bytes == 0, instance_id
            assert not member.mover.exports and not member.mover.pulls, instance_id
