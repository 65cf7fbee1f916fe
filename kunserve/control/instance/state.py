"""What an instance is and has, in whatever group it stands: its memory, its weights, its mail.

Shared by the instance's agent and the change under way. What exists only in a group is in
``membership``.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kunserve.control.group.cache_journal import CacheJournal
from kunserve.control.group.load import SchedulerTotals
from kunserve.control.instance.block_table import BlockTable
from kunserve.control.instance.body import Body, Mover, Remap, UnitCopy
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Message, Tidied
from kunserve.core.plan import Measured
from kunserve.core.snapshots import InstanceSpec

STEP_MEMORY = 0.9
"""Of the longest of the last steps, kept at each further one."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What an agent must know beside its body."""

    instance_id: InstanceId
    scheduler: SchedulerConfig
    measured: Measured
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
    """What is true of an instance from its start to its end."""

    config: AgentConfig
    body: Body
    mover: Mover
    table: BlockTable
    held: LayerRange
    """Layers whose weights are in memory: at least those that the instance computes."""
    specs: dict[InstanceId, InstanceSpec]
    """Of this instance and of those that it has shared a group with."""
    totals: SchedulerTotals = field(default_factory=SchedulerTotals)
    """What this instance's schedulers have done, one after the other."""
    journal: CacheJournal | None = None
    """Where somebody outside follows the prefix cache."""
    is_running: bool = False
    """The body computes a step."""
    is_ahead: bool = False
    """It has been given the next one, too."""
    began_s: float = 0.0
    """When the last step did."""
    step_s: float = 0.0
    """About the longest of the last steps."""
    outbox: list[Outgoing] = field(default_factory=list)
    to_self: deque[Message] = field(default_factory=deque)
    preemptions: list[Preemption] = field(default_factory=list)
    untidy_after: TransitionId | None = None
    """The last change, if memory is to be cleared up behind it."""

    @property
    def me(self) -> InstanceId:
        """The instance's id."""
        return self.config.instance_id

    @property
    def spec(self) -> InstanceSpec:
        """What the instance is made of."""
        return self.body.spec

    @property
    def whole_model(self) -> LayerRange:
        """Every layer."""
        return LayerRange(0, self.spec.num_layers)

    def send(self, dst: InstanceId | None, message: Message, hidden: Any = None) -> None:
        """Queue a message, also one to this instance itself."""
        if dst == self.me:
            self.to_self.append(message)
        else:
            self.outbox.append(Outgoing(dst, message, hidden))

    def step_ended(self, now_s: float, *, is_calm: bool) -> None:
        """The body computes nothing now, or the step that was behind this one.

        Copies to host memory may go on beside further steps, but beside nothing else.
        """
        if not is_calm:
            self.body.end_copies()
        self.is_running, self.is_ahead = self.is_ahead, False
        self.step_s = max(now_s - self.began_s, STEP_MEMORY * self.step_s)
        self.began_s = now_s

    def await_tidying(self, transition_id: TransitionId) -> float:
        """Seconds of clearing up behind a change; while some is left, ``tell_tidied`` will tell."""
        tidied_s = self.body.memory.tidied_s
        self.untidy_after = transition_id if tidied_s is None else None
        return tidied_s or 0.0

    def tell_tidied(self) -> None:
        """Say once that nothing is left of the last change."""
        tidied_s = self.body.memory.tidied_s
        if self.untidy_after is not None and tidied_s is not None:
            self.send(None, Tidied(self.untidy_after, self.me, tidied_s))
            self.untidy_after = None

    def note_preemption(self, request_id: RequestId, lost_tokens: int) -> None:
        """A change cost a request its KV."""
        self.preemptions.append(Preemption(request_id, lost_tokens))
        self.totals.note_preemption(lost_tokens)

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        """Move blocks that the table has moved, if any: not while they are being copied."""
        if copies:
            self.body.end_copies()
            self.body.memory.copy_units(copies)

    def free(self, request_id: RequestId) -> None:
        """Forget a request that no transfer touches."""
        self.table.release(request_id)
        self.body.forget(request_id)

    def keep_only(self, layers: LayerRange) -> Remap:
        """Drop held layers outside ``layers``: their memory becomes KV memory (paper 4.1)."""
        if self.held == layers:
            remap = Remap(self.table.num_units, 0, 0.0)
        else:
            self.mover.offer_layers(layers)
            remap = self.body.memory.drop(layers)
            self.held = layers
        self.table.set_layers(layers, remap.kv_units)
        return remap
