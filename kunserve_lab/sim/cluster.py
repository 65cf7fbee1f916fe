"""The simulated driver: real controller and real agents over simulated bodies, links and time."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kunserve.control.cluster.commands import (
    ControlCommand,
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
from kunserve.control.cluster.requests.quarantine import NOBODY
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.membership import cached_units
from kunserve.control.instance.state import AgentConfig
from kunserve.control.instance.work import Work
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Connect, Message, Ready, TokenOutput
from kunserve.core.place import ONE_HOST, Place
from kunserve.core.request import Request
from kunserve.core.snapshots import StageTime, TransitionRecord
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull, PeerAddress
from kunserve_lab.sim.accounts import ClusterAccounts
from kunserve_lab.sim.body import SimBody
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.instance import SimInstance
from kunserve_lab.sim.message_time import tokens_s
from kunserve_lab.sim.mover import SimMover
from kunserve_lab.sim.network import Network
from kunserve_lab.sim.profile import InstanceProfile

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
    places: tuple[Place, ...] = ()
    """Where each instance stands; all on one host when empty, as do those beyond."""

    def place_of(self, instance_id: InstanceId) -> Place:
        """Of one instance."""
        return self.places[instance_id] if instance_id < len(self.places) else ONE_HOST


class Watcher(Protocol):
    """Told what happens, for figures and tests. All times are virtual."""

    def stepped(self, instance_id: InstanceId, work: Work, start_s: float, end_s: float) -> None:
        """An instance will compute from ``start_s`` to ``end_s``."""
        ...

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        """Anything that reaches an agent or the controller, in order."""
        ...


@dataclass(slots=True, eq=False)
class _WireMessage:
    """A message between two instances."""

    message: Message
    hidden: Any
    is_here: bool = False


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
        self.accounts = ClusterAccounts()
        self.num_instances = 0
        """Ordered so far, the starting ones included: also the next one's id."""
        self._config = config
        self._heap = heap
        self._on_token = on_token
        self._watcher = watcher
        self._instances: dict[InstanceId, SimInstance] = {}
        self._movers: dict[InstanceId, SimMover] = {}
        self._wires: dict[tuple[InstanceId, InstanceId], deque[_WireMessage]] = {}
        self._latency_s = profile.message_latency_s
        self.network = Network(
            heap,
            profile.network_bytes_per_s,
            self._latency_s,
            priority=self.world.link_priority,
            place_of=self.world.place_of if self.world.places else None,
        )
        self._num_computing = 0
        """Instances in the middle of a step, those included that died in it."""
        for _ in range(config.cluster.num_instances):
            self._order(0.0)
        heap.after(TICK_S, self._tick)

    # What a client does

    def submit(self, request: Request) -> None:
        """A request reaches the front."""
        self.note("submit", request)
        self.controller.arrive(request, self._on_token, self._heap.now_s())
        self._carry_out_all()

    def cancel(self, request_id: Any) -> None:
        """A client goes away."""
        self.note("cancel", request_id)
        self.controller.cancel(request_id)
        self._carry_out_all()

    def force_drop(self, num_bytes: int | None) -> int:
        """Drop by hand; the number of transitions begun."""
        begun = self.controller.force_drop(num_bytes, self._heap.now_s())
        self._carry_out_all()
        return len(begun)

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
        self.accounts.note_end(instance_id, self._heap.now_s())
        for ends in [ends for ends in self._wires if instance_id in ends]:
            del self._wires[ends]

    def _order(self, delay_s: float) -> None:
        instance_id = InstanceId(self.num_instances)
        self.num_instances += 1
        self.accounts.note_order(instance_id, self._heap.now_s())
        self._heap.after(delay_s, self._start, instance_id)

    def _start(self, instance_id: InstanceId) -> None:
        profile, config = self.profile, self._config
        body = SimBody(profile, instance_id, self.world.place_of(instance_id))

        def landed(what: KvPull | LayerPull | LayerLoad, ok: bool) -> None:
            instance.pulled(what, ok)

        mover = SimMover(
            body.spec,
            self._heap,
            self.network,
            self._movers,
            self._latency_s,
            profile.host_bytes_per_s,
            landed,
        )
        agent = InstanceAgent(
            AgentConfig(instance_id, config.scheduler, frozenset(), profile.max_model_len),
            body,
            mover,
        )
        self.accounts.totals.append(agent.totals)
        instance = SimInstance(
            agent,
            body,
            mover,
            self._heap,
            self,
            config.cluster.report_period_s,
            profile.reads_during_steps,
        )
        self._instances[instance_id] = instance
        self._movers[instance_id] = mover
        ready = Ready(
            body.spec,
            PeerAddress("simulated", "simulated"),
            profile.max_model_len,
            profile.model.name,
        )
        self._heap.after(self._latency_s, self._to_controller, instance_id, ready)
        offset_s = config.cluster.report_period_s * (instance_id * _GOLDEN % 1.0)
        self._heap.after(offset_s, instance.report_due)

    def _lost(self, instance_id: InstanceId) -> None:
        self.note("lost", instance_id)
        self.controller.lost(instance_id, "killed", self._heap.now_s(), NOBODY)
        self._carry_out_all()

    # What instances ask of it (``Surroundings``)

    def begin_step(self, instance: SimInstance, work: Work, blocked_s: float) -> float:
        """When the step will end: others that compute now may slow it down."""
        busy_share = self._num_computing / max(1, len(self._instances) - 1)
        self._num_computing += 1
        now_s = self._heap.now_s()
        end_s = now_s + blocked_s + instance.body.work_s(work.step, busy_share)
        if self._watcher is not None:
            self._watcher.stepped(instance.instance_id, work, now_s, end_s)
        return end_s

    def end_step(self) -> None:
        """One computes less."""
        self._num_computing -= 1

    def note_stage_time(self, time: StageTime) -> None:
        """For the bubble ratio."""
        self.accounts.note_stage_time(time)

    def send_mail(self, instance: SimInstance, blocked_s: float) -> None:
        """Each pair of instances has a wire, and each instance one to the controller."""
        src = instance.instance_id
        for dst, message, hidden in instance.agent.drain():
            if dst is None:
                self._heap.after(blocked_s + self._latency_s, self._to_controller, src, message)
            elif dst in self._instances:
                wire = self._wires.setdefault((src, dst), deque())
                sent = _WireMessage(message, hidden)
                wire.append(sent)
                if hidden is None:
                    takes_s = blocked_s + self._latency_s + tokens_s(message, self.profile)
                    self._heap.after(takes_s, self._arrived, src, dst, sent)
                else:
                    self._send_hidden(src, dst, sent, blocked_s)
        for preemption in instance.agent.drain_preemptions():
            self.note("preempted", src, preemption)

    def note(self, kind: str, *details: Any) -> None:
        """Tell whoever watches."""
        if self._watcher is not None:
            self._watcher.happened(kind, self._heap.now_s(), *details)

    # Messages

    def _send_hidden(
        self, src: InstanceId, dst: InstanceId, sent: _WireMessage, blocked_s: float
    ) -> None:
        def arrived() -> None:
            self._arrived(src, dst, sent)

        if blocked_s > 0.0:
            self._heap.after(
                blocked_s, self.network.send_activation, src, dst, sent.hidden, arrived
            )
        else:
            self.network.send_activation(src, dst, sent.hidden, arrived)

    def _arrived(self, src: InstanceId, dst: InstanceId, sent: _WireMessage) -> None:
        """A message is here; it is read after all that were sent before it on this wire."""
        sent.is_here = True
        wire = self._wires.get((src, dst))
        while wire and wire[0].is_here:
            first = wire.popleft()
            instance = self._instances.get(dst)
            if instance is not None:
                instance.read(src, first.message, first.hidden)

    def _to_controller(self, src: InstanceId, message: Any) -> None:
        self.note("event", src, message)
        self.controller.on(src, message, self._heap.now_s())
        self._carry_out_all()

    def _from_controller(self, dst: InstanceId, message: Message) -> None:
        instance = self._instances.get(dst)
        if instance is not None:
            instance.read(None, message, None)

    def _tick(self) -> None:
        self.note("tick")
        self.controller.tick(self._heap.now_s())
        self._carry_out_all()
        self._heap.after(TICK_S, self._tick)

    def _carry_out_all(self) -> None:
        behind_s: dict[InstanceId, float] = defaultdict(float)  # the tokens of those before it
        for command in self.controller.drain_all(self._heap.now_s()):
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
                self.accounts.note_order(instance_id, self._heap.now_s())
                self._heap.after(self.world.start_s, self._start, instance_id)
            case LogTransition(record):
                self.records.append(record)
            case ScaleUp(reason, is_wish):
                self.accounts.scale_ups.append((self._heap.now_s(), reason))
                if not is_wish:
                    self._order(self.world.start_s)
            case ScaleDown(instance_id):
                self.accounts.num_given_back += 1
                self._remove(instance_id)
            case LogReason() | LogObserved() | LogQuarantine():
                pass

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
            table = instance.agent.table
            assert table.num_units <= instance.body.kv_units, (table.num_units, instance.body)

    def check_empty(self) -> None:
        """When no request is alive: nothing is left but what the prefix caches hold."""
        self.check()
        cached = cached_units(instance.agent.membership for instance in self._instances.values())
        for instance in self._instances.values():
            used_units = instance.agent.table.used_units
            assert used_units == cached.get(instance.instance_id, 0), instance.instance_id
            assert instance.mover.is_quiet, instance.instance_id
            assert not instance.body.swapped, instance.instance_id
