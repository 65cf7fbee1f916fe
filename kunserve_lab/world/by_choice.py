"""A world without threads or real time: the caller picks what happens next.

Every link between two parts is a queue of bytes, steps have a beginning and an end, and bulk pulls
are under way until they are completed, so that a test can choose any interleaving that processes
and networks could produce (``actions``), or let the cluster run by itself (``run_until_idle``).
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from kunserve.control.cluster.commands import Client
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.requests.quarantine import Blame
from kunserve.control.instance.body import StepOutcome, StepWork
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import (
    Activation,
    Connect,
    Event,
    Form,
    LinkBroken,
    Message,
    Ready,
    Rejoin,
    Sampled,
    Submit,
)
from kunserve.core.plan import Plan
from kunserve.core.request import Request
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.transfer import KvPull
from kunserve.transport.wire.codec import decode, encode
from kunserve.transport.wire.numbering import Incoming, Outgoing
from kunserve_lab.world.account import Account
from kunserve_lab.world.actions import (
    Action,
    CompletePull,
    Delivery,
    FinishStep,
    Letter,
    MapMore,
    RunAhead,
    StartStep,
)
from kunserve_lab.world.fake_body import Board, FakeBody, FakeModel
from kunserve_lab.world.mover import Pull, WorldMover
from kunserve_lab.world.world import Address, Member, Watcher, World

IDLE_S = 0.6
"""Virtual time that passes when nothing else can happen."""
MAX_IDLE_ROUNDS = 20
"""Idle rounds in a row after which unfinished requests mean that the cluster hangs."""


class ChosenMember(Member):
    """A living instance, and how it numbers what it says to others."""

    body: FakeBody

    def __init__(self, world: "ChosenWorld", body: FakeBody, process: bytes) -> None:
        """``process`` tells the instance's processes apart, one after the other."""
        mover = WorldMover(world.pull_began)
        super().__init__(world.make_agent(body, mover), body, mover)
        self.work: Work | None = None
        """The step that runs."""
        self.ahead: Work | None = None
        """The step behind it, whose inputs are what it samples."""
        self.was_asked = False
        """Whether there can be one, since tokens came last."""
        self.process = process
        self.known: set[InstanceId] = set()
        """Peers that it has been told of: it sends to no others, and lets no others in."""
        self.outgoing = Outgoing()
        self.incoming = Incoming()


