"""Frozen views that decisions are made on, and that people see."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from kunserve.core.ids import GroupId, InstanceId, TransitionId
from kunserve.core.kv_blocks import KvBlocks, KvRing
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.load import LeaderTotals, LoadReport
from kunserve.core.place import ONE_HOST, Place


class HeadShape(NamedTuple):
    """An output head that a pipeline's stages can compute together."""

    num_rows: int
    """Tokens of the vocabulary."""
    cost_layers: float
    """What all rows cost, in layers."""
    leader_layers: float = 0.0
    """What the first stage does beside layers and rows, in layers: it plans and samples."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance is made of. Never changes while it lives."""

    instance_id: InstanceId
    num_layers: int
    block_size: int
    unit_bytes: int
    layer_bytes: int
    memory_bytes: int
    """The instance's whole arena, and its part of weights that it shares."""
    kv_units: int
    """KV units when every layer is held."""
    granule_bytes: int
    head: HeadShape | None = None
    """None: the last stage of a pipeline computes the output head alone."""
    place: Place = ONE_HOST
    tensor_parallel_size: int = 1
    """Ranks. Bytes of units and layers are those of all of them, and so is a granule: one of each.
    Instances of other sizes cut units and layers otherwise, so none takes another's."""
    kv_ring: KvRing | None = None
    """How KV of layers with a window is kept; None: whole, as that of the others."""
    shared_weights_bytes: int = 0
    """Weights of which its node has one copy for all its instances, so that a drop would free
    nothing. 0: they are its own."""

    @property
    def blocks(self) -> KvBlocks:
        """How many blocks a request's tokens take."""
        return KvBlocks(self.block_size, self.kv_ring)

    @property
    def borrowed_bytes(self) -> int:
        """Of shared weights, what counts as memory of other instances."""
        if not self.shared_weights_bytes:
            return 0
        part = self.memory_bytes - self.kv_units * self.unit_bytes
        return max(0, self.shared_weights_bytes - part)

    def units_when_holding(self, num_layers: int) -> int:
        """KV units that every body promises once it holds so many contiguous layers only.

        Everybody counts on this number before a remap has happened. Only whole granules change
        hands: at worst one at each end of the run kept stays with the weights, wherever it lies.
        """
        dropped_bytes = (self.num_layers - num_layers) * self.layer_bytes
        if dropped_bytes <= 0 or self.shared_weights_bytes:
            return self.kv_units
        granules = max(0, dropped_bytes // self.granule_bytes - 1)
        return self.kv_units + granules * self.granule_bytes // self.unit_bytes

    def backed_units(self, held: LayerRange) -> int:
        """KV units in memory while exactly these layers are held, at least the promise.

        For bodies without an arena of their own. Weights begin at a granule, layer after layer.
        """
        first = held.first * self.layer_bytes // self.granule_bytes
        end = -(-held.end * self.layer_bytes // self.granule_bytes)
        weights = -(-self.num_layers * self.layer_bytes // self.granule_bytes)
        freed = weights - (end - first)
        return self.kv_units + freed * self.granule_bytes // self.unit_bytes

    def blocks_when_holding(self, num_layers: int) -> int:
        """KV blocks of a stage that computes ``num_layers`` layers."""
        return self.units_when_holding(num_layers) // num_layers


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """One instance as the controller sees it."""

    spec: InstanceSpec
    alive: bool
    held: LayerRange
    """Layers whose weights are in memory."""
    kv_units: int
    totals: LeaderTotals = field(default_factory=LeaderTotals)
    """Over all processes that the instance ever had: they only grow."""

    @property
    def dropped_bytes(self) -> int:
        """Weight bytes that serve as KV memory now."""
        return (self.spec.num_layers - self.held.num_layers) * self.spec.layer_bytes


@dataclass(frozen=True, slots=True)
class StageTime:
    """An instance's account of the pipeline it stands in, sent with reports; since it formed."""

    instance_id: InstanceId
    group_id: GroupId
    num_stages: int
    busy_s: float
    """Computing."""
    active_s: float | None
    """With microbatches in flight anywhere in the group; only the leader knows."""


class Kind(enum.StrEnum):
    """What a transition does."""

    DROP = "drop"
    RESTORE = "restore"


class Outcome(enum.StrEnum):
    """How far a transition has come."""

    RUNNING = "running"
    DONE = "done"
    ROLLED_BACK = "rolled back"
    """Before its commit: nothing has changed."""
    FAILED = "failed"
    """After its commit: its members formed groups anew."""


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """One drop or restore, finished or not, as measured."""

    transition_id: TransitionId
    kind: Kind
    trigger: str
    """Why: the demand and capacity seen, or ``admin``."""
    started_s: float
    """On the controller's clock, as is every time here."""
    groups_before: tuple[GroupLayout, ...]
    groups_after: tuple[GroupLayout, ...]
    committed_s: float | None = None
    finished_s: float | None = None
    outcome: Outcome = Outcome.RUNNING
    reason: str | None = None
    """Why it was rolled back, or failed."""
    freed_bytes: int = 0
    remap_s: float = 0.0
    """Slowest member."""
    gap_s: float = 0.0
    prepare_s: float = 0.0
    """What mapping memory before the remap took between steps, on the slowest member."""
    tidy_s: float = 0.0
    """And unmapping it behind, as far as that is over; it may be after the end."""
    requests_moved: int = 0
    moved_bytes: int = 0
    max_stall_s: float = 0.0

    @property
    def ending(self) -> str:
        """The outcome with its reason, for people."""
        outcome = self.outcome.value
        return outcome if self.reason is None else f"{outcome}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ObservedDrops:
    """What drops would have done so far, had the overload policy not been ``observe``."""

    num_drops: int = 0
    num_restores: int = 0
    freed_bytes: int = 0
    """Weight bytes that would have become KV memory, summed over these drops."""
    num_requests: int = 0
    """Requests that would have run earlier: per merge the most that would have at one time."""
    wait_s: float = 0.0
    """Waiting that these drops would have avoided, summed over requests."""
    num_merged: int = 0
    """Merges that would stand now."""
    num_requests_now: int = 0
    """Requests that would run now, and wait."""


class ClusterSize(NamedTuple):
    """How many instances there shall be, and how far that has come."""

    wanted: int = 0
    """As many as are to serve: neither those that leave, nor those that could not be started."""
    ordered: int = 0
    """Those of them that have never served yet."""
    leaving: int = 0
    """Beside them: they serve what they have, and go."""
    fewest: int = 0
    """To which the cluster shrinks by itself."""
    most: int | None = None
    """To which it grows by itself; None: it does not."""


UNKNOWN_SIZE = ClusterSize()


class FormingGroup(NamedTuple):
    """A group that takes no requests yet."""

    group_id: GroupId
    members: tuple[InstanceId, ...]
    """Those that still load weights."""
    since_s: float


class CutLink(NamedTuple):
    """Two instances that did not reach each other lately."""

    one: InstanceId
    other: InstanceId
    until_s: float
    """Until then no drop merges them."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Everything ``GET /kunserve/state`` and the dashboard show."""

    now_s: float
    instances: tuple[InstanceSnapshot, ...]
    groups: tuple[GroupLayout, ...]
    loads: tuple[LoadReport, ...]
    """One per group, in the same order: its leader's last, or until there is one its part of what
    its old groups last reported. Running, stalled and waiting requests are those that live now."""
    transitions: tuple[TransitionRecord, ...]
    """Most recent last; bounded."""
    num_drops: int
    num_restores: int
    num_unplaced: int = 0
    """Live requests that no group has: they wait for the first that comes to them."""
    num_moved: int = 0
    """Waiting requests that changed groups so far."""
    num_quarantined: int = 0
    """Requests that ran alone so far, because instances died that ran them among others."""
    num_guilty: int = 0
    """Those of them whose instance died then too: they ended with an error."""
    num_rerun: int = 0
    """Times that a request began anew so far, because instances died that had it."""
    num_deaths: int = 0
    """Instances that died so far."""
    size: ClusterSize = UNKNOWN_SIZE
    is_scale_up_wanted: bool = False
    """Memory was short lately, and dropping did not give enough: more instances would help."""
    reasons: tuple[str, ...] = ()
    """Why nothing is done about groups whose load asks for something: one line per group."""
    paused: bool = False
    """Whether drops and restores are made by hand only."""
    cut_links: tuple[CutLink, ...] = ()
    """Pairs that do not reach each other, though the front reaches both."""
    forming: tuple[FormingGroup, ...] = ()
    """Groups that stand, and take no requests yet."""
    observed: ObservedDrops | None = None
    """None unless the overload policy is ``observe``."""
    stage_times: tuple[StageTime, ...] = ()
    """The last of every instance in a pipeline, those of pipelines that are gone included."""

    @property
    def longest_forming_s(self) -> float:
        """How long the oldest of the forming groups has formed; 0 if none does."""
        return max((self.now_s - one.since_s for one in self.forming), default=0.0)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run, at a leader or for any group."""
        return self.num_unplaced + sum(load.num_waiting for load in self.loads)

    def loads_by_group(self) -> list[tuple[GroupLayout, LoadReport | None]]:
        """Each group with its leader's last report, if there was one yet."""
        loads = {load.group_id: load for load in self.loads}
        return [(group, loads.get(group.group_id)) for group in self.groups]
