"""One world: the real controller and the real instances' brains, over bodies without processes.

A ``World`` puts the cluster together, carries out what the controller commands, tells brains what
has happened to them, and lets instances end. *When* something happens is the order's: a subclass.

* ``world.by_choice.ChosenWorld``: the caller picks what happens next. The bodies are fake: they
  have real bytes of KV, and a wrong order shows in a token.
* ``sim.by_time.TimedWorld``: an event heap has a virtual clock. The bodies are simulated: they have
  costs, and no bytes.

An order says what time it is (``now_s``), makes instances (``make_member``), lets messages set out
(``post``), and sees to what takes time (``respawn``, ``grow``, ``hear_of_death``). When a thing is
due, it calls ``hear`` and ``tick`` for the controller, and ``tell``, ``begin_step``,
``end_step``, ``land``, ``end_pull`` and ``report`` for an instance. Nothing else reaches a brain.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from kunserve.control.cluster.commands import (
    Client,
    Condemn,
    ControlCommand,
    Deliver,
    LogTransition,
    Respawn,
    ScaleDown,
    ScaleUp,
    Send,
)
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.requests.quarantine import NOBODY, Blame, Cause
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.body import Body
from kunserve.control.instance.membership import cached_units
from kunserve.control.instance.state import AgentConfig
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Event, Message, Ready
from kunserve.core.plan import Plan
from kunserve.core.request import Request
from kunserve.core.snapshots import TransitionRecord
from kunserve.core.transfer import KvPull, PeerAddress
from kunserve_lab.world.mover import Pull, Pulled, WorldMover, num_bytes_of

Address: TypeAlias = InstanceId | None
"""None is the controller."""
NOWHERE = PeerAddress("nowhere", "nowhere")


class Watcher(Protocol):
    """Told what happens, for figures and tests. All times are virtual."""

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        """Something has reached a brain, or is commanded, in order; or a step begins."""
        ...


class WorldBody(Body, Protocol):
    """A body whose world asks it for more than a driver does."""

    kv_units: int
    """Backed by memory now."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of any request."""
        ...


class Member:
    """One living instance."""

    def __init__(self, agent: InstanceAgent, body: WorldBody, mover: WorldMover) -> None:
        self.instance_id: InstanceId = body.spec.instance_id
        self.agent = agent
        self.body = body
        self.mover = mover
        self.is_dead = False

    def check(self) -> None:
        """The brain's invariants, and its agreement with the body."""
        self.agent.check()
        num_units = self.agent.state.table.num_units
        assert num_units <= self.body.kv_units, (num_units, self.body.kv_units)


M = TypeVar("M", bound=Member)


