"""Frozen views that decisions are made on."""

from dataclasses import dataclass

from kunserve.core.ids import GroupId, InstanceId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance is made of. Never changes while it lives."""

    instance_id: InstanceId
    num_layers: int
    block_size: int
    unit_bytes: int
    layer_bytes: int
    memory_bytes: int
    """The instance's whole arena."""
    kv_units: int
    """KV units when every layer is held."""
    granule_bytes: int

    def units_when_holding(self, num_layers: int) -> int:
        """KV units once ``self.num_layers - num_layers`` contiguous layers are dropped.

        Whole granules only: at worst one granule at each end of the run stays with the weights.
        """
        dropped_bytes = (self.num_layers - num_layers) * self.layer_bytes
        if dropped_bytes <= 0:
            return self.kv_units
        granules = max(0, dropped_bytes // self.granule_bytes - 1)
        return self.kv_units + granules * self.granule_bytes // self.unit_bytes

    def blocks_when_holding(self, num_layers: int) -> int:
        """KV blocks of a stage that computes ``num_layers`` layers."""
        return self.units_when_holding(num_layers) // num_layers


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A leader's account of its group, sent about ten times a second and on sharp change."""

    group_id: GroupId
    sequence_number: int
    """Counts this leader's reports, so that an old one is not taken for news."""
    num_received: int
    """Requests the leader has accepted so far: what was sent after it is not in this report."""
    num_running: int
    num_waiting: int
    used_blocks: int
    capacity_blocks: int
    growth_blocks: int
    """Blocks that the running requests are still expected to need."""
    head_of_line_blocks: int
    """Blocks that the first waiting request needs."""
    waiting_blocks: int
    """Blocks that all waiting requests need."""
    waiting_tokens: int
    """Prompt tokens of all waiting requests not yet computed."""
    num_stalled: int
    """Requests that wait for their KV in an exchange."""
    num_preemptions: int
    lost_tokens: int
    """Tokens of KV thrown away by preemptions so far."""
    prompt_tokens: int
    """Prompt tokens computed so far (recomputation included)."""
    generation_tokens: int
    stuck_s: float
    """Seconds since the last completed step while there was work; 0 when idle."""
    largest_request_blocks: int
    """Blocks the largest live request may come to need: some pool must hold it after a restore."""
    largest_expected_blocks: int
    """Blocks the largest live request is expected to need: how unevenly they part at most."""

    @property
    def demand_blocks(self) -> int:
        """Running demand with growth, plus the queue's head (Llumnix's virtual usage)."""
        return self.used_blocks + self.growth_blocks + self.head_of_line_blocks


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """One instance as the controller sees it."""

    spec: InstanceSpec
    alive: bool
    held: LayerRange
    """Layers whose weights are in memory."""
    kv_units: int

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


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """One drop or restore, finished or not, as measured."""

    transition_id: TransitionId
    kind: str
    """``drop``, ``restore`` or ``recover``."""
    trigger: str
    """Why: the demand and capacity seen, ``admin``, or the instance that died."""
    started_s: float
    """On the controller's clock, as is every time here."""
    committed_s: float | None
    finished_s: float | None
    outcome: str
    """``running``, ``done``, ``rolled back: ...`` or ``failed: ...``."""
    groups_before: tuple[GroupLayout, ...]
    groups_after: tuple[GroupLayout, ...]
    freed_bytes: int
    remap_s: float
    """Slowest member."""
    gap_s: float
    requests_moved: int
    moved_bytes: int
    max_stall_s: float


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Everything ``GET /kunserve/state`` and the dashboard show."""

    now_s: float
    instances: tuple[InstanceSnapshot, ...]
    groups: tuple[GroupLayout, ...]
    loads: tuple[LoadReport, ...]
    """One per group, in the same order."""
    transitions: tuple[TransitionRecord, ...]
    """Most recent last; bounded."""
    num_drops: int
    num_restores: int
    stage_times: tuple[StageTime, ...] = ()
    """The last of every instance in a pipeline, those of pipelines that are gone included."""
