"""The simulated driver: real controller and real agents over simulated bodies, links and time."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kunserve.control.cluster.commands import (
    ControlCommand,
    Deliver,
    LogQuarantine,
    LogReason,
    LogTransition,
    Respawn,
    ScaleDown,
    ScaleUp,
    Send,
)
from kunserve.control.cluster.controller import Controller
from kunserve.control.group.load import SchedulerTotals
from kunserve.control.instance.agent import InstanceAgent, Work
from kunserve.control.instance.state import AgentConfig
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Connect, Message, Ready, TokenOutput
from kunserve.core.request import Request
from kunserve.core.snapshots import TransitionRecord
from kunserve.core.transfer import KvPull, LayerPull, PeerAddress
from kunserve.sim.body import SimBody
from kunserve.sim.events import EventHeap
from kunserve.sim.message_time import tokens_s
from kunserve.sim.mover import SimMover
from kunserve.sim.network import Network
from kunserve.sim.pipeline_time import PipelineTime
from kunserve.sim.profile import InstanceProfile

TICK_S = 0.1
"""Of the controller, as under the real driver."""
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """What the simulated world does beside computing."""

    start_s: float = 120.0
    """From the order for an instance to its readiness (a replacement, or a larger cluster)."""
    detect_s: float = 1.0
    """From an instance's death to the controller's knowledge of it."""
    link_priority: bool = True
    """Whether activations pass bulk transfers on the links."""


class Watcher(Protocol):
    """Told what happens, for figures and tests. All times are virtual."""

    def stepped(self, instance_id: InstanceId, work: Work, start_s: float, end_s: float) -> None:
        """An instance will compute from ``start_s`` to ``end_s``."""
        ...

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        """Anything that reaches an agent or the controller, in order."""
        ...


@dataclass(slots=True, eq=False)
class _Instance:
    """One simulated process."""

    instance_id: InstanceId
    agent: InstanceAgent
    body: SimBody
    mover: SimMover
    is_busy: bool = False
    """A step runs, or memory is being remapped: mail waits."""
    is_report_due: bool = False
    mail: deque[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=deque)
    is_dead: bool = False


class SimCluster:
    """Instances, links and the controller under one event heap."""

    def __init__(
        self,
        config: KunServeConfig,
        profile: InstanceProfile,
        heap: EventHeap,
        on_token: Callable[[TokenOutput], None],
        world: WorldConfig | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """Instances report for duty at once, as if started before."""
        self.controller = Controller(config)
        self.profile = profile
        self.world = WorldConfig() if world is None else world
        self.records: list[TransitionRecord] = []
        """Finished transitions."""
        self.scale_ups: list[tuple[float, str]] = []
        self.num_instances = 0
        """Ordered so far, the starting ones included: also the next one's id."""
        self.num_given_back = 0
        self.totals: list[SchedulerTotals] = []
        """Of every instance that ever was."""
        self.pipelines = PipelineTime()
        self._config = config
        self._heap = heap
        self._on_token = on_token
        self._watcher = watcher
        self._instances: dict[InstanceId, _Instance] = {}
        self._movers: dict[InstanceId, SimMover] = {}
        self._wires: dict[tuple[InstanceId, InstanceId], deque[_Letter]] = {}
        self._latency_s = profile.message_latency_s
        self.network = Network(
            heap, profile.network_bytes_per_s, self._latency_s, priority=self.world.link_priority
        )
        self._ordered_s: dict[InstanceId, float] = {}
        self._past_instance_s = 0.0
        self._num_computing = 0
        """Instances in the middle of a step, those included that died in it."""
        for _ in range(config.cluster.num_instances):
            self._order(0.0)
        heap.after(TICK_S, self._tick)

    # What a client does

    def submit(self, request: Request) -> None:
        """A request reaches the front."""
        self._note("submit", request)
        self.controller.arrive(request, self._on_token, self._heap.now_s())
        self._obey()

    def cancel(self, request_id: Any) -> None:
        """A client goes away."""
        self._note("cancel", request_id)
        self.controller.cancel(request_id)
        self._obey()

    def force_drop(self, num_bytes: int | None) -> int:
        """Drop by hand; the number of transitions begun."""
        begun = self.controller.force_drop(num_bytes, self._heap.now_s())
        self._obey()
        return len(begun)

    @property
    def instance_seconds(self) -> float:
        """Time that instances were held, from order to death, so far."""
        now_s = self._heap.now_s()
        held_s = sum(now_s - ordered_s for ordered_s in self._ordered_s.values())
        return self._past_instance_s + held_s

    @property
    def swapped_bytes(self) -> tuple[int, int]:
        """KV that went to host memory, and came back, on the instances that live."""
        bodies = [instance.body for instance in self._instances.values()]
        out_bytes = sum(body.swapped_out_bytes for body in bodies)
        return out_bytes, sum(body.swapped_back_bytes for body in bodies)

    def kill(self, instance_id: InstanceId) -> None:
        """An instance dies now; the controller learns of it later."""
        if instance_id in self._instances:
            self._remove(instance_id)
            self._heap.after(self.world.detect_s, self._lost, instance_id)

    # Instances

    def _remove(self, instance_id: InstanceId) -> None:
        instance = self._instances.pop(instance_id)
        instance.is_dead = True
        del self._movers[instance_id]
        self._past_instance_s += self._heap.now_s() - self._ordered_s.pop(instance_id)
        for ends in [ends for ends in self._wires if instance_id in ends]:
            del self._wires[ends]

    def _order(self, delay_s: float) -> None:
        instance_id = InstanceId(self.num_instances)
        self.num_instances += 1
        self._ordered_s[instance_id] = self._heap.now_s()
        self._heap.after(delay_s, self._start, instance_id)

    def _start(self, instance_id: InstanceId) -> None:
        profile, config = self.profile, self._config
        body = SimBody(profile, instance_id)

        def landed(what: KvPull | LayerPull, ok: bool) -> None:
            self._hand(instance, self._pulled, instance, what, ok)

        mover = SimMover(body.spec, self._heap, self.network, self._movers, self._latency_s, landed)
        agent = InstanceAgent(
            AgentConfig(instance_id, config.scheduler, frozenset(), profile.max_model_len),
            body,
            mover,
        )
        self.totals.append(agent.state.totals)
        instance = _Instance(instance_id, agent, body, mover)
        self._instances[instance_id] = instance
        self._movers[instance_id] = mover
        ready = Ready(
            body.spec,
            PeerAddress("simulated", "simulated"),
            profile.max_model_len,
            profile.model.name,
        )
        self._heap.after(self._latency_s, self._to_controller, instance_id, ready)
        period_s = config.cluster.report_period_s
        offset_s = period_s * (instance_id * _GOLDEN % 1.0)
        self._heap.after(offset_s, self._report_due, instance)

    def _lost(self, instance_id: InstanceId) -> None:
        self._note("lost", instance_id)
        self.controller.lost(instance_id, "killed", self._heap.now_s(), is_deliberate=True)
        self._obey()

    def _report_due(self, instance: _Instance) -> None:
        if instance.is_dead:
            return
        if not instance.is_busy:
            self._report(instance)
            self._pump(instance)
        elif instance.agent.state.is_running and self.profile.reads_during_steps:
            self._report(instance)
            if instance.agent.state.outbox:
                self._send(instance, 0.0)
        else:
            instance.is_report_due = True

    def _report(self, instance: _Instance) -> None:
        instance.is_report_due = False
        self._note("report", instance.instance_id)
        instance.agent.report(self._heap.now_s())
        self._heap.after(self._config.cluster.report_period_s, self._report_due, instance)

    def _hand(self, instance: _Instance, act: Callable[..., None], *args: Any) -> None:
        """Give an instance something to read: now if it idles, else when it looks up.

        In an exchange every body lets it look up between layers, which is at once here.
        """
        if instance.is_dead:
            return
        if not instance.is_busy:
            act(*args)
            self._pump(instance)
        elif instance.agent.state.is_running and (
            self.profile.reads_during_steps or instance.agent.is_exchanging
        ):
            act(*args)
            if instance.agent.state.outbox:
                self._send(instance, 0.0)
        else:
            instance.mail.append((act, args))

    def _pulled(self, instance: _Instance, what: KvPull | LayerPull, ok: bool) -> None:
        now_s = self._heap.now_s()
        self._note("pulled", instance.instance_id, what, ok)
        if isinstance(what, KvPull):
            instance.agent.pulled_kv(what, ok, now_s)
        else:
            instance.agent.pulled_layers(what.layers, what.src, ok, now_s)

    def _read(self, instance: _Instance, src: Any, message: Message, hidden: Any) -> None:
        self._note("read", src, instance.instance_id, message)
        instance.agent.on(message, self._heap.now_s(), hidden)

    # Steps

    def _pump(self, instance: _Instance) -> None:
        """Send what is to be sent, then begin a step if there is one."""
        agent = instance.agent
        blocked_s = instance.body.take_blocked_s()
        if agent.state.outbox:
            self._send(instance, blocked_s)
        if blocked_s > 0.0:
            instance.is_busy = True
            self._heap.after(blocked_s, self._look_up, instance)
            return
        if not agent.has_ready_work():
            return
        now_s = self._heap.now_s()
        self._note("start", instance.instance_id)
        work = agent.next_work(now_s)
        blocked_s = instance.body.take_blocked_s()
        if agent.state.outbox:
            self._send(instance, blocked_s)
        if work is None:
            if blocked_s > 0.0:
                instance.is_busy = True
                self._heap.after(blocked_s, self._look_up, instance)
            return
        instance.is_busy = True
        company = self._num_computing / max(1, len(self._instances) - 1)
        self._num_computing += 1
        end_s = now_s + blocked_s + instance.body.step_s(work.step, company)
        assert agent.membership is not None
        layout = agent.membership.layout
        if len(layout.stages) > 1:
            self.pipelines.begin(layout, now_s)
        if self._watcher is not None:
            self._watcher.stepped(instance.instance_id, work, now_s, end_s)
        self._heap.at(end_s, self._finish, instance, work, layout)

    def _finish(self, instance: _Instance, work: Work, layout: Any) -> None:
        now_s = self._heap.now_s()
        self._num_computing -= 1
        if len(layout.stages) > 1:
            self.pipelines.end(layout, now_s)
        if instance.is_dead:
            return
        self._note("finish", instance.instance_id)
        instance.agent.finished(work, instance.body.execute(work.step, work.hidden), now_s)
        self._look_up(instance)

    def _look_up(self, instance: _Instance) -> None:
        """The instance's thread is free: read what came meanwhile."""
        if instance.is_dead:
            return
        instance.is_busy = False
        while instance.mail:
            act, args = instance.mail.popleft()
            act(*args)
        if instance.is_report_due:
            self._report(instance)
        self._pump(instance)

    # Messages

    def _send(self, instance: _Instance, blocked_s: float) -> None:
        src = instance.instance_id
        for dst, message, hidden in instance.agent.drain():
            if dst is None:
                self._heap.after(blocked_s + self._latency_s, self._to_controller, src, message)
            elif dst in self._instances:
                wire = self._wires.setdefault((src, dst), deque())
                letter = _Letter(message, hidden)
                wire.append(letter)
                if hidden is None:
                    takes_s = blocked_s + self._latency_s + tokens_s(message, self.profile)
                    self._heap.after(takes_s, self._arrived, src, dst, letter)
                else:
                    self._send_hidden(src, dst, letter, blocked_s)
        if instance.agent.state.preemptions:
            for preemption in instance.agent.drain_preemptions():
                self._note("preempted", src, preemption)

    def _send_hidden(
        self, src: InstanceId, dst: InstanceId, letter: "_Letter", blocked_s: float
    ) -> None:
        def arrived() -> None:
            self._arrived(src, dst, letter)

        if blocked_s > 0.0:
            self._heap.after(
                blocked_s, self.network.send_activation, src, dst, letter.hidden, arrived
            )
        else:
            self.network.send_activation(src, dst, letter.hidden, arrived)

    def _arrived(self, src: InstanceId, dst: InstanceId, letter: "_Letter") -> None:
        """A letter is here; it is read after all that were sent before it on this wire."""
        letter.is_here = True
        wire = self._wires.get((src, dst))
        while wire and wire[0].is_here:
            first = wire.popleft()
            instance = self._instances.get(dst)
            if instance is not None:
                self._hand(instance, self._read, instance, src, first.message, first.hidden)

    def _to_controller(self, src: InstanceId, message: Any) -> None:
        self._note("event", src, message)
        self.controller.on(src, message, self._heap.now_s())
        self._obey()

    def _from_controller(self, dst: InstanceId, message: Message) -> None:
        instance = self._instances.get(dst)
        if instance is not None:
            self._hand(instance, self._read, instance, None, message, None)

    def _tick(self) -> None:
        self._note("tick")
        self.controller.tick(self._heap.now_s())
        self._obey()
        self._heap.after(TICK_S, self._tick)

    def _obey(self) -> None:
        behind_s: dict[InstanceId, float] = defaultdict(float)  # the tokens of those before it
        for command in self.controller.drain():
            if isinstance(command, Deliver):
                command.client(command.token)
            elif isinstance(command, Send):
                instance_id, message = command
                if not isinstance(message, Connect):  # a simulated instance needs no addresses
                    delay_s = self._latency_s + behind_s[instance_id]
                    behind_s[instance_id] += tokens_s(message, self.profile)
                    self._heap.after(delay_s, self._from_controller, instance_id, message)
            else:
                self._carry_out(command)
            if self._watcher is not None:
                self._watcher.happened("command", self._heap.now_s(), command)

    def _carry_out(self, command: ControlCommand) -> None:
        match command:
            case Respawn(instance_id):
                self._ordered_s[instance_id] = self._heap.now_s()
                self._heap.after(self.world.start_s, self._start, instance_id)
            case LogTransition(record):
                self.records.append(record)
            case ScaleUp(reason):
                self.scale_ups.append((self._heap.now_s(), reason))
                if self._config.cluster.max_instances is not None:
                    self._order(self.world.start_s)
            case ScaleDown(instance_id):
                self.num_given_back += 1
                self._remove(instance_id)
            case LogReason() | LogQuarantine():
                pass

    def _note(self, kind: str, *details: Any) -> None:
        if self._watcher is not None:
            self._watcher.happened(kind, self._heap.now_s(), *details)

    # Proof

    @property
    def instances(self) -> dict[InstanceId, InstanceAgent]:
        """The brain of every living instance."""
        return {i: instance.agent for i, instance in self._instances.items()}

    @property
    def is_moving(self) -> bool:
        """Whether KV or weights are on their way anywhere."""
        return any(not instance.mover.is_quiet for instance in self._instances.values())

    def check(self) -> None:
        """Every owner's invariants, and the tables' agreement with the bodies."""
        self.controller.check()
        for instance in self._instances.values():
            if not instance.is_busy:
                instance.agent.check()
            table = instance.agent.state.table
            assert table.num_units <= instance.body.kv_units, (table.num_units, instance.body)

    def check_empty(self) -> None:
        """When no request is alive: nothing is left of any."""
        self.check()
        for instance in self._instances.values():
            assert instance.agent.state.table.used_units == 0, instance.instance_id
            assert instance.mover.is_quiet, instance.instance_id
            assert not instance.body.swapped, instance.instance_id


@dataclass(slots=True, eq=False)
class _Letter:
    """A message on a wire between two instances."""

    message: Message
    hidden: Any
    is_here: bool = False
