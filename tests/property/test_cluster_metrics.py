"""What /metrics says while groups change: every moment's numbers are somebody's, and add up.

The same random lives as in ``test_transitions``, with a scrape after every event: counters never
fall, nor grow once nothing works any more, and the gauges of requests sum to those that live.
"""

from collections import defaultdict
from typing import Any, cast

from hypothesis import settings
from hypothesis.stateful import invariant

from kunserve.cluster.api import EngineClient, Vitals
from kunserve.cluster.in_process import InProcessCluster
from kunserve.core.layout import LayerRange
from kunserve.core.snapshots import ClusterState
from kunserve.server.cluster_metrics import ClusterMetrics
from tests.fake_cluster import FakeCluster
from tests.property.test_transitions import TransitionsMachine

REQUEST_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "kunserve:num_requests_stalled",
)
COUNTERS = ("vllm:num_preemptions_total", "kunserve:lost_tokens_total")


class Engine:
    """The part of an ``EngineClient`` that metrics are read from."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._cluster = cluster

    def state(self) -> ClusterState:
        return self._cluster.controller.state(self._cluster.now_s)

    def vitals(self) -> Vitals:
        return Vitals(len(self._cluster.members), len(self._cluster.dead), 0)


class Scraper:
    """Looks at all metrics, and compares them with the last look and with the truth."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._cluster = cluster
        self._metrics = ClusterMetrics(cast(EngineClient, Engine(cluster)), "fake")
        self.counters: dict[tuple[str, str], float] = {}

    def look(self) -> None:
        self._metrics.observe()
        samples: dict[str, dict[str, float]] = defaultdict(dict)
        for family in self._metrics.collect():
            for sample in family.samples:
                if "engine" in sample.labels:
                    samples[sample.name][sample.labels["engine"]] = sample.value
        live = sum(sum(samples[name].values()) for name in REQUEST_GAUGES)
        assert live == len(self._cluster.unfinished), (samples, self._cluster.unfinished)
        counters = {
            (name, engine): value for name in COUNTERS for engine, value in samples[name].items()
        }
        for instance in Engine(self._cluster).state().instances:
            engine, totals = str(instance.spec.instance_id), instance.totals
            counters["prompt", engine] = totals.prompt_tokens
            counters["generation", engine] = totals.generation_tokens
        for key, value in self.counters.items():
            assert counters[key] >= value, key
        self.counters = counters


class MetricsMachine(TransitionsMachine):
    """Scrapes whenever something has happened."""

    scraper: Scraper
    front_dies = None
    """No such rule here: with a new front all counters begin anew, as Prometheus knows."""

    @invariant()
    def metrics_are_true(self) -> None:
        if not hasattr(self, "cluster"):
            return
        if not hasattr(self, "scraper"):
            self.scraper = Scraper(self.cluster)
        self.scraper.look()

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "scraper"):
            return
        self.cluster.pass_time(0.1)
        self.cluster.run_until_idle()
        self.scraper.look()
        known = self.scraper.counters
        self.change_idle_groups()
        assert self.scraper.counters == known, "counters grow without work"

    def change_idle_groups(self) -> None:
        """Drop and restore once more, with a look after every action."""
        cluster = self.cluster
        for _ in range(2):
            groups = cluster.groups()
            if len(groups) > 1 and len(groups) <= cluster.model.num_layers:
                num = cluster.model.num_layers // len(groups)
                ends = [*(num * i for i in range(1, len(groups))), cluster.model.num_layers]
                whole = LayerRange(0, cluster.model.num_layers)
                if all(len(g.stages) == 1 and g.stages[0].layers == whole for g in groups):
                    first = [0, *ends[:-1]]
                    cluster.drop(
                        *((g.leader, a, b) for g, a, b in zip(groups, first, ends, strict=True))
                    )
            for group in cluster.groups():
                if len(group.stages) > 1:
                    cluster.restore(group)
            while actions := cluster.actions():
                cluster.perform(actions[0])
                self.scraper.look()
            cluster.pass_time(0.1)
            self.scraper.look()


TestMetrics: Any = MetricsMachine.TestCase
TestMetrics.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_a_follower_did_before_it_followed_is_counted_at_once() -> None:
    """It reports no more: its last steps would show when it leads again, on an idle cluster."""
    cluster = FakeCluster(pools=(12, 12))
    for _ in range(6):
        cluster.request(4, 6)
    begin = cluster.num_actions
    cluster.run_except(lambda action: False, lambda: cluster.num_actions >= begin + 30)
    scraper = Scraper(cluster)
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.finish()
    cluster.pass_time(0.1)
    cluster.run_until_idle()
    scraper.look()
    known = scraper.counters
    assert known["generation", "0"] + known["generation", "1"] == 6 * 6
    (group,) = cluster.groups()
    cluster.restore(group)
    cluster.run_until_idle()
    cluster.pass_time(0.1)
    cluster.run_until_idle()
    scraper.look()
    assert scraper.counters == known
