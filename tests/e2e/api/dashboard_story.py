"""What the dashboard is shown: a cluster of four that meets a burst, drops twice, restores once.

  0 s  four instances, each a group of its own
 80 s  the burst begins
110 s  drop 0: groups 0 and 1 become group 4
122 s  drop 1 is rolled back
130 s  drop 2: groups 2 and 3 become group 5
200 s  restore 3: group 4 becomes groups 6 and 7
240 s  the story's end
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.load import LeaderTotals, LoadReport
from kunserve.core.snapshots import (
    ClusterState,
    FormingGroup,
    InstanceSnapshot,
    InstanceSpec,
    Kind,
    Outcome,
    StageTime,
    TransitionRecord,
)
from kunserve.server.telemetry.metrics import FrontMetrics
from kunserve.server.telemetry.request_metrics import RecentValues
from kunserve_extras.dashboard.timeline import PERIOD_S
from tests.specs import instance_spec
from tests.unit.server.echo_engine import EchoEngine, group_of, idle_load
from tests.unit.server.live_server import LiveServer

MIB = 1 << 20
LAYERS, HALF, INSTANCES = 30, 15, 4
IDLE_SHARE = 0.25
BURST_S, DROP_S, ROLLBACK_S, SECOND_DROP_S, RESTORE_S, END_S = 80, 110, 122, 130, 200, 240
TRIGGER = "demand 431 of 407 blocks; head of queue does not fit"


def spec_of(instance_id: int) -> InstanceSpec:
    """Like SmolLM2-135M with 400 MiB: 156 MiB for KV before a drop."""
    unit_bytes, layer_bytes = 12288, 7_080_192
    kv_units = 144 * MIB // unit_bytes
    return instance_spec(
        instance_id,
        LAYERS,
        kv_units,
        unit_bytes=unit_bytes,
        layer_bytes=layer_bytes,
        granule_bytes=MIB // 4,
        memory_bytes=400 * MIB,
    )


def whole(group_id: int, instance_id: int) -> GroupLayout:
    return group_of(group_id, (instance_id, 0, LAYERS))


def halves(group_id: int, first: int, second: int) -> GroupLayout:
    return group_of(group_id, (first, 0, HALF), (second, HALF, LAYERS))


def groups_at(t_s: float) -> tuple[GroupLayout, ...]:
    left: tuple[GroupLayout, ...] = (whole(0, 0), whole(1, 1))
    if t_s >= DROP_S:
        left = (halves(4, 0, 1),) if t_s < RESTORE_S else (whole(6, 0), whole(7, 1))
    right = (whole(2, 2), whole(3, 3)) if t_s < SECOND_DROP_S else (halves(5, 2, 3),)
    return left + right


REFUSAL = "instance 3: a layer is being loaded"


def transitions_at(t_s: float, trigger: str = TRIGGER) -> Iterator[TransitionRecord]:
    left, right = (whole(0, 0), whole(1, 1)), (whole(2, 2), whole(3, 3))
    split = (whole(6, 0), whole(7, 1))
    freed = 2 * HALF * spec_of(0).layer_bytes
    for number, kind, began_s, took_s, old, new, refusal in (
        (0, Kind.DROP, DROP_S, 1.9, left, (halves(4, 0, 1),), None),
        (1, Kind.DROP, ROLLBACK_S, 0.2, right, (halves(8, 2, 3),), REFUSAL),
        (2, Kind.DROP, SECOND_DROP_S, 2.6, right, (halves(5, 2, 3),), None),
        (3, Kind.RESTORE, RESTORE_S - 4, 6.0, (halves(4, 0, 1),), split, None),
    ):
        if t_s < began_s:
            return
        committed, is_over = refusal is None, t_s >= began_s + took_s
        ending = Outcome.DONE if committed else Outcome.ROLLED_BACK
        yield TransitionRecord(
            transition_id=TransitionId(number),
            kind=kind,
            trigger=trigger if kind == "drop" else "need 98 of 814 blocks undropped for 3.0 s",
            started_s=began_s,
            committed_s=(began_s + 0.04 if kind == "drop" else RESTORE_S) if committed else None,
            finished_s=began_s + took_s if is_over else None,
            outcome=ending if is_over else Outcome.RUNNING,
            reason=refusal if is_over else None,
            groups_before=old,
            groups_after=new,
            freed_bytes=(freed if kind == "drop" else -freed) if committed else 0,
            remap_s=0.00231 if committed else 0.0,
            gap_s=0.0118 if committed else 0.0,
            requests_moved=23 + number if committed else 0,
            moved_bytes=(61 + number) * MIB if committed else 0,
            max_stall_s=0.412 if committed else 0.0,
        )


def pressure_at(t_s: float) -> float:
    """Blocks that each instance's share of the requests would like to have."""
    burst = 1 / (1 + math.exp((BURST_S + 20 - t_s) / 7)) / (1 + math.exp((t_s - 176) / 7))
    return 130 + 480 * burst + 12 * math.sin(t_s / 3.1) + 7 * math.sin(t_s * 1.7)