class ChosenWorld(World[ChosenMember]):
    """See the module."""

    now_s = 0.0
    step_s = 0.001
    """Virtual time that one action takes."""
    runs_ahead = False
    """Whether steps begin behind those that run, as on devices."""
    num_late_steps = 0
    """Of instances that are made from now on, see ``FakeBody``."""

    def __init__(
        self,
        model: FakeModel,
        specs: Sequence[InstanceSpec],
        plan: Plan,
        max_model_len: int,
        watcher: Watcher | None = None,
    ) -> None:
        """Instances are started at once; deliver their mail to have them form groups."""
        super().__init__(plan, len(specs), max_model_len, model.eos_token_ids, watcher)
        self.accounts: dict[RequestId, Account] = {}
        self.num_ordered = 0
        """Instances that the controller wants more, and that nobody has started."""
        self.dead: list[InstanceId] = []
        """Instances to be started again, as the controller wished."""
        self.num_fronts = 0
        self.late: set[InstanceId] = set()
        """Instances that do not know of the present front yet."""
        self._num_processes = 0
        self._model = model
        self._board: Board = {}
        self._specs = {spec.instance_id: spec for spec in specs}
        self.links: dict[tuple[Address, Address], deque[Letter]] = {}
        """Letters on their way, by sender and addressee, in order."""
        for spec in specs:
            self.start_instance(spec.instance_id)

    # Instances

    def make_member(self, instance_id: InstanceId) -> ChosenMember:
        """With real bytes of KV."""
        if instance_id in self.dead:
            self.dead.remove(instance_id)
        self._num_processes += 1
        body = FakeBody(self._specs[instance_id], self._model)
        body.num_late_steps = self.num_late_steps
        body.board = self._board
        return ChosenMember(self, body, b"%d" % self._num_processes)

    def start_ordered(self, instance_id: InstanceId) -> None:
        """An instance by which the cluster grows has loaded."""
        self.num_ordered -= 1
        self.start_instance(instance_id)

    def respawn(self, instance_id: InstanceId) -> None:
        """Whoever chooses starts it."""
        self.dead.append(instance_id)

    def grow(self) -> None:
        """Whoever chooses starts one more."""
        self.num_ordered += 1

    def give_back(self, instance_id: InstanceId) -> None:
        """The cluster does without the instance; what it says still is heard by nobody."""
        if instance_id in self.dead:
            self.dead.remove(instance_id)
        super().give_back(instance_id)

    def cut(self, instance_id: InstanceId, *, is_dead: bool) -> None:
        """Mail that a dead one has sent may still arrive."""
        for link in list(self.links):
            if link[1] == instance_id or (instance_id in link and not is_dead):
                del self.links[link]

    def hear_of_death(self, instance_id: InstanceId, blame: Blame) -> None:
        """What it told the controller came before the connection broke."""
        while self.links.get((instance_id, None)):
            self.perform(Delivery(instance_id, None))
        if instance_id in self.late:  # this front knows of its process only
            self.late.remove(instance_id)
            self.respawn(instance_id)
        self.lost(instance_id, blame)

    def restart_front(
        self,
        *,
        loses_mail: bool = False,
        keeps_mail: bool = False,
        late: Collection[InstanceId] = (),
    ) -> None:
        """The front dies and a new one comes: requests are gone, instances keep their weights.

        Mail that was on its way to the old front reaches the new one, as over real sockets; the
        old front's own mail arrives before instances know of the new one, behind that
        (``keeps_mail``), or never (``loses_mail``). Those that are ``late`` learn of the new front
        when ``meet_front`` is called.
        """
        self.num_fronts += 1
        num_places = len(self.members) + len(self.dead) + self.num_ordered
        self.controller = Controller(self._plan, self.num_fronts * 1000, num_places)
        for request_id in self.unfinished:
            self.accounts[request_id].is_cancelled = True
        for src, dst in list(self.links):
            if src is not None or keeps_mail:
                continue
            while not loses_mail and self.links[src, dst]:
                self.perform(Delivery(src, dst))
            self.links.pop((src, dst), None)
        self.late = self.members.keys() & set(late)
        events = []
        for instance_id, member in sorted(self.members.items()):
            letters = self.links.get((instance_id, None), deque())
            # A driver takes no word for the first one of an instance that was there before.
            for letter in [x for x in letters if isinstance(decode(x.data), Ready)]:
                letters.remove(letter)
            if instance_id not in self.late:
                events.append(self._rejoin(member))
        self.controller.rejoin(events, self.now_s)
        self.carry_out()

    def meet_front(self, instance_id: InstanceId) -> None:
        """One that was late says where it stands."""
        self.late.discard(instance_id)
        self.post(instance_id, None, self._rejoin(self.members[instance_id]))

    def _rejoin(self, member: ChosenMember) -> Rejoin:
        member.known.clear()
        return member.agent.rejoin(self.ready(member))

    # Requests

    def client_of(self, request: Request) -> Client:
        """One that writes down what it gets."""
        account = self.accounts[request.request_id] = Account(request)
        return account.take

    def cancel(self, request_id: RequestId) -> None:
        """A client goes away."""
        self.accounts[request_id].is_cancelled = True
        super().cancel(request_id)

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
                if self.runs_ahead and member.ahead is None and not member.was_asked:
                    found.append(RunAhead(instance_id))
                if self._has_tokens(member.work) or member.agent.forming.is_asked:
                    found.append(FinishStep(instance_id))
            elif member.agent.has_ready_work():
                found.append(StartStep(instance_id))
            if member.agent.is_preparing:
                found.append(MapMore(instance_id))
            found.extend(
                CompletePull(instance_id, i)
                for i, pull in enumerate(member.mover.pulls)
                if pull.what.src not in member.known or self._lets_in(pull.what.src, instance_id)
            )
        return found

    def _lets_in(self, dst: Address, src: Address) -> bool:
        """Whether an instance hears the other, if it hears at all: until then the words wait."""
        if src is None or dst is None or dst not in self.members:
            return True
        return src in self.members[dst].known

    def perform(self, action: Action) -> None:
        """Let it happen."""
        self.now_s += self.step_s
        match action:
            case Delivery(src, dst):
                self._deliver(src, dst, self.links[src, dst].popleft())
            case StartStep(instance_id):
                member = self.members[instance_id]
                assert member.work is None, instance_id
                member.work, member.was_asked = self.begin_step(member), False
            case RunAhead(instance_id):
                member = self.members[instance_id]
                member.ahead = member.agent.next_ahead(self.now_s, member.body)
                member.was_asked = True
            case FinishStep(instance_id):
                member = self.members[instance_id]
                work, member.work, member.ahead = member.work, member.ahead, None
                member.was_asked = False
                assert work is not None
                if self._has_tokens(work):
                    self.end_step(member, work)
                else:  # and they never will be there
                    void = StepOutcome(None, (), is_told=True)
                    member.agent.finished(work, void, self.now_s)
            case MapMore(instance_id):
                self.members[instance_id].agent.prepare(self.now_s)
            case CompletePull(instance_id, index, fails):
                member = self.members[instance_id]
                pull = member.mover.pulls[index]
                is_known = pull.what.src in member.known
                ok = self.land(member, pull, fails=fails or not is_known)
                self.end_pull(member, pull.what, ok)
        self.collect_mail()

    def _has_tokens(self, work: Work) -> bool:
        """Whether those are sampled that the step feeds on, if it feeds on any."""
        step = work.step
        if not isinstance(step, StepWork) or not step.awaits_tokens:
            return True
        assert step.feeds_on is not None, step
        return (step.plan.group_id, step.feeds_on) in self._board

    def pull_began(self, pull: Pull) -> None:
        """A pull sets out."""
        pull.asked_s = self.now_s

    def fill(self, member: ChosenMember, source: ChosenMember | None, pull: Pull) -> None:
        """Byte by byte."""
        if isinstance(pull.what, KvPull):
            assert source is not None and pull.entries is not None
            given = source.mover.given(pull.what)
            member.body.fill_kv(pull.what.layers, pull.entries, source.body, given)
        else:
            member.body.fill_layers(pull.what.layers, None if source is None else source.body)

    def pass_time(self, seconds: float) -> None:
        """Let time pass: load reports and the controller's tick."""
        self.now_s += seconds
        for member in self.members.values():
            self.report(member)
        self.collect_mail()
        self.compare_counts()
        self.tick()

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

    # Links

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

    def check(self) -> None:
        """Every owner's invariants, and what two of them count alike."""
        super().check()
        for instance_id, member in self.members.items():
            has_formed = member.agent.layout is not None or member.agent.is_in_transition
            # Of one that is late the front knows nothing until it has heard of it.
            is_known = self.controller.placement.with_member(instance_id) is not None
            if is_known and has_formed and not self.links.get((None, instance_id)):
                sent = self.controller.placement.num_sent[instance_id]
                waiting = [m for m in member.agent.inbox.waiting if isinstance(m, Submit)]
                received = member.agent.num_read + sum(m.group_id is None for m in waiting)
                assert sent == received, (instance_id, sent, received)

    def _deliver(self, src: Address, dst: Address, letter: Letter) -> None:
        message = decode(letter.data)
        if dst is None:
            assert src is not None and isinstance(message, Event), message
            self.hear(src, message)
            return
        member = self.members[dst]
        if src is not None and letter.stamp is not None:
            fault = member.incoming.take(letter.process, letter.stamp)
            if fault:
                self.post(dst, None, LinkBroken(dst, src, fault))
            if fault is not None:
                return
        if isinstance(message, Connect):
            self.connect(dst, message)
            return
        if isinstance(message, Form):
            member.outgoing.begin_anew()
        if isinstance(message, Sampled | Activation):
            member.was_asked = False
        hidden = None if letter.hidden is None else FakeBody.hidden_from_bytes(letter.hidden)
        self.tell(src, member, message, hidden)
        if member.agent.is_stopping:
            self.kill_instance(dst)

    def connect(self, dst: InstanceId, message: Connect) -> None:
        """An instance is told of peers."""
        member = self.members[dst]
        for peer in message.gone:
            member.known.discard(peer)
            member.outgoing.begin_anew(peer)
            for link in ((dst, peer), (peer, dst)):
                self.links.pop(link, None)
        member.known.update(peer for peer, _ in message.peers)

    def collect_mail(self) -> None:
        """Put what brains want to send on the links."""
        for member in self.members.values():
            self.send_mail(member)
