"""What ``/metrics`` tells of the cluster: as it is, and what was counted of it."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kunserve.cluster.api import EngineClient
from kunserve.core.ids import InstanceId
from kunserve.core.snapshots import ClusterState
from kunserve.server.telemetry import (
    process_metrics,
    queueing_avoided,
    stage_metrics,
    transition_metrics,
)
from kunserve.server.telemetry.block_rows import BLOCK_ROWS
from kunserve.server.telemetry.cluster_rows import (
    CLUSTER_ROWS,
    GROUP_ROWS,
    HOST_MEMORY_ROWS,
    INSTANCE_ROWS,
    OVERLOAD_ROWS,
    Look,
)
from kunserve.server.telemetry.metric_row import Row, metrics_of
from kunserve.server.telemetry.pod_rows import POD_ROWS
from kunserve.server.telemetry.process_metrics import ProcessMetrics
from kunserve.server.telemetry.queueing_avoided import DroppedTime, QueueingAvoided
from kunserve.server.telemetry.stage_metrics import StageMetrics
from kunserve.server.telemetry.transition_metrics import TransitionMetrics

_LOOKED_AT = (*GROUP_ROWS, *POD_ROWS, *INSTANCE_ROWS, *BLOCK_ROWS, *CLUSTER_ROWS)
ROWS: tuple[Row[Any], ...] = (
    *_LOOKED_AT,
    *transition_metrics.ROWS,
    *OVERLOAD_ROWS,
    *HOST_MEMORY_ROWS,
    *queueing_avoided.AVOIDED_ROWS,
    *queueing_avoided.DROPPED_ROWS,
    *stage_metrics.ROWS,
    *process_metrics.ROWS,
)


class ClusterMetrics(Collector):
    """Reads ``engine.state()`` at each ``observe``; exports what it has seen so far."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._stages = StageMetrics()
        self._transitions = TransitionMetrics(engine.state())
        self._processes = ProcessMetrics()
        self.avoided = QueueingAvoided()
        self._dropped_time = DroppedTime()
        self._state = self.observe()

    def bubble_ratio(self, leader: InstanceId) -> float | None:
        """Idle share of the stages that the instance leads; None if it is none, or new."""
        return self._stages.ratios.get(leader)

    def observe(self) -> ClusterState:
        """Take a snapshot and add what is new in it to the counters."""
        state = self._state = self._engine.state()
        self._transitions.observe(state)
        self._stages.observe(state)
        self.avoided.observe(state)
        self._dropped_time.observe(state)
        return state

    def collect(self) -> Iterable[Metric]:
        """Everything, as of the last ``observe``."""
        model, vitals = self._model_name, self._engine.vitals()
        look = Look(self._state, vitals)
        borrowed = {one.spec.instance_id: one.spec.borrowed_bytes for one in self._state.instances}
        self._processes.look(dict(vitals.pids), borrowed)
        return chain(
            metrics_of(_LOOKED_AT, look, model),
            metrics_of(transition_metrics.ROWS, self._transitions, model),
            metrics_of((*OVERLOAD_ROWS, *HOST_MEMORY_ROWS), look, model),
            metrics_of(queueing_avoided.AVOIDED_ROWS, self.avoided, model),
            metrics_of(queueing_avoided.DROPPED_ROWS, self._dropped_time, model),
            metrics_of(stage_metrics.ROWS, self._stages, model),
            metrics_of(process_metrics.ROWS, self._processes, model),
        )