def load_of(group: GroupLayout, t_s: float, traffic: bool) -> LoadReport:
    spec, stages = spec_of(0), len(group.stages)
    capacity = min(spec.blocks_when_holding(stage.layers.num_layers) for stage in group.stages)
    report = replace(idle_load(group.group_id), capacity_blocks=capacity)
    if not traffic:
        return report
    wanted = round(pressure_at(t_s + 2 * group.group_id) * stages)
    used = min(capacity, round(wanted * 0.9))
    beyond = max(0, wanted - capacity)
    return replace(
        report,
        num_running=used // 28,
        num_waiting=beyond // 40,
        used_blocks=used,
        growth_blocks=min(capacity - used, wanted - used) + beyond // 4,
        head_of_line_blocks=min(40, beyond),
        waiting_blocks=beyond,
        num_stalled=3 if 0 <= t_s - SECOND_DROP_S < 2.6 and stages > 1 else 0,
        totals=LeaderTotals(num_preemptions=4 if t_s > DROP_S else 0),
    )


def stage_times_of(group: GroupLayout, t_s: float) -> Iterator[StageTime]:
    """A pipeline that never rests, and whose last stage waits for a fourth of its time."""
    began_s = {4: DROP_S, 5: SECOND_DROP_S}.get(group.group_id)
    if began_s is None:
        return
    for stage in group.stages:
        is_leader = stage.instance_id == group.leader
        active_s = t_s - began_s
        busy_s = active_s * (1.0 if is_leader else 1.0 - IDLE_SHARE)
        yield StageTime(
            stage.instance_id, group.group_id, 2, busy_s, active_s if is_leader else None
        )


@dataclass
class StoryEngine(EchoEngine):
    """Shows the story as it is at ``at_s``."""

    traffic: bool = True
    dead: frozenset[int] = frozenset()
    trigger: str = TRIGGER
    reasons: tuple[str, ...] = ()
    is_scale_up_wanted: bool = False
    forming_s: float | None = None
    """How long the first group has formed; None: none does."""
    _began_s: float = field(default_factory=time.monotonic)
    at_s: float = 0.0
    runs: bool = True
    """Whether time goes on from there."""

    def state(self) -> ClusterState:
        t_s = self.at_s + (time.monotonic() - self._began_s if self.runs else 0.0)
        groups = groups_at(t_s) if self.traffic else groups_at(0.0)
        groups = tuple(one for group in groups for one in self._survivors(group))
        held = {stage.instance_id: stage.layers for group in groups for stage in group.stages}
        instances = []
        for number in range(INSTANCES):
            layers = held.get(InstanceId(number), LayerRange(0, 0))
            spec = spec_of(number)
            units = spec.units_when_holding(layers.num_layers) if layers.num_layers else 0
            instances.append(InstanceSnapshot(spec, number not in self.dead, layers, units))
        transitions = tuple(transitions_at(t_s, self.trigger)) if self.traffic else ()
        done = [record for record in transitions if record.outcome == "done"]
        forming: tuple[FormingGroup, ...] = ()
        if self.forming_s is not None:
            first = groups[0]
            forming = (FormingGroup(first.group_id, first.members, t_s - self.forming_s),)
        return ClusterState(
            now_s=t_s,
            forming=forming,
            instances=tuple(instances),
            groups=groups,
            loads=tuple(load_of(group, t_s, self.traffic) for group in groups),
            transitions=transitions,
            num_drops=sum(record.kind == "drop" for record in done),
            num_restores=sum(record.kind == "restore" for record in done),
            reasons=self.reasons,
            is_scale_up_wanted=self.is_scale_up_wanted,
            stage_times=tuple(time for group in groups for time in stage_times_of(group, t_s)),
        )

    def _survivors(self, group: GroupLayout) -> Iterator[GroupLayout]:
        if not self.dead & set(group.members):
            yield group
            return
        for member in group.members:
            if member not in self.dead:
                yield whole(10 + member, member)

    def jump(self, at_s: float) -> None:
        """The time is ``at_s`` now."""
        self.at_s, self._began_s = at_s, time.monotonic()


def tell(server: LiveServer, until_s: float = END_S) -> None:
    """Have the server live through the story in a moment; time then stands at ``until_s``."""
    engine, front = server.engine, server.front
    assert isinstance(engine, StoryEngine)
    metrics = front.metrics

    def live() -> None:
        engine.runs = False
        for step in range(round(until_s / PERIOD_S)):
            t_s = step * PERIOD_S
            engine.jump(t_s)
            _feel(metrics, t_s)
            front.sampler.look()
        engine.jump(until_s)

    server.call(live)


def _feel(metrics: FrontMetrics, t_s: float) -> None:
    """What clients would have measured about then."""
    pressure = pressure_at(t_s)
    capacity = 390 if t_s < DROP_S + 2 else 640
    queue_s = max(0.0, pressure - capacity) / 60
    first_s = 0.11 + 0.03 * math.sin(t_s / 2) + queue_s
    token_s = 0.031 + pressure / 40_000 + (0.006 if DROP_S < t_s < RESTORE_S else 0.0)
    metrics.arrivals += max(0, round(pressure * PERIOD_S / 50 + math.sin(t_s * 5.3)) - 1)
    metrics.refusals["max_num_queued_reqs"] += pressure > 600
    metrics.generation_tokens += round(pressure / 4)
    metrics.recent_first_token = RecentValues()
    metrics.recent_per_token = RecentValues()
    now_s = time.monotonic()
    for factor in (1.0, 1.1, 1.6 + 0.4 * math.sin(t_s)):
        metrics.recent_first_token.add(now_s, first_s * factor)
        metrics.recent_per_token.add(now_s, token_s * (0.8 + factor / 5))
