"""What an instance is and has at this moment: shared by its agent and its transitions."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kunserve.control.group.load import SchedulerTotals
from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.block_table import BlockTable
from kunserve.control.instance.body import Body, Mover, Remap
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.messages import Message
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.step import BlockRun, StepPlan
from kunserve.policy.capacity import group_capacity_blocks
from kunserve.policy.relief import HostLink, group_host_link


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What an agent must know beside its body."""

    instance_id: InstanceId
    scheduler: SchedulerConfig
    eos_token_ids: frozenset[int]
    max_model_len: int


class Outgoing(NamedTuple):
    """A message to send; ``dst`` None is the controller."""

    dst: InstanceId | None
    message: Message
    hidden: Any = None


class Preemption(NamedTuple):
    """A request that lost its KV, for the driver's log."""

    request_id: RequestId
    lost_tokens: int


@dataclass(slots=True)
class InstanceState:
    """The instance's memory, its place in a group, and its mail."""

    config: AgentConfig
    body: Body
    mover: Mover
    table: BlockTable
    held: LayerRange
    """Layers whose weights are in memory: at least those of ``layout``."""
    layout: GroupLayout | None = None
    scheduler: Scheduler | None = None
    """Only the leader of a group has one."""
    totals: SchedulerTotals = field(default_factory=SchedulerTotals)
    """What this instance's schedulers have done, one after the other."""
    specs: dict[InstanceId, InstanceSpec] = field(default_factory=dict)
    ready: deque[tuple[StepPlan, Any]] = field(default_factory=deque)
    """Microbatches to run: from the stage before, or the leader's own that lacked units."""
    early: dict[GroupId, list[tuple[StepPlan, Any]]] = field(default_factory=dict)
    """Microbatches of groups that this instance has yet to enter."""
    swapped_out: tuple[BlockRun, ...] = ()
    """What the last plan copied to host memory: its units are free as of the next."""
    is_running: bool = False
    last_step_s: float = 0.0
    outbox: list[Outgoing] = field(default_factory=list)
    to_self: deque[Message] = field(default_factory=deque)
    preemptions: list[Preemption] = field(default_factory=list)

    @property
    def me(self) -> InstanceId:
        """The instance's id."""
        return self.config.instance_id

    @property
    def spec(self) -> InstanceSpec:
        """What the instance is made of."""
        return self.body.spec

    @property
    def layers(self) -> LayerRange:
        """The layers that this instance computes."""
        assert self.layout is not None
        layers = self.layout.layers_of(self.me)
        assert layers is not None, (self.me, self.layout)
        return layers

    @property
    def leads(self) -> bool:
        """Whether this instance schedules for its group."""
        return self.scheduler is not None

    def send(self, dst: InstanceId | None, message: Message, hidden: Any = None) -> None:
        """Queue a message, also one to this instance itself."""
        if dst == self.me:
            self.to_self.append(message)
        else:
            self.outbox.append(Outgoing(dst, message, hidden))

    def note_preemption(self, request_id: RequestId, lost_tokens: int) -> None:
        """A transition cost a request its KV."""
        self.preemptions.append(Preemption(request_id, lost_tokens))
        self.totals.num_preemptions += 1
        self.totals.lost_tokens += lost_tokens

    def free(self, request_id: RequestId) -> None:
        """Forget a request that no transfer touches."""
        self.table.release(request_id)
        self.body.forget(request_id)

    def keep_only(self, layers: LayerRange) -> Remap:
        """Turn held layers outside ``layers`` into KV memory."""
        if self.held == layers:
            remap = Remap(self.table.num_units, 0, 0.0)
        else:
            self.mover.offer_layers(layers)
            remap = self.body.drop_layers(layers)
            self.held = layers
        self.table.set_layers(layers, remap.kv_units)
        return remap

    def enter(self, layout: GroupLayout, now_s: float) -> None:
        """Stand in a new group; microbatches of older ones are forgotten."""
        self.layout = layout
        self.last_step_s = now_s
        self.ready = deque(self.early.pop(layout.group_id, []))
        self.swapped_out = ()
        self.early = {g: plans for g, plans in self.early.items() if g > layout.group_id}
        self.scheduler = None
        if layout.leader == self.me:
            self.scheduler = Scheduler(
                config=self.config.scheduler,
                group_id=layout.group_id,
                num_stages=len(layout.stages),
                block_size=self.spec.block_size,
                capacity_blocks=self.capacity_blocks(),
                eos_token_ids=self.config.eos_token_ids,
                max_model_len=self.config.max_model_len,
                totals=self.totals,
                host_link=self.host_link(),
            )

    def arrived(self, plan: StepPlan, hidden: Any) -> None:
        """A microbatch from the stage before.

        It may come before this instance has entered the group (ids of groups only grow), or be
        left over from one that it has left.
        """
        now = None if self.layout is None else self.layout.group_id
        if plan.group_id == now:
            self.ready.append((plan, hidden))
        elif now is None or plan.group_id > now:
            self.early.setdefault(plan.group_id, []).append((plan, hidden))

    def capacity_blocks(self) -> int:
        """KV blocks of the present group when no transition narrows it."""
        assert self.layout is not None
        return group_capacity_blocks(self.layout, self.specs)

    def host_link(self) -> HostLink | None:
        """The present group's way to host memory; None where nobody is swapped."""
        swap = self.config.scheduler.swap
        if swap is None:
            return None
        assert self.layout is not None
        stages = [(self.specs[member].unit_bytes, held) for member, held in self.layout.stages]
        return group_host_link(
            swap.host_bytes_per_s,
            swap.host_bytes,
            [unit_bytes * held.num_layers for unit_bytes, held in stages],
        )
