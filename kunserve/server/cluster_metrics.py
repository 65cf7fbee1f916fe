"""Metrics of groups, instances and transitions, read from the controller's snapshot."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kunserve.cluster.api import EngineClient
from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.layout import GroupLayout
from kunserve.core.load import LoadReport
from kunserve.core.snapshots import ClusterState, Kind, Outcome, TransitionRecord
from kunserve.server.histogram import Histogram
from kunserve.server.stage_metrics import StageMetrics

NO_ENGINE = "none"
"""Label of requests that wait for an engine to take them: so that gauges sum to all of them."""
TRANSITION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def loads_by_group(state: ClusterState) -> list[tuple[GroupLayout, LoadReport | None]]:
    """Each group with its leader's last report, if there was one yet."""
    loads = {load.group_id: load for load in state.loads}
    return [(group, loads.get(group.group_id)) for group in state.groups]


class ClusterMetrics(Collector):
    """Reads ``engine.state()`` at each ``observe``; exports what it has seen so far."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._state = engine.state()
        self._seen: set[TransitionId] = set()
        self._moved_bytes = dict.fromkeys(Kind, 0)
        self._stages = StageMetrics(model_name)
        self._durations = {kind: self._duration_histogram() for kind in Kind}

    def bubble_ratio(self, leader: InstanceId) -> float | None:
        """Idle share of the stages that the instance leads; None if it is none, or new."""
        return self._stages.ratios.get(leader)

    @staticmethod
    def _duration_histogram() -> Histogram:
        return Histogram(
            "kunserve:transition_duration_seconds",
            "From a transition's start to its end, the KV exchange included.",
            TRANSITION_BUCKETS,
        )

    def observe(self) -> ClusterState:
        """Take a snapshot and add what is new in it to the counters."""
        state = self._state = self._engine.state()
        for record in state.transitions:
            if record.finished_s is not None and record.transition_id not in self._seen:
                self._seen.add(record.transition_id)
                self._finished(record, record.finished_s)
        self._stages.observe(state)
        return state

    def _finished(self, record: TransitionRecord, finished_s: float) -> None:
        if record.outcome is not Outcome.DONE:
            return
        self._durations[record.kind].observe(finished_s - record.started_s)
        self._moved_bytes[record.kind] += record.moved_bytes

    def collect(self) -> Iterable[Metric]:
        """Everything, as of the last ``observe``."""
        yield from self._group_gauges()
        yield from self._leader_counters()
        yield from self._instance_gauges()
        yield from self._transition_metrics()
        yield from self._stages.collect()

    def _labels(self, engine: InstanceId) -> list[str]:
        return [self._model_name, str(engine)]

    def _gauge(self, name: str, documentation: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, documentation, labels=["model_name", "engine"])

    def _group_gauges(self) -> Iterable[Metric]:
        running = self._gauge("vllm:num_requests_running", "Requests in the running batch.")
        waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting to run.")
        usage = self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.")
        capacity = self._gauge("kunserve:kv_capacity_blocks", "KV blocks of the group.")
        used = self._gauge("kunserve:kv_used_blocks", "KV blocks in use.")
        demand = self._gauge(
            "kunserve:demand_blocks", "KV blocks used, still to grow, and of the queue's head."
        )
        stalled = self._gauge("kunserve:num_requests_stalled", "Requests waiting for their KV.")
        size = self._gauge("kunserve:group_size", "Instances in the group that this one leads.")
        for group, load in loads_by_group(self._state):
            labels = self._labels(group.leader)
            size.add_metric(labels, len(group.stages))
            if load is None:
                continue
            running.add_metric(labels, load.num_running)
            waiting.add_metric(labels, load.num_waiting)
            usage.add_metric(labels, load.used_blocks / max(1, load.capacity_blocks))
            capacity.add_metric(labels, load.capacity_blocks)
            used.add_metric(labels, load.used_blocks)
            demand.add_metric(labels, load.demand_blocks)
            stalled.add_metric(labels, load.num_stalled)
        if self._state.num_unplaced:
            waiting.add_metric([self._model_name, NO_ENGINE], self._state.num_unplaced)
        yield from (running, waiting, usage, capacity, used, demand, stalled, size)

    def _leader_counters(self) -> Iterable[Metric]:
        names = ["model_name", "engine"]
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Requests preempted for lack of KV memory.", labels=names
        )
        lost = CounterMetricFamily(
            "kunserve:lost_tokens", "Tokens of KV thrown away by preemptions.", labels=names
        )
        for instance in self._state.instances:
            labels, totals = self._labels(instance.spec.instance_id), instance.totals
            preemptions.add_metric(labels, totals.num_preemptions)
            lost.add_metric(labels, totals.lost_tokens)
        yield from (preemptions, lost)

    def _instance_gauges(self) -> Iterable[Metric]:
        alive = self._gauge("kunserve:instance_alive", "1 while the instance lives.")
        layers = self._gauge("kunserve:dropped_layers", "Layers whose weights are dropped.")
        dropped = self._gauge("kunserve:dropped_bytes", "Weight bytes that serve as KV memory.")
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The undropped KV cache.",
            labels=["model_name", "engine", "block_size", "num_gpu_blocks"],
        )
        for instance in self._state.instances:
            spec = instance.spec
            labels = self._labels(spec.instance_id)
            alive.add_metric(labels, float(instance.alive))
            layers.add_metric(labels, spec.num_layers - instance.held.num_layers)
            dropped.add_metric(labels, instance.dropped_bytes)
            blocks = spec.blocks_when_holding(spec.num_layers)
            config.add_metric([*labels, str(spec.block_size), str(blocks)], 1.0)
        yield from (alive, layers, dropped, config)
        yield from self._vital_signs()

    def _vital_signs(self) -> Iterable[Metric]:
        vitals = self._engine.vitals()
        missing = GaugeMetricFamily(
            "kunserve:instances_missing",
            "Instances that do not serve now; replacements are being started.",
            labels=["model_name"],
        )
        missing.add_metric([self._model_name], vitals.num_missing)
        errors = CounterMetricFamily(
            "kunserve:internal_errors",
            "Internal errors that the front survived; each one is a bug.",
            labels=["model_name"],
        )
        errors.add_metric([self._model_name], vitals.num_errors)
        yield from (missing, errors)

    def _transition_metrics(self) -> Iterable[Metric]:
        state = self._state
        for name, documentation, value in (
            ("kunserve:requests_moved", "Waiting requests that changed groups.", state.num_moved),
            (
                "kunserve:quarantined_requests",
                "Requests that ran alone because instances died that ran them among others.",
                state.num_quarantined,
            ),
            (
                "kunserve:guilty_requests",
                "Requests ended with an error because their instance died when they ran alone.",
                state.num_guilty,
            ),
            ("kunserve:drops", "Drops committed.", self._state.num_drops),
            ("kunserve:restores", "Restores committed.", self._state.num_restores),
        ):
            family = CounterMetricFamily(name, documentation, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        moved = CounterMetricFamily(
            "kunserve:exchange_bytes",
            "KV bytes moved between instances, by the transition that moved them.",
            labels=["model_name", "kind"],
        )
        for kind, moved_bytes in self._moved_bytes.items():
            moved.add_metric([self._model_name, kind], moved_bytes)
        yield moved
        durations = None
        for kind, histogram in self._durations.items():
            family_of_kind = histogram.family({"model_name": self._model_name, "kind": kind})
            if durations is None:
                durations = family_of_kind
            else:
                durations.samples.extend(family_of_kind.samples)
        if durations is not None:
            yield durations