class World(ABC, Generic[M]):
    """See the module."""

    def __init__(
        self,
        plan: Plan,
        num_instances: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        watcher: Watcher | None = None,
    ) -> None:
        """There is nobody yet; so many instances are expected."""
        self.controller = Controller(plan, num_places=num_instances)
        self.members: dict[InstanceId, M] = {}
        self.records: list[TransitionRecord] = []
        """Finished transitions."""
        self.given_back: list[InstanceId] = []
        self._condemned: list[InstanceId] = []
        self.num_preemptions = 0
        self._plan = plan
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._watcher = watcher

    # What an order says

    @property
    @abstractmethod
    def now_s(self) -> float:
        """Virtual time."""

    @abstractmethod
    def make_member(self, instance_id: InstanceId) -> M:
        """An instance that begins now."""

    @abstractmethod
    def post(self, src: Address, dst: Address, message: Message, hidden: Any = None) -> None:
        """A message sets out: ``hear`` or ``tell`` when it is read. It is lost if nobody is."""

    @abstractmethod
    def client_of(self, request: Request) -> Client:
        """Who waits for its tokens."""

    @abstractmethod
    def cut(self, instance_id: InstanceId, *, is_dead: bool) -> None:
        """The instance is no more: what may not arrive any longer is lost on its way.

        ``is_dead``: what it has sent may still come, as from a real process.
        """

    @abstractmethod
    def hear_of_death(self, instance_id: InstanceId, blame: Blame) -> None:
        """An instance is dead: ``lost`` when the controller may know."""

    @abstractmethod
    def respawn(self, instance_id: InstanceId) -> None:
        """The controller wants another instance in the place of a dead one."""

    @abstractmethod
    def grow(self) -> None:
        """The controller wants one more instance."""

    def drain(self) -> list[ControlCommand]:
        """What the controller commands now."""
        return self.controller.drain()

    def happened(self, kind: str, *details: Any) -> None:
        """Tell whoever watches."""
        if self._watcher is not None:
            self._watcher.happened(kind, self.now_s, *details)

    # Instances

    def make_agent(self, body: WorldBody, mover: WorldMover) -> InstanceAgent:
        """An instance's brain."""
        plan, ends, longest = self._plan, self._eos_token_ids, self._max_model_len
        instance_id = body.spec.instance_id
        config = AgentConfig(instance_id, plan.config.scheduler, plan.measured, ends, longest)
        return InstanceAgent(config, body, mover)

    def start_instance(self, instance_id: InstanceId) -> None:
        """Start an instance (again): it reports for duty."""
        assert instance_id not in self.members, instance_id
        member = self.members[instance_id] = self.make_member(instance_id)
        self.post(instance_id, None, self.ready(member))

    def ready(self, member: M) -> Ready:
        """What an instance says first."""
        return Ready(member.body.spec, NOWHERE, self._max_model_len, "of a world")

    def kill_instance(self, instance_id: InstanceId, blame: Blame = NOBODY) -> None:
        """An instance dies, if it lives; the controller learns of it."""
        if instance_id in self.members:
            self.members.pop(instance_id).is_dead = True
            self.cut(instance_id, is_dead=True)
            self.hear_of_death(instance_id, blame)

    def lost(self, instance_id: InstanceId, blame: Blame = NOBODY) -> None:
        """The controller learns that an instance is dead."""
        self.happened("lost", instance_id)
        self.controller.lost(instance_id, "killed", self.now_s, blame)
        self.carry_out()

    def give_back(self, instance_id: InstanceId) -> None:
        """The cluster does without the instance, if it is there still."""
        self.given_back.append(instance_id)
        if instance_id in self.members:
            self.members.pop(instance_id).is_dead = True
        self.cut(instance_id, is_dead=False)

    # What people do

    def submit(self, request: Request) -> None:
        """A client sends a request."""
        self.happened("submit", request)
        self.controller.arrive(request, self.client_of(request), self.now_s)
        self.carry_out()

    def cancel(self, request_id: RequestId) -> None:
        """A client goes away."""
        self.happened("cancel", request_id)
        self.controller.cancel(request_id)
        self.carry_out()

    def resize(self, num_instances: int) -> None:
        """An operator asks for so many instances."""
        self.controller.resize(num_instances)
        self.carry_out()

    # What happens to the controller

    def hear(self, src: InstanceId, message: Event) -> None:
        """An instance's message is here."""
        self.happened("event", src, message)
        self.controller.on(src, message, self.now_s)
        self.carry_out()

    def tick(self) -> None:
        """Its time has come to look around."""
        self.happened("tick")
        self.controller.tick(self.now_s)
        self.carry_out()

    def carry_out(self) -> None:
        """Carry out its commands."""
        for command in self.drain():
            if isinstance(command, Deliver):  # nearly all are one of these two
                command.client(command.token)
            elif isinstance(command, Send):
                self.post(None, command.instance_id, command.message)
            else:
                self._carry_out(command)
            self.happened("command", command)
        while self._condemned:  # their ends are heard of when all this has been said
            self.kill_instance(self._condemned.pop(0), Blame(Cause.OUTSIDE))

    def _carry_out(self, command: ControlCommand) -> None:
        match command:
            case Condemn(instance_id):
                self._condemned.append(instance_id)
            case Respawn(instance_id):
                self.respawn(instance_id)
            case LogTransition(record):
                self.records.append(record)
            case ScaleUp(_, is_wish) if not is_wish:
                self.grow()
            case ScaleDown(instance_id):
                self.give_back(instance_id)

    # What happens to an instance

    def tell(self, src: Address, member: M, message: Message, hidden: Any) -> None:
        """It reads a message."""
        self.happened("read", src, member.instance_id, message)
        member.agent.on(message, self.now_s, hidden)

    def begin_step(self, member: M) -> Work | None:
        """It looks for its next step."""
        self.happened("start", member.instance_id)
        return member.agent.next_work(self.now_s)

    def end_step(self, member: M, work: Work) -> None:
        """Its step has ended."""
        self.happened("finish", member.instance_id)
        member.agent.finished(work, work.run(member.body), self.now_s)

    def land(self, member: M, pull: Pull, *, fails: bool = False) -> bool:
        """Its pull is over; whether the bytes have come: ``end_pull`` tells the brain."""
        member.mover.pulls.remove(pull)
        source = None if pull.what.src is None else self.members.get(pull.what.src)
        ok = pull.what.src is None
        if source is not None:
            ok = not fails and source.mover.can_give(pull.what)
        if ok:
            self.fill(member, source, pull)
            member.mover.landed_bytes += num_bytes_of(pull.what, member.body.spec)
        return ok

    def fill(self, member: M, source: M | None, pull: Pull) -> None:
        """The bytes of a pull arrive, where bodies have any."""

    def end_pull(self, member: M, what: Pulled, ok: bool) -> None:
        """It learns how a pull ended."""
        self.happened("pulled", member.instance_id, what, ok)
        if isinstance(what, KvPull):
            member.agent.pulled_kv(what, ok, self.now_s)
        else:
            member.agent.pulled_layers(what.layers, what.src, ok, self.now_s)

    def report(self, member: M) -> None:
        """It says how much it has to do."""
        self.happened("report", member.instance_id)
        member.agent.report(self.now_s)

    def send_mail(self, member: M) -> None:
        """What it wants to send sets out."""
        for dst, message, hidden in member.agent.outbox:
            self.post(member.instance_id, dst, message, hidden)
        member.agent.outbox.clear()
        for preemption in member.agent.drain_preemptions():
            self.num_preemptions += 1
            self.happened("preempted", member.instance_id, preemption)

    # Proof

    def check(self) -> None:
        """Every owner's invariants."""
        self.controller.check()
        for member in self.members.values():
            member.check()

    def check_empty(self) -> None:
        """When idle with no request alive: nothing is left but what the prefix caches hold."""
        self.check()
        cached = cached_units(member.agent.membership for member in self.members.values())
        for instance_id, member in self.members.items():
            assert not member.agent.is_in_transition, instance_id
            used_units = member.agent.state.table.used_units
            assert used_units == cached.get(instance_id, 0), (instance_id, used_units)
            assert member.mover.is_quiet and member.body.is_empty, instance_id
