"""The cluster's brain: dispatches requests, watches load, drives transitions, mends failures.

One per cluster, in the front's process. Sans-I/O: a driver feeds it events and carries out the
commands that ``drain`` returns, in order.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kunserve.control.cluster.migrations import Migrations
from kunserve.control.cluster.overload import OverloadControl
from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests import Requests
from kunserve.control.cluster.scaling import Scaling
from kunserve.control.cluster.transitions import Transition, Transitions
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import (
    Alive,
    Committed,
    Connect,
    Event,
    ExchangeDone,
    Form,
    LayersLoaded,
    Message,
    MigrationOver,
    MigrationReady,
    Outputs,
    Prepared,
    Ready,
    Report,
    TokenOutput,
)
from kunserve.core.request import Request
from kunserve.core.snapshots import (
    ClusterState,
    InstanceSnapshot,
    LoadReport,
    StageTime,
    TransitionRecord,
)
from kunserve.core.transfer import PeerAddress
from kunserve.policy.dispatch import QueueView, Shed, should_shed


class Send(NamedTuple):
    """Send a message to an instance."""

    instance_id: InstanceId
    message: Message


class Deliver(NamedTuple):
    """Give a token to whoever waits for it."""

    token: TokenOutput


class Respawn(NamedTuple):
    """Start a process in the place of a dead instance."""

    instance_id: InstanceId


class Announce(NamedTuple):
    """A transition ended: one line for the log."""

    record: TransitionRecord


class ScaleUp(NamedTuple):
    """Nothing is left to drop: one more instance is needed."""

    reason: str


class ScaleDown(NamedTuple):
    """The instance serves nobody and is not needed: it may go."""

    instance_id: InstanceId


ControlCommand: TypeAlias = Send | Deliver | Respawn | Announce | ScaleUp | ScaleDown


@dataclass(slots=True)
class _Instance:
    """What a living instance last said of itself."""

    address: PeerAddress
    held: LayerRange
    kv_units: int


class Controller:
    """See the module. Everything that happens goes through its public methods."""

    def __init__(self, config: KunServeConfig) -> None:
        self._config = config
        self._commands: list[ControlCommand] = []
        self._instances: dict[InstanceId, _Instance] = {}
        self.placement = Placement()
        self.transitions = Transitions(self.placement, self._tell)
        self._requests = Requests(
            self.placement,
            config.instance.block_size,
            self._tell,
            lambda token: self._commands.append(Deliver(token)),
        )
        self.balance = Migrations(
            config.overload,
            config.instance.block_size,
            self.placement,
            self.transitions,
            self._requests,
            self._tell,
        )
        self._scaling = Scaling(
            config.cluster,
            self.placement,
            self.transitions,
            self._requests,
            lambda reason: self._commands.append(ScaleUp(reason)),
            self._give_back,
        )
        self._overload = OverloadControl(
            config.overload,
            config.instance.block_size,
            self.placement,
            self.transitions,
            self._scaling,
        )

    def drain(self) -> list[ControlCommand]:
        """Commands since the last call, in order."""
        for record in self.transitions.finished:
            self._commands.append(Announce(record))
        self.transitions.finished.clear()
        commands, self._commands = self._commands, []
        return commands

    def _tell(self, instance_id: InstanceId, message: Message) -> None:
        self._commands.append(Send(instance_id, message))

    # Requests

    def admit(self, request: Request) -> Shed | None:
        """Whether the queue limits refuse the request (it is not submitted by this call)."""
        limits = self._config.server
        if limits.max_num_queued_reqs is None and limits.max_num_queued_tokens is None:
            return None
        groups = self.placement.groups.values()
        loads = [group.load for group in groups if group.load is not None]
        queue = QueueView(
            num_reqs=sum(load.num_waiting for load in loads)
            + sum(len(group.unreported) for group in groups),
            num_tokens=sum(load.waiting_tokens for load in loads),
            prompt_tokens_per_s=sum(group.prompt_tokens_per_s for group in groups),
            drop_may_help=any(
                t.record.kind == "drop" and t.phase in ("preparing", "committing")
                for t in self.transitions.active.values()
            ),
        )
        return should_shed(
            queue,
            len(request.prompt_token_ids),
            max_num_queued_reqs=limits.max_num_queued_reqs,
            max_num_queued_tokens=limits.max_num_queued_tokens,
        )

    @property
    def can_serve(self) -> bool:
        """Whether any group stands."""
        return bool(self.placement.groups)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def arrive(self, request: Request, now_s: float) -> None:
        """A request to serve; it ends with exactly one finish reason unless cancelled."""
        self._requests.add(request)
        self._overload.watch(now_s)

    def cancel(self, request_id: RequestId) -> None:
        """The client is gone."""
        self._requests.cancel(request_id)

    # Instances

    def on(self, instance_id: InstanceId, event: Event, now_s: float) -> None:
        """An instance's event."""
        match event:
            case Outputs():
                self._requests.take(event)
            case Report():
                self._report(event, now_s)
            case Ready():
                self._ready(event, now_s)
            case Prepared():
                self.transitions.on_prepared(event, now_s)
            case LayersLoaded():
                self.transitions.on_loaded(event, now_s)
            case Committed():
                self._committed(event, now_s)
            case ExchangeDone():
                self.transitions.on_exchanged(event, now_s)
            case MigrationReady():
                self.balance.on_ready(event)
            case MigrationOver():
                self.balance.on_over(event)
            case Alive() | StageTime():
                pass

    def _ready(self, event: Ready, now_s: float) -> None:
        spec = event.spec
        if spec.instance_id not in self.placement.specs:
            self._scaling.arrived()
        self.placement.specs[spec.instance_id] = spec
        self._requests.restarted(spec.instance_id)
        whole = LayerRange(0, spec.num_layers)
        self._instances[spec.instance_id] = _Instance(event.address, whole, spec.kv_units)
        peers = tuple((i, inst.address) for i, inst in sorted(self._instances.items()))
        connect = Connect(peers)
        for instance_id in sorted(self._instances):
            self._tell(instance_id, connect)
        self._form_alone(spec.instance_id)
        self._requests.rehome()
        self._overload.watch(now_s)

    def _form_alone(self, instance_id: InstanceId) -> None:
        spec = self.placement.specs[instance_id]
        whole = LayerRange(0, spec.num_layers)
        layout = GroupLayout(self.placement.new_ids(1), (Stage(instance_id, whole),))
        self.placement.add(layout)
        instance = self._instances[instance_id]
        instance.held, instance.kv_units = whole, spec.kv_units
        self._tell(instance_id, Form(layout, (spec,)))

    def _report(self, event: Report, now_s: float) -> None:
        group = self.placement.groups.get(event.load.group_id)
        if group is None or group.layout.leader != event.instance_id:
            return
        group.report(event.load, now_s)
        self._overload.watch(now_s)
        self.balance.watch()

    def _committed(self, event: Committed, now_s: float) -> None:
        instance = self._instances.get(event.instance_id)
        if instance is not None:
            instance.held, instance.kv_units = event.held, event.kv_units
        transition = self.transitions.on_committed(event, now_s)
        if transition is not None:
            self._relead(transition)

    def _relead(self, transition: Transition) -> None:
        """Requests of the old groups belong to the new leaders, as those have told."""
        record = transition.record
        default = {
            member: layout.leader for layout in record.groups_after for member in layout.members
        }
        old_leaders = [layout.leader for layout in record.groups_before]
        self._requests.relead(old_leaders, transition.followers, default)

    def _give_back(self, instance_id: InstanceId) -> None:
        """The instance has drained: forget it."""
        group = self.placement.led_by(instance_id)
        assert group is not None, instance_id
        self.placement.remove((group.layout,))
        del self.placement.specs[instance_id], self._instances[instance_id]
        self.balance.end_with((instance_id,))
        self._commands.append(ScaleDown(instance_id))

    def lost(self, instance_id: InstanceId, reason: str, now_s: float) -> None:
        """An instance died: its group's survivors start anew, its requests are run again."""
        if self._instances.pop(instance_id, None) is None:
            return
        affected = {instance_id}
        group = self.placement.with_member(instance_id)
        if group is not None:
            affected |= set(group.layout.members)
        transition = self.transitions.with_member(instance_id)
        died = f"instance {instance_id} died ({reason})"
        if transition is not None:
            if transition.phase in ("loading", "preparing"):
                self.transitions.roll_back(transition, died, now_s)
            else:
                affected |= transition.members
                self.transitions.fail(transition, died, now_s)
        for standing in tuple(self.placement.groups.values()):
            if affected & set(standing.layout.members):
                self.placement.remove((standing.layout,))
        for survivor in sorted(affected - {instance_id}):
            if survivor in self._instances:
                self._form_alone(survivor)
        self._scaling.keep_all()
        self.balance.end_with(affected)
        self._requests.rerun(affected)
        self._commands.append(Respawn(instance_id))

    # Overload

    def tick(self, now_s: float) -> None:
        """About ten times a second."""
        self.transitions.expire(now_s)
        self._requests.rehome()
        self._overload.watch(now_s)

    def force_drop(self, num_bytes: int | None, now_s: float) -> list[TransitionId]:
        """Drop at least that much, or by one merge; empty when nothing can be dropped."""
        return self._overload.force_drop(num_bytes, now_s)

    def force_restore(self, now_s: float) -> list[TransitionId | str]:
        """Restore every dropped group; a string says why one was postponed."""
        return self._overload.force_restore(now_s)

    # Accounts

    def state(self, now_s: float) -> ClusterState:
        """Everything people and metrics see."""
        instances = tuple(
            InstanceSnapshot(spec, i in self._instances, *self._memory(i))
            for i, spec in sorted(self.placement.specs.items())
        )
        groups = tuple(self.placement.groups.values())
        return ClusterState(
            now_s=now_s,
            instances=instances,
            groups=tuple(group.layout for group in groups),
            loads=tuple(group.load or empty_load(group) for group in groups),
            transitions=self.transitions.latest(),
            num_drops=self.transitions.num_drops,
            num_restores=self.transitions.num_restores,
        )

    def _memory(self, instance_id: InstanceId) -> tuple[LayerRange, int]:
        instance = self._instances.get(instance_id)
        return (LayerRange(0, 0), 0) if instance is None else (instance.held, instance.kv_units)

    def check(self) -> None:
        """Assert that placement is whole and that every live request has a living leader."""
        self.placement.check()
        self.balance.check()
        self._requests.check(self._instances)


def empty_load(group: Group) -> LoadReport:
    """A group that has not reported yet."""
    return LoadReport(
        group_id=group.layout.group_id,
        sequence_number=0,
        num_received=0,
        num_running=0,
        num_waiting=0,
        used_blocks=0,
        capacity_blocks=group.capacity_blocks,
        growth_blocks=0,
        head_of_line_blocks=0,
        waiting_blocks=0,
        waiting_tokens=0,
        num_stalled=0,
        num_preemptions=0,
        lost_tokens=0,
        prompt_tokens=0,
        generation_tokens=0,
        stuck_s=0.0,
        largest_request_blocks=0,
        largest_expected_blocks=0,
    )
