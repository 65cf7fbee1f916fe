"""The last minutes of the cluster, sampled for people: ``GET /kunserve/timeline``."""

import asyncio
import time
import uuid
from collections import deque
from typing import Any, Protocol

from kunserve.core.ids import TransitionId
from kunserve.core.snapshots import ClusterState, TransitionRecord
from kunserve.server.cluster_metrics import ClusterMetrics
from kunserve.server.histogram import Histogram
from kunserve.server.request_metrics import RecentValues
from kunserve.server.state_json import record_object

PERIOD_S = 0.2
KEPT_S = 1200.0


class Measured(Protocol):
    """Whose figures are sampled: a front's, or those of several."""

    recent_first_token: RecentValues
    recent_per_token: RecentValues
    loop_lag: Histogram
    cluster: ClusterMetrics

    @property
    def arrivals(self) -> int:
        """Requests that were taken; as are the next two, so far."""
        ...

    @property
    def refusals(self) -> dict[str, int]:
        """Refused ones, by reason."""
        ...

    @property
    def generation_tokens(self) -> int:
        """Output tokens."""
        ...


class Timeline:
    """A bounded ring of samples. Times are the controller's clock; ``unix_s`` ties it to ours."""

    def __init__(
        self, metrics: Measured, period_s: float = PERIOD_S, kept_s: float = KEPT_S
    ) -> None:
        self._metrics = metrics
        self._period_s = period_s
        self._samples: deque[dict[str, Any]] = deque(maxlen=max(1, int(kept_s / period_s)))
        self._transitions: dict[TransitionId, TransitionRecord] = {}
        self._run_id = uuid.uuid4().hex

    async def run(self) -> None:
        """Sample for ever; cancelled when the application stops."""
        while True:
            self.sample()
            due_s = time.monotonic() + self._period_s
            await asyncio.sleep(self._period_s)
            self._metrics.loop_lag.observe(max(0.0, time.monotonic() - due_s))

    def sample(self) -> None:
        """Take one sample now."""
        metrics = self._metrics
        state = metrics.cluster.observe()
        for record in state.transitions:
            self._transitions[record.transition_id] = record
        while len(self._transitions) > 1000:
            del self._transitions[next(iter(self._transitions))]
        now_s = time.monotonic()
        first_p50, first_p99 = metrics.recent_first_token.percentiles(now_s, 0.5, 0.99)
        token_p50, token_p99 = metrics.recent_per_token.percentiles(now_s, 0.5, 0.99)
        self._samples.append(
            {
                "t_s": state.now_s,
                "unix_s": time.time(),
                "groups": _groups(state, metrics.cluster),
                "num_running": sum(load.num_running for load in state.loads),
                "num_waiting": state.num_waiting,
                "num_dropped_instances": sum(
                    instance.dropped_bytes > 0 for instance in state.instances
                ),
                "num_in_freed_memory": metrics.cluster.savings.num_requests,
                "queueing_avoided_s": metrics.cluster.savings.request_s,
                "ttft_count": metrics.recent_first_token.count(now_s),
                "ttft_p50_s": first_p50,
                "ttft_p99_s": first_p99,
                "tpot_p50_s": token_p50,
                "tpot_p99_s": token_p99,
                "arrivals": metrics.arrivals,
                "refusals": sum(metrics.refusals.values()),
                "generation_tokens": metrics.generation_tokens,
            }
        )

    def view(self, since_s: float | None) -> dict[str, Any]:
        """Samples and ends of transitions later than ``since_s`` (all if None), and what runs.

        Another ``run_id`` than before means another run of the server: its times and
        transition ids have nothing to do with the last one's.
        """
        samples = [one for one in self._samples if since_s is None or one["t_s"] > since_s]
        transitions = [
            record
            for record in self._transitions.values()
            if since_s is None or record.finished_s is None or record.finished_s > since_s
        ]
        return {
            "run_id": self._run_id,
            "period_s": self._period_s,
            "samples": samples,
            "transitions": [record_object(record) for record in transitions],
        }


def _groups(state: ClusterState, metrics: ClusterMetrics) -> list[dict[str, Any]]:
    return [
        {
            "group_id": group.group_id,
            "leader": group.leader,
            "num_stages": len(group.stages),
            "used_blocks": load.used_blocks,
            "capacity_blocks": load.capacity_blocks,
            "demand_blocks": load.demand_blocks,
            "need_blocks": load.used_blocks + load.growth_blocks + load.waiting_blocks,
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "bubble_ratio": metrics.bubble_ratio(group.leader),
        }
        for group, load in state.loads_by_group()
        if load is not None
    ]
