"""The cluster's brain: dispatches requests, watches load, drives transitions, mends failures.

One per cluster, in the front's process. Sans-I/O: a driver feeds it events and carries out the
commands that ``drain`` returns, in order.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from kunserve.control.placement import Group, Placement
from kunserve.control.transitions import Transition, Transitions
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import (
    Abort,
    Alive,
    Committed,
    Connect,
    Event,
    ExchangeDone,
    Form,
    LayersLoaded,
    LoadLayers,
    Message,
    Outputs,
    Prepared,
    Ready,
    Report,
    Submit,
    TokenOutput,
)
from kunserve.core.request import Request
from kunserve.core.snapshots import ClusterState, InstanceState, LoadReport, TransitionRecord
from kunserve.policy.capacity import undropped_capacity_blocks
from kunserve.policy.dispatch import GroupView, QueueView, Shed, choose_group, should_shed
from kunserve.policy.drop_plan import blocks_for_bytes, plan_drop
from kunserve.policy.monitor import (
    Calm,
    ClusterLoadView,
    GroupLoad,
    MonitorState,
    Overloaded,
    Relaxed,
    observe,
)
from kunserve.policy.restore import Postponed, plan_restore


class Tell(NamedTuple):
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
    """Nothing is left to drop: more instances are needed."""

    reason: str


ControlCommand: TypeAlias = Tell | Deliver | Respawn | Announce | ScaleUp

SCALE_UP_PERIOD_S = 10.0
"""Shortest time between two scale-up events."""
BACKOFF_S = 1.0
"""After a rolled-back transition, before the next is tried."""


@dataclass(slots=True)
class _Live:
    """A request that has not ended, with what the client already has."""

    request: Request
    leader: InstanceId
    output_token_ids: list[int]


@dataclass(slots=True)
class _Instance:
    """One instance's standing with the controller."""

    address: str
    held: LayerRange
    kv_units: int
    num_sent: int = 0
    """Requests submitted to it, to match ``LoadReport.num_received``."""


