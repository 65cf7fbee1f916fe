"""What ``/metrics`` and the dashboard show when several fronts share the work."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest

from kunserve.cluster.api import EngineClient
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metrics import LAG_BUCKETS, LOOP_LAG, register_process
from kunserve.server.telemetry.request_metrics import REASONS, RecentValues
from kunserve.server.telemetry.sampler import Sampler
from kunserve_extras.dashboard.timeline import Timeline
from kunserve_extras.fronts.tally import Tally, counts_of
from kunserve_extras.fronts.wire import Counted, News

_HERE = -1
"""Stands for this process among the fronts."""
COUNT_S = 1.0
"""How long fronts may take to tell their counters; then what they last told counts."""


class ServerAccounts:
    """The controller's process keeps these: of the cluster, and the sum over all fronts."""

    def __init__(
        self, engine: EngineClient, model_name: str, ask_all: Callable[[], set[int]]
    ) -> None:
        """``ask_all`` wants counters of all fronts, and says of which."""
        self._engine = engine
        self._model_name = model_name
        self._ask_all = ask_all
        self._tally = Tally()
        self._awaited: set[int] = set()
        self._all_told = asyncio.Event()
        self._counts: dict[int, Counted] = {}
        self._ended: Counter[str] = Counter()
        self.cluster = ClusterMetrics(engine, model_name)
        self.recent_first_token = RecentValues()
        self.recent_per_token = RecentValues()
        self.loop_lag = Histogram(LAG_BUCKETS)
        """Of this process."""
        self.timeline = Timeline(self)
        self.sampler = Sampler(self)
        self.sampler.watchers.append(self.timeline.sample)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._tally)
        self._registry.register(self.cluster)
        register_process(self._registry)

    # What fronts tell

    def told(self, front: int, counted: Counted) -> None:
        """A front's word, several times a second."""
        self._counts[front] = counted
        now_s = time.monotonic()
        for value in counted.first_token_s:
            self.recent_first_token.add(now_s, value)
        for value in counted.per_token_s:
            self.recent_per_token.add(now_s, value)
        if counted.families is not None:
            self._tally.told(front, counted.families)
            self._heard(front)

    def ended(self, front: int) -> None:
        """A front's process is over: what it counted still counts."""
        counted = self._counts.pop(front, None)
        if counted is not None:
            self._ended += Counter(_totals(counted))
        self._tally.ended(front)
        self._heard(front)

    def _heard(self, front: int) -> None:
        self._awaited.discard(front)
        if not self._awaited:
            self._all_told.set()

    # What is shown

    def _sum(self) -> Counter[str]:
        whole = Counter(self._ended)
        for counted in self._counts.values():
            whole.update(_totals(counted))
        return whole

    @property
    def arrivals(self) -> int:
        """Requests that were taken, over all fronts; as are the next two."""
        return self._sum()["arrivals"]

    @property
    def generation_tokens(self) -> int:
        """Output tokens."""
        return self._sum()["generation_tokens"]

    @property
    def refusals(self) -> dict[str, int]:
        """Refused requests, by reason."""
        whole = self._sum()
        return {reason: whole[f"refused {reason}"] for reason in REASONS}

    @property
    def num_counting(self) -> int:
        """Fronts that serve, because they count."""
        return len(self._counts)

    @property
    def num_in_flight(self) -> int:
        """HTTP requests whose answer is not complete, over all fronts."""
        return sum(counted.num_in_flight for counted in self._counts.values())

    def news(self) -> News:
        """How the cluster is now."""
        engine = self._engine
        return News(
            engine.state(),
            engine.vitals(),
            engine.is_healthy(),
            engine.is_progressing(),
            engine.num_unfinished(),
        )

    async def metrics(self) -> bytes:
        """The text of ``/metrics``: of the cluster, and summed over fronts."""
        self._all_told.clear()
        self._awaited |= self._ask_all()
        try:
            async with asyncio.timeout(COUNT_S):
                while self._awaited:
                    await self._all_told.wait()
                    self._all_told.clear()
        except TimeoutError:
            self._awaited.clear()
        self.cluster.observe()
        lag = LOOP_LAG.metric(self.loop_lag, self._model_name)
        self._tally.told(_HERE, counts_of([lag]))
        return generate_latest(self._registry)

    def timeline_view(self, since_s: float | None) -> bytes:
        """``/kunserve/timeline`` in JSON."""
        return self.timeline.view(since_s)


def _totals(counted: Counted) -> dict[str, int]:
    refused = {f"refused {reason}": count for reason, count in counted.refusals.items()}
    return {
        "arrivals": counted.arrivals,
        "generation_tokens": counted.generation_tokens,
    } | refused
