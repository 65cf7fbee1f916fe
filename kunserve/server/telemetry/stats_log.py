"""The line every ten seconds that operators know from vLLM."""

import asyncio
import logging
import time

from kunserve.core.ids import InstanceId
from kunserve.core.load import LeaderTotals, LoadReport
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics

logger = logging.getLogger("kunserve.server")

PERIOD_S = 10.0


class StatsLog:
    """One line per group that did something since the last one."""

    def __init__(self, cluster: ClusterMetrics, period_s: float = PERIOD_S) -> None:
        self._cluster = cluster
        self._period_s = period_s
        self._before: dict[InstanceId, LeaderTotals] = {}
        self._last_s = time.monotonic()

    async def run(self) -> None:
        """Log for ever; cancelled when the application stops."""
        while True:
            await asyncio.sleep(self._period_s)
            for line in self.lines(time.monotonic()):
                logger.info("%s", line)

    def lines(self, now_s: float) -> list[str]:
        """The lines due now; counts from the previous call on."""
        elapsed_s = max(1e-9, now_s - self._last_s)
        self._last_s = now_s
        state = self._cluster.observe()
        # A member that led a group of its own until lately has a part in what the group did.
        done_by = {
            one.spec.instance_id: one.totals.since(
                self._before.get(one.spec.instance_id, LeaderTotals())
            )
            for one in state.instances
        }
        self._before = {one.spec.instance_id: one.totals for one in state.instances}
        lines = []
        for group, load in state.loads_by_group():
            if load is None:
                continue
            done = LeaderTotals()
            for member in group.members:
                done += done_by.get(member, LeaderTotals())
            if done == LeaderTotals() and not load.num_running and not load.num_waiting:
                continue
            prompt_rate = done.prompt_tokens / elapsed_s
            generation_rate = done.generation_tokens / elapsed_s
            preemptions = done.num_preemptions
            lines.append(
                f"Engine {group.leader:03d}: "
                f"Avg prompt throughput: {prompt_rate:.1f} tokens/s, "
                f"Avg generation throughput: {generation_rate:.1f} tokens/s, "
                f"{_load_text(load)}, Prefix cache hit rate: {_hit_percent(done):.1f}%, "
                f"Preemptions: {preemptions}, Stages: {len(group.stages)}"
            )
        return lines


def _hit_percent(done: LeaderTotals) -> float:
    return 100.0 * done.prefix_hit_tokens / max(1, done.prefix_queried_tokens)


def _load_text(load: LoadReport) -> str:
    usage = 100.0 * load.used_blocks / max(1, load.capacity_blocks)
    return (
        f"Running: {load.num_running} reqs, Waiting: {load.num_waiting} reqs, "
        f"GPU KV cache usage: {usage:.1f}%"
    )
