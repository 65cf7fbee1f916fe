"""A world in which everything takes time: simulated bodies and links under one event heap."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kunserve.control.cluster.commands import Client, ControlCommand
from kunserve.control.cluster.requests.quarantine import Blame
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Connect, Message, TokenOutput
from kunserve.core.place import ONE_HOST, Place
from kunserve.core.plan import Plan
from kunserve.core.request import Request
from kunserve_lab.sim.accounts import ClusterAccounts
from kunserve_lab.sim.body import SimBody
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.instance import SimInstance, Surroundings
from kunserve_lab.sim.network import Network
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.world.mover import Pull, WorldMover, num_bytes_of
from kunserve_lab.world.world import Address, Watcher

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


@dataclass(slots=True, eq=False)
class _WireMessage:
    """A message between two instances."""

    message: Message
    hidden: Any
    is_here: bool = False


class TimedWorld(Surroundings):
    """See the module."""

    def __init__(
        self,
        plan: Plan,
        profile: InstanceProfile,
        heap: EventHeap,
        on_token: Callable[[TokenOutput], None],
        world: WorldConfig | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """Instances report for duty at once, as if started before."""
        num_instances, longest = plan.config.cluster.num_instances, profile.max_model_len
        super().__init__(plan, num_instances, longest, watcher=watcher)
        self.profile = profile
        self.heap = heap
        self.accounts = ClusterAccounts()
        self.num_instances = 0
        """Ordered so far, the starting ones included: also the next one's id."""
        self._world = WorldConfig() if world is None else world
        self._on_token = on_token
        self._wires: dict[tuple[InstanceId, InstanceId], deque[_WireMessage]] = {}
        self._behind_s: dict[InstanceId, float] = {}
        """Of what the controller says now, the tokens of what goes before it."""
        self._latency_s = profile.message_latency_s
        self.network = Network(
            heap,
            profile.network_bytes_per_s,
            self._latency_s,
            priority=self._world.link_priority,
            place_of=self._world.place_of if self._world.places else None,
        )
        self._num_computing = 0
        """Instances in the middle of a step, those included that died in it."""
        for _ in range(num_instances):
            self.grow(0.0)
        heap.after(TICK_S, self.tick)

    @property
    def now_s(self) -> float:
        """The moment of the event that happens now."""
        return self.heap.now_s()

    def client_of(self, request: Request) -> Client:
        """One for all."""
        return self._on_token

    def drain(self) -> list[ControlCommand]:
        """All that is decided is begun, because nobody waits for the controller."""
        self._behind_s = defaultdict(float)
        return self.controller.drain()

    def tick(self) -> None:
        """And again, after a while."""
        super().tick()
        self.heap.after(TICK_S, self.tick)

    # Instances

    def grow(self, delay_s: float | None = None) -> None:
        """One more, after a while."""
        self.num_instances += 1
        self.respawn(InstanceId(self.num_instances - 1), delay_s)

    def respawn(self, instance_id: InstanceId, delay_s: float | None = None) -> None:
        """After a while too."""
        self.accounts.note_order(instance_id, self.now_s)
        delay_s = self._world.start_s if delay_s is None else delay_s
        self.heap.after(delay_s, self.start_instance, instance_id)

    def make_member(self, instance_id: InstanceId) -> SimInstance:
        """With costs and no bytes."""

        def set_out(pull: Pull) -> None:
            self._set_out(instance, pull)

        body = SimBody(self.profile, instance_id, self._world.place_of(instance_id))
        mover = WorldMover(set_out, self._coming_bytes)
        instance = SimInstance(self, body, mover, self._plan.config.cluster)
        return instance

    def start_instance(self, instance_id: InstanceId) -> None:
        """Reports come at their own pace on each instance."""
        super().start_instance(instance_id)
        instance = self.members[instance_id]
        self.accounts.totals.append(instance.agent.state.totals)
        offset_s = self._plan.config.cluster.report_period_s * (instance_id * _GOLDEN % 1.0)
        self.heap.after(offset_s, instance.report_due)

    def cut(self, instance_id: InstanceId, *, is_dead: bool) -> None:
        """Only what it has sent to the controller may still arrive."""
        self.accounts.note_end(instance_id, self.now_s)
        for ends in [ends for ends in self._wires if instance_id in ends]:
            del self._wires[ends]

    def hear_of_death(self, instance_id: InstanceId, blame: Blame) -> None:
        """After a while."""
        self.heap.after(self._world.detect_s, self.lost, instance_id, blame)

    def compute(self, instance: SimInstance, work: Work, blocked_s: float) -> None:
        """Others that compute now may slow the step down."""
        busy_share = self._num_computing / max(1, len(self.members) - 1)
        self._num_computing += 1
        now_s = self.heap.now_s()
        end_s = now_s + blocked_s + instance.body.work_s(work.step, busy_share)
        self.happened("step", instance.instance_id, work, end_s)
        self.heap.at(end_s, self._computed, instance, work, now_s + blocked_s)

    def _computed(self, instance: SimInstance, work: Work, began_s: float) -> None:
        self._num_computing -= 1
        if not instance.is_dead:
            instance.finish(work, began_s)

    # Messages

    def post(self, src: Address, dst: Address, message: Message, hidden: Any = None) -> None:
        """Each pair of instances has a wire, and each instance one to the controller."""
        if src is None:
            assert dst is not None
            if not isinstance(message, Connect):  # a simulated instance needs no addresses
                delay_s = self._latency_s + self._behind_s[dst]
                self._behind_s[dst] += self.profile.tokens_s(message)
                self.heap.after(delay_s, self._read, None, dst, message, None)
            return
        blocked_s = self.members[src].blocked_s
        if dst is None:
            self.heap.after(blocked_s + self._latency_s, self.hear, src, message)
        elif dst in self.members:
            sent = _WireMessage(message, hidden)
            self._wires.setdefault((src, dst), deque()).append(sent)
            if hidden is None:
                takes_s = blocked_s + self._latency_s + self.profile.tokens_s(message)
                self.heap.after(takes_s, self._arrived, src, dst, sent)
            elif blocked_s > 0.0:
                self.heap.after(blocked_s, self._send_hidden, src, dst, sent)
            else:
                self._send_hidden(src, dst, sent)

    def _send_hidden(self, src: InstanceId, dst: InstanceId, sent: _WireMessage) -> None:
        self.network.send_activation(src, dst, sent.hidden, lambda: self._arrived(src, dst, sent))

    def _arrived(self, src: InstanceId, dst: InstanceId, sent: _WireMessage) -> None:
        """A message is here; it is read after all that were sent before it on this wire."""
        sent.is_here = True
        wire = self._wires.get((src, dst))
        while wire and wire[0].is_here:
            first = wire.popleft()
            self._read(src, dst, first.message, first.hidden)

    def _read(self, src: Address, dst: InstanceId, message: Message, hidden: Any) -> None:
        instance = self.members.get(dst)
        if instance is not None:
            instance.take(self.tell, src, instance, message, hidden)

    # Pulls

    def _set_out(self, instance: SimInstance, pull: Pull) -> None:
        """Ask the source, then wait for the bytes."""
        what, num_bytes = pull.what, num_bytes_of(pull.what, instance.body.spec)
        if what.src is None:
            self.heap.after(num_bytes / self.profile.host_bytes_per_s, self._land, instance, pull)
        else:
            self.heap.after(self._latency_s, self._ask, what.src, instance, pull, num_bytes)

    def _ask(self, src: InstanceId, instance: SimInstance, pull: Pull, num_bytes: int) -> None:
        def is_there() -> bool:
            source, pull.began_s = self.members.get(src), self.now_s
            return pull.is_wanted and source is not None and source.mover.can_give(pull.what)

        def landed() -> None:
            self._land(instance, pull)

        self.network.send_bulk(src, instance.instance_id, num_bytes, landed, is_there)

    def _coming_bytes(self, pulls: list[Pull]) -> int:
        """About: what else the link carries is left out."""
        begun_s = [pull.began_s for pull in pulls if pull.began_s is not None]
        rate = self.profile.network_bytes_per_s
        return int(sum(rate * (self.now_s - one_s) for one_s in begun_s))

    def _land(self, instance: SimInstance, pull: Pull) -> None:
        if pull.is_wanted:
            ok = self.land(instance, pull)
            instance.take(self.end_pull, instance, pull.what, ok)

    # Figures

    @property
    def swapped_bytes(self) -> tuple[int, int]:
        """KV that went to host memory, and came back, on the instances that live."""
        bodies = [instance.body for instance in self.members.values()]
        out_bytes = sum(body.swapped_out_bytes for body in bodies)
        return out_bytes, sum(body.swapped_back_bytes for body in bodies)

    @property
    def is_moving(self) -> bool:
        """Whether KV or weights are on their way anywhere."""
        return any(not instance.mover.is_quiet for instance in self.members.values())