@dataclass(slots=True)
class Controller:
    """See the module. Everything that happens goes through its public methods."""

    config: KunServeConfig
    placement: Placement = field(default_factory=Placement)
    _instances: dict[InstanceId, _Instance] = field(default_factory=dict)
    _live: dict[RequestId, _Live] = field(default_factory=dict)
    _homeless: list[Request] = field(default_factory=list)
    """Requests whose group died while no other stood."""
    _monitor: MonitorState = field(default_factory=MonitorState)
    _commands: list[ControlCommand] = field(default_factory=list)
    _scale_up_s: float | None = None
    _backoff_until_s: float = 0.0
    transitions: Transitions = field(init=False)
    last_verdict: str = ""

    def __post_init__(self) -> None:
        self.transitions = Transitions(self.placement, self._tell)

    def drain(self) -> list[ControlCommand]:
        """Commands since the last call, in order."""
        for record in self.transitions.finished:
            self._commands.append(Announce(record))
        self.transitions.finished.clear()
        commands, self._commands = self._commands, []
        return commands

    def _tell(self, instance_id: InstanceId, message: Message) -> None:
        self._commands.append(Tell(instance_id, message))

    # Requests

    def admit(self, request: Request) -> Shed | None:
        """Whether the queue limits refuse the request (it is not submitted by this call)."""
        limits = self.config.server
        if limits.max_num_queued_reqs is None and limits.max_num_queued_tokens is None:
            return None
        loads = [group.load for group in self.placement.groups.values() if group.load is not None]
        queue = QueueView(
            num_reqs=sum(load.num_waiting for load in loads)
            + sum(len(group.unreported) for group in self.placement.groups.values()),
            num_tokens=sum(load.waiting_tokens for load in loads),
            prompt_tokens_per_s=0.0,
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
        return len(self._live)

    def arrive(self, request: Request, now_s: float) -> None:
        """A request to serve; it ends with exactly one finish reason unless cancelled."""
        self._live[request.request_id] = _Live(
            request, InstanceId(-1), list(request.output_token_ids)
        )
        self._dispatch(request)
        self._watch(now_s)

    def cancel(self, request_id: RequestId) -> None:
        """The client is gone."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._homeless = [r for r in self._homeless if r.request_id != request_id]
        if live.leader in self._instances:
            self._tell(live.leader, Abort(request_id))

    def _dispatch(self, request: Request) -> None:
        blocks = -(-request.max_total_tokens // self._block_size())
        views = [self._view(group) for group in self.placement.groups.values()]
        prompt = len(request.prompt_token_ids) + len(request.output_token_ids)
        group_id = choose_group(views, min(blocks, -(-prompt // self._block_size()) + 1))
        if group_id is None:
            self._homeless.append(request)
            return
        group = self.placement.groups[group_id]
        leader = group.layout.leader
        instance = self._instances[leader]
        instance.num_sent += 1
        group.sent(instance.num_sent, -(-prompt // self._block_size()))
        self._live[request.request_id].leader = leader
        self._tell(leader, Submit(request))

    def _block_size(self) -> int:
        return self.config.instance.block_size

    def _view(self, group: Group) -> GroupView:
        if group.load is not None:
            # In a transition the leader reports less than the group will have.
            view = GroupView.of(group.load, group.unreported_blocks)
            return view._replace(capacity_blocks=group.capacity_blocks)
        return GroupView(
            group.layout.group_id, group.capacity_blocks, 0, 0, 0, 0, group.unreported_blocks
        )

    # Instances

    def on(self, instance_id: InstanceId, event: Event, now_s: float) -> None:
        """An instance's event."""
        match event:
            case Outputs():
                self._outputs(event)
            case Report():
                self._report(event, now_s)
            case Ready():
                self._ready(event, now_s)
            case Prepared():
                self.transitions.on_prepared(event, now_s)
                self._note_backoff(now_s)
            case LayersLoaded():
                self.transitions.on_loaded(event, now_s)
                self._note_backoff(now_s)
            case Committed():
                self._committed(event, now_s)
            case ExchangeDone():
                self.transitions.on_exchanged(event, now_s)
            case Alive():
                pass

    def _note_backoff(self, now_s: float) -> None:
        if any(r.outcome.startswith("rolled back") for r in self.transitions.finished):
            self._backoff_until_s = now_s + BACKOFF_S

    def _ready(self, event: Ready, now_s: float) -> None:
        spec = event.spec
        self.placement.specs[spec.instance_id] = spec
        whole = LayerRange(0, spec.num_layers)
        self._instances[spec.instance_id] = _Instance(event.data_address, whole, spec.kv_units)
        peers = tuple((i, inst.address) for i, inst in sorted(self._instances.items()))
        for instance_id in sorted(self._instances):
            self._tell(instance_id, Connect(peers))
        self._form_alone(spec.instance_id)
        self._rehome(now_s)

    def _form_alone(self, instance_id: InstanceId) -> None:
        spec = self.placement.specs[instance_id]
        layout = GroupLayout(
            self.placement.new_ids(1), (Stage(instance_id, LayerRange(0, spec.num_layers)),)
        )
        self.placement.add(layout)
        instance = self._instances[instance_id]
        instance.held, instance.kv_units = LayerRange(0, spec.num_layers), spec.kv_units
        self._tell(instance_id, Form(layout, (spec,)))

    def _rehome(self, now_s: float) -> None:
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._dispatch(request)
        self._watch(now_s)

    def _outputs(self, event: Outputs) -> None:
        live_by_id, commands = self._live, self._commands
        for token in event.tokens:
            live = live_by_id.get(token.request_id)
            if live is None:
                continue
            if token.token_id is not None:
                if token.position != len(live.output_token_ids):
                    continue
                live.output_token_ids.append(token.token_id)
            commands.append(Deliver(token))
            if token.finish_reason is not None:
                del live_by_id[token.request_id]

    def _report(self, event: Report, now_s: float) -> None:
        group = self.placement.groups.get(event.load.group_id)
        if group is None or group.layout.leader != event.instance_id:
            return
        group.report(event.load)
        self._watch(now_s)

    def _committed(self, event: Committed, now_s: float) -> None:
        instance = self._instances.get(event.instance_id)
        if instance is not None:
            instance.held, instance.kv_units = event.held, event.kv_units
        transition = self.transitions.on_committed(event, now_s)
        if transition is not None:
            self._relead(transition)

    def _relead(self, transition: Transition) -> None:
        """Requests of the old groups belong to the new leaders, as those have told."""
        old_leaders = {layout.leader for layout in transition.record.groups_before}
        default = {
            member: layout.leader
            for layout in transition.record.groups_after
            for member in layout.members
        }
        for request_id, live in self._live.items():
            if live.leader in old_leaders:
                live.leader = transition.followers.get(request_id, default[live.leader])

    def lost(self, instance_id: InstanceId, reason: str, now_s: float) -> None:
        """An instance died: its group's survivors start anew, its requests are run again."""
        if self._instances.pop(instance_id, None) is None:
            return
        affected = {instance_id}
        group = self.placement.with_member(instance_id)
        if group is not None:
            affected |= set(group.layout.members)
        transition = self.transitions.with_member(instance_id)
        if transition is not None:
            if transition.phase in ("loading", "preparing"):
                self.transitions.roll_back(transition, f"instance {instance_id} died", now_s)
            else:
                affected |= transition.members
                self.transitions.fail(transition, f"instance {instance_id} died", now_s)
        for standing in tuple(self.placement.groups.values()):
            if affected & set(standing.layout.members):
                self.placement.remove((standing.layout,))
        for survivor in sorted(affected - {instance_id}):
            if survivor in self._instances:
                self._form_alone(survivor)
        self._rerun(affected)
        self._commands.append(Respawn(instance_id))

    def _rerun(self, leaders: set[InstanceId]) -> None:
        for live in tuple(self._live.values()):
            if live.leader in leaders:
                request = replace(live.request, output_token_ids=tuple(live.output_token_ids))
                self._dispatch(request)

    # Overload

    def tick(self, now_s: float) -> None:
        """About ten times a second."""
        self.transitions.expire(now_s)
        self._note_backoff(now_s)
        if self._homeless:
            self._rehome(now_s)
        self._watch(now_s)

    def _watch(self, now_s: float) -> None:
        if self.config.overload.policy != "drop":
            return
        view = ClusterLoadView(
            tuple(self._group_loads()), self._block_size(), self._last_transition_s()
        )
        self._monitor, verdict = observe(self._monitor, view, now_s, self.config.overload)
        match verdict:
            case Overloaded():
                self.last_verdict = verdict.trigger
                self._relieve(verdict, now_s)
            case Relaxed():
                self.last_verdict = verdict.trigger
                if now_s >= self._backoff_until_s:
                    for group_id in verdict.group_ids:
                        self._restore(group_id, verdict.trigger, now_s)
            case Calm():
                self.last_verdict = verdict.reason

    def _group_loads(self) -> list[GroupLoad]:
        busy = self.transitions.busy_groups
        return [
            GroupLoad(
                report=group.load,
                num_instances=len(group.layout.stages),
                undropped_blocks=undropped_capacity_blocks(group.layout, self.placement.specs),
                unreported_blocks=group.unreported_blocks,
                formed_s=self.transitions.last_end_s(group.layout.members),
                in_transition=group.layout.group_id in busy,
            )
            for group in self.placement.groups.values()
            if group.load is not None
        ]

    def _last_transition_s(self) -> float | None:
        for record in reversed(self.transitions.records):
            if record.kind == "drop" and record.finished_s is not None and record.outcome == "done":
                return record.finished_s - record.started_s
        return None

    def _relieve(self, verdict: Overloaded, now_s: float) -> None:
        for transition in tuple(self.transitions.active.values()):
            if transition.record.kind == "restore" and transition.phase in ("loading", "preparing"):
                self.transitions.roll_back(transition, "overloaded again", now_s)
        if now_s < self._backoff_until_s:
            return
        if not self._drop(verdict.required_blocks, verdict.group_ids, verdict.trigger, now_s):
            self._ask_for_instances(verdict.trigger, now_s)

    def _ask_for_instances(self, trigger: str, now_s: float) -> None:
        under_way = bool(self.transitions.active)
        lately = self._scale_up_s is not None and now_s - self._scale_up_s < SCALE_UP_PERIOD_S
        if not under_way and not lately:
            self._scale_up_s = now_s
            self._commands.append(ScaleUp(f"{trigger}; nothing is left to drop"))

    def _drop(
        self, required_blocks: int, pressed: tuple[GroupId, ...], trigger: str, now_s: float
    ) -> list[TransitionId]:
        layouts = [group.layout for group in self.placement.groups.values()]
        plan = plan_drop(
            layouts,
            self.placement.specs,
            required_blocks,
            first_id=self.placement.new_ids(len(layouts)),
            pressed=pressed,
            untouchable=self.transitions.busy_groups,
        )
        return [
            self.transitions.begin_drop(merge.old, merge.new, trigger, now_s)
            for merge in plan.merges
        ]

    def _restore(self, group_id: GroupId, trigger: str, now_s: float) -> TransitionId | str:
        group = self.placement.groups[group_id]
        if group.load is None:
            return "its load is not known yet"
        plan = plan_restore(
            group.layout,
            self.placement.specs,
            group.load,
            first_id=self.placement.new_ids(len(group.layout.stages)),
        )
        if isinstance(plan, Postponed):
            return plan.reason

        def load(transition_id: TransitionId) -> LoadLayers:
            return LoadLayers(transition_id, group_id, plan.capacity_blocks, plan.members)

        return self.transitions.begin_restore(plan.old, plan.new, load, trigger, now_s)

    # Admin

    def force_drop(self, num_bytes: int | None, now_s: float) -> list[TransitionId]:
        """Drop at least that much, or by one merge; empty when nothing can be dropped."""
        blocks = 1 if num_bytes is None else blocks_for_bytes(num_bytes, self.placement.specs)
        return self._drop(blocks, (), "admin", now_s)

    def force_restore(self, now_s: float) -> list[TransitionId | str]:
        """Restore every dropped group; a string says why one was postponed."""
        busy = self.transitions.busy_groups
        return [
            self._restore(group_id, "admin", now_s)
            for group_id, group in tuple(self.placement.groups.items())
            if len(group.layout.stages) > 1 and group_id not in busy
        ]

    # Accounts

    def state(self, now_s: float) -> ClusterState:
        """Everything people and metrics see."""
        instances = tuple(
            InstanceState(spec, i in self._instances, *self._memory(i))
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
        homeless = {request.request_id for request in self._homeless}
        for request_id, live in self._live.items():
            assert live.leader in self._instances or request_id in homeless, (request_id, live)


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
    )
