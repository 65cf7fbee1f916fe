"""Looks at the cluster five times a second, whether or not anybody asks for metrics."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from kunserve.core.snapshots import ClusterState
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics
from kunserve.server.telemetry.histogram import Histogram

PERIOD_S = 0.2


class Sampled(Protocol):
    """Whose figures need looks: a front's, or those of several."""

    loop_lag: Histogram
    cluster: ClusterMetrics


class Sampler:
    """What is summed over time is summed up, the event loop's lag measured, watchers told."""

    def __init__(self, metrics: Sampled) -> None:
        self._metrics = metrics
        self.watchers: list[Callable[[ClusterState], None]] = []

    def look(self) -> None:
        """Once, now."""
        state = self._metrics.cluster.observe()
        for watch in self.watchers:
            watch(state)

    async def run(self) -> None:
        """For ever; cancelled when the application stops."""
        while True:
            self.look()
            due_s = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._metrics.loop_lag.observe(max(0.0, time.monotonic() - due_s))
