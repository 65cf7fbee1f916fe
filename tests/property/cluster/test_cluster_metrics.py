"""What /metrics says while groups change: every moment's numbers are somebody's, and add up.

The same random lives as in ``test_transitions``, with a scrape after every event: counters never
fall, nor grow once nothing works any more, and the gauges of requests sum to those that live.
"""

from collections import defaultdict
from typing import Any, TypeAlias, cast

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from kunserve.cluster.api import EngineClient, Vitals
from kunserve.control.instance.agent import InstanceAgent
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.load import LeaderTotals
from kunserve.core.snapshots import ClusterState
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics
from kunserve_lab.world.by_choice import ChosenWorld
from tests.examples import examples
from tests.fake_cluster import FakeCluster
from tests.property.cluster.test_transitions import TransitionsMachine

REQUEST_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "kunserve:num_requests_stalled",
)
WORK = ("vllm:num_preemptions", "vllm:iteration_tokens", "kunserve:lost_tokens")
Labels: TypeAlias = tuple[str, frozenset[tuple[str, str]]]


class Engine:
    """The part of an ``EngineClient`` that metrics are read from."""

    def __init__(self, cluster: ChosenWorld) -> None:
        self._cluster = cluster

    def state(self) -> ClusterState:
        return self._cluster.controller.state(self._cluster.now_s)

    def vitals(self) -> Vitals:
        return Vitals(len(self._cluster.members), len(self._cluster.dead), 0)


class Scraper:
    """Looks at all metrics, and compares them with the last look and with the truth.

    ``counters`` is what Prometheus would have counted: each growth, and of what fell because a new
    front had come, all of it.
    """

    def __init__(self, cluster: ChosenWorld) -> None:
        self._cluster = cluster
        self._controller: object = None
        self._metrics: ClusterMetrics
        self._seen: dict[Labels, float] = {}
        self.counters: dict[Labels, float] = {}
        self._done: dict[tuple[int, InstanceId], LeaderTotals] = {}
        """What every process that there ever was has done."""
        self._processes: list[InstanceAgent] = []

    def look(self) -> None:
        is_new_front = self._controller is not self._cluster.controller
        if is_new_front:
            self._controller = self._cluster.controller
            self._metrics = ClusterMetrics(cast(EngineClient, Engine(self._cluster)), "fake")
        self._metrics.observe()
        samples: dict[str, dict[str, float]] = defaultdict(dict)
        counted: dict[Labels, float] = {}
        for family in self._metrics.collect():
            for sample in family.samples:
                if "engine" in sample.labels:
                    samples[sample.name][sample.labels["engine"]] = sample.value
                if family.type != "gauge":
                    counted[sample.name, frozenset(sample.labels.items())] = sample.value
        live = sum(sum(samples[name].values()) for name in REQUEST_GAUGES)
        assert live == len(self._cluster.unfinished), (samples, self._cluster.unfinished)
        self._count(counted, is_new_front)
        self._compare_with_instances()

    def _count(self, counted: dict[Labels, float], is_new_front: bool) -> None:
        if not is_new_front:
            assert self._seen.keys() <= counted.keys()
        for key, value in counted.items():
            last = self._seen.get(key, 0.0)
            if value == last and key in self.counters:  # as most are
                continue
            assert is_new_front or value > last or key not in self._seen, (key, last, value)
            grown = value - last if value >= last else value
            self.counters[key] = self.counters.get(key, 0.0) + grown
        self._seen = counted

    def _compare_with_instances(self) -> None:
        """Nothing is counted that was not done, whoever died."""
        for instance_id, member in self._cluster.members.items():
            if not any(agent is member.agent for agent in self._processes):
                self._processes.append(member.agent)
            number = next(n for n, agent in enumerate(self._processes) if agent is member.agent)
            self._done[number, instance_id] = member.agent.state.totals.so_far()
        for instance_id in {instance_id for _, instance_id in self._done}:
            done = LeaderTotals()
            for (_, whose), totals in self._done.items():
                done += totals if whose == instance_id else LeaderTotals()
            engine = frozenset({"model_name": "fake", "engine": str(instance_id)}.items())
            for name, most in (
                ("vllm:num_preemptions_total", done.num_preemptions),
                ("kunserve:lost_tokens_total", done.lost_tokens),
                ("vllm:iteration_tokens_total_count", sum(done.steps)),
                ("vllm:iteration_tokens_total_sum", done.prompt_tokens + done.generation_tokens),
            ):
                got = self.counters.get((name, engine), 0.0)
                assert got <= most, (name, instance_id, got, most)

    @property
    def work(self) -> dict[Labels, float]:
        """The counters of what groups do, which stand still while nothing is asked of them."""
        return {
            (name, labels): value
            for (name, labels), value in self.counters.items()
            if name.startswith(WORK)
        }


class MetricsMachine(TransitionsMachine):
    """Scrapes whenever something has happened."""

    scraper: Scraper

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
        known = self.scraper.work
        self.change_idle_groups()
        assert self.scraper.work == known, "counters grow without work"

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


TestMetrics: Any = pytest.mark.dear(MetricsMachine.TestCase)
TestMetrics.settings = settings(max_examples=examples(8), stateful_step_count=40)


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
    known = scraper.work
    num_steps = sum(
        value for (name, _), value in known.items() if name == "vllm:iteration_tokens_total_count"
    )
    num_tokens = sum(
        value for (name, _), value in known.items() if name == "vllm:iteration_tokens_total_sum"
    )
    assert num_steps > 0 and num_tokens >= 6 * (4 + 6)
    (group,) = cluster.groups()
    cluster.restore(group)
    cluster.run_until_idle()
    cluster.pass_time(0.1)
    cluster.run_until_idle()
    scraper.look()
    assert scraper.work == known


def test_a_new_front_does_not_count_again_what_was_done_before_a_death() -> None:
    cluster = FakeCluster(pools=(12, 12))
    scraper = Scraper(cluster)
    for is_first in (True, False):
        cluster.request(4, 6)
        cluster.request(4, 6)
        cluster.finish()
        cluster.pass_time(0.1)
        cluster.run_until_idle()
        scraper.look()
        if is_first:
            for instance_id in (InstanceId(0), InstanceId(1)):
                cluster.kill_instance(instance_id)
                cluster.start_instance(instance_id)
            cluster.run_until_idle()
    known = scraper.work
    cluster.restart_front()
    cluster.run_until_idle()
    cluster.pass_time(0.1)
    cluster.run_until_idle()
    scraper.look()
    assert scraper.work == known
