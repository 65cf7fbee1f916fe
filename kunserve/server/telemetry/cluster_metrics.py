"""Metrics of groups and instances, read from the controller's snapshot."""

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kunserve.cluster.api import EngineClient, Vitals
from kunserve.core.ids import InstanceId
from kunserve.core.load import STEP_TOKEN_BOUNDS, LoadReport
from kunserve.core.snapshots import ClusterState, InstanceSnapshot
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.host_memory_metrics import host_memory_metrics
from kunserve.server.telemetry.metric_family import Family, counter, gauge, histogram
from kunserve.server.telemetry.overload_metrics import overload_metrics
from kunserve.server.telemetry.process_metrics import ProcessMetrics
from kunserve.server.telemetry.savings import DroppedTime, Savings
from kunserve.server.telemetry.stage_metrics import StageMetrics
from kunserve.server.telemetry.transition_metrics import TransitionMetrics

NO_ENGINE = "none"
"""Label of requests that wait for an engine to take them: so that gauges sum to all of them."""
CAPACITY = "capacity"
"""Why requests wait. vLLM's other reason, ``deferred``, does not exist here."""

RUNNING = gauge("vllm:num_requests_running", "Requests in the running batch.", "engine")
WAITING = gauge(
    "vllm:num_requests_waiting",
    "Requests waiting to run; `engine` is `none` for those that no engine has.",
    "engine",
)
WAITING_BY_REASON = gauge(
    "vllm:num_requests_waiting_by_reason",
    "The same; the reason is always `capacity`.",
    "engine",
    "reason",
)
USAGE = gauge("vllm:kv_cache_usage_perc", "Used share of the KV memory, 0 to 1.", "engine")
CAPACITY_BLOCKS = gauge("kunserve:kv_capacity_blocks", "KV blocks of the group.", "engine")
UNDROPPED_BLOCKS = gauge(
    "kunserve:kv_undropped_blocks", "KV blocks of the instance when it holds all layers.", "engine"
)
USED_BLOCKS = gauge("kunserve:kv_used_blocks", "KV blocks in use.", "engine")
DEMAND_BLOCKS = gauge(
    "kunserve:demand_blocks",
    "KV blocks that are used, that running requests will still need, and that the head of the "
    "queue needs.",
    "engine",
)
STALLED = gauge(
    "kunserve:num_requests_stalled", "Requests waiting for their KV in an exchange.", "engine"
)
GROUP_SIZE = gauge("kunserve:group_size", "Instances in the group that this one leads.", "engine")
PREEMPTIONS = counter(
    "vllm:num_preemptions_total", "Requests preempted for lack of KV memory.", "engine"
)
STEP_TOKENS = histogram(
    "vllm:iteration_tokens_total",
    "Tokens of a step: prompt tokens computed, and tokens made.",
    "engine",
)
PREFIX_QUERIES = counter(
    "vllm:prefix_cache_queries_total", "Tokens looked for in the prefix cache.", "engine"
)
PREFIX_HITS = counter(
    "vllm:prefix_cache_hits_total", "Tokens whose KV was found in the prefix cache.", "engine"
)
NUM_DRAFTS = counter(
    "vllm:spec_decode_num_drafts_total", "Times that guesses of a request were checked.", "engine"
)
DRAFT_TOKENS = counter(
    "vllm:spec_decode_num_draft_tokens_total", "Guessed tokens that were checked.", "engine"
)
ACCEPTED_TOKENS = counter(
    "vllm:spec_decode_num_accepted_tokens_total", "Guessed tokens that were right.", "engine"
)
RANKS = gauge(
    "kunserve:instance_ranks", "Processes of the instance (`--tensor-parallel-size`).", "engine"
)
CACHED_BLOCKS = gauge(
    "kunserve:prefix_cached_blocks",
    "KV blocks that only the prefix cache holds: they are free as soon as someone needs them.",
    "engine",
)
LOST_TOKENS = counter(
    "kunserve:lost_tokens_total", "Tokens of KV thrown away by preemptions.", "engine"
)
ALIVE = gauge("kunserve:instance_alive", "1 while the instance lives.", "engine")
DROPPED_LAYERS = gauge("kunserve:dropped_layers", "Layers whose weights are dropped.", "engine")
DROPPED_BYTES = gauge("kunserve:dropped_bytes", "Weight bytes that serve as KV memory.", "engine")
MEMORY_BYTES = gauge(
    "kunserve:memory_bytes",
    "The instance's memory, by part: `weights`, `kv`, and `freed`, which is KV memory that was "
    "weights.",
    "engine",
    "part",
)
CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "Always 1; the labels tell of the KV memory when nothing is dropped.",
    "engine",
    "block_size",
    "num_gpu_blocks",
)
INSTANCES = gauge(
    "kunserve:instances",
    "Instances, by what they do: `serving`, `starting` (the cluster grows), `missing` (started "
    "anew), `leaving` (the cluster shrinks).",
    "state",
)
MISSING = gauge(
    "kunserve:instances_missing", "Instances that do not serve now and are being started anew."
)
ERRORS = counter(
    "kunserve:internal_errors_total",
    "Internal errors that the front survived; each one is a bug.",
)
DEATHS = counter("kunserve:instance_deaths_total", "Instances that died, killed ones included.")
SCALE_UP = gauge(
    "kunserve:scale_up_wanted",
    "1 while memory was short in the last 10 s and dropping could not give enough.",
)
CUT_LINKS = gauge(
    "kunserve:cut_links",
    "Pairs of instances that did not reach each other lately: no drop merges them for a while.",
)
MOVED = counter("kunserve:requests_moved_total", "Waiting requests that changed groups.")
RERUN = counter(
    "kunserve:requests_rerun_total",
    "Requests that went on elsewhere because an instance died that had them.",
)
QUARANTINED = counter(
    "kunserve:quarantined_requests_total",
    "Times that a request ran among suspects only, because instances had died that ran it.",
)
GUILTY = counter(
    "kunserve:guilty_requests_total",
    "Requests ended with an error because instances died again and again when they ran.",
)
FAMILIES = (
    RUNNING,
    WAITING,
    WAITING_BY_REASON,
    USAGE,
    CAPACITY_BLOCKS,
    UNDROPPED_BLOCKS,
    USED_BLOCKS,
    CACHED_BLOCKS,
    DEMAND_BLOCKS,
    STALLED,
    GROUP_SIZE,
    PREEMPTIONS,
    PREFIX_QUERIES,
    PREFIX_HITS,
    NUM_DRAFTS,
    DRAFT_TOKENS,
    ACCEPTED_TOKENS,
    STEP_TOKENS,
    LOST_TOKENS,
    ALIVE,
    RANKS,
    DROPPED_LAYERS,
    DROPPED_BYTES,
    MEMORY_BYTES,
    CACHE_CONFIG,
    INSTANCES,
    MISSING,
    ERRORS,
    DEATHS,
    SCALE_UP,
    CUT_LINKS,
    MOVED,
    RERUN,
    QUARANTINED,
    GUILTY,
)
_OF_LOAD: tuple[tuple[Family, Callable[[LoadReport], float]], ...] = (
    (RUNNING, lambda load: load.num_running),
    (USAGE, lambda load: load.used_blocks / max(1, load.capacity_blocks)),
    (CAPACITY_BLOCKS, lambda load: load.capacity_blocks),
    (USED_BLOCKS, lambda load: load.used_blocks),
    (CACHED_BLOCKS, lambda load: load.cached_blocks),
    (DEMAND_BLOCKS, lambda load: load.demand_blocks),
    (STALLED, lambda load: load.num_stalled),
)
_OF_INSTANCE: tuple[tuple[Family, Callable[[InstanceSnapshot], float]], ...] = (
    (PREEMPTIONS, lambda instance: instance.totals.num_preemptions),
    (PREFIX_QUERIES, lambda instance: instance.totals.prefix_queried_tokens),
    (PREFIX_HITS, lambda instance: instance.totals.prefix_hit_tokens),
    (NUM_DRAFTS, lambda instance: instance.totals.num_drafts),
    (DRAFT_TOKENS, lambda instance: instance.totals.num_draft_tokens),
    (ACCEPTED_TOKENS, lambda instance: instance.totals.num_accepted_tokens),
    (LOST_TOKENS, lambda instance: instance.totals.lost_tokens),
    (ALIVE, lambda instance: instance.alive),
    (RANKS, lambda instance: instance.spec.tensor_parallel_size),
    (DROPPED_LAYERS, lambda instance: instance.spec.num_layers - instance.held.num_layers),
    (DROPPED_BYTES, lambda instance: instance.dropped_bytes),
)


class ClusterMetrics(Collector):
    """Reads ``engine.state()`` at each ``observe``; exports what it has seen so far."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._stages = StageMetrics(model_name)
        self._transitions = TransitionMetrics(model_name)
        self._processes = ProcessMetrics(model_name)
        self.savings = Savings(model_name)
        self._dropped_time = DroppedTime(model_name)
        self._state = self.observe()

    def bubble_ratio(self, leader: InstanceId) -> float | None:
        """Idle share of the stages that the instance leads; None if it is none, or new."""
        return self._stages.ratios.get(leader)

    def observe(self) -> ClusterState:
        """Take a snapshot and add what is new in it to the counters."""
        state = self._state = self._engine.state()
        self._transitions.observe(state)
        self._stages.observe(state)
        self.savings.observe(state)
        self._dropped_time.observe(state)
        return state

    def collect(self) -> Iterable[Metric]:
        """Everything, as of the last ``observe``."""
        yield from self._groups()
        yield from self._instances()
        yield from self._cluster()
        yield from self._transitions.collect()
        yield from overload_metrics(self._state, self._model_name)
        yield from host_memory_metrics(self._state, self._model_name)
        yield from self.savings.collect()
        yield from self._dropped_time.collect()
        yield from self._stages.collect()
        yield from self._processes.collect(dict(self._engine.vitals().pids))

    def _groups(self) -> Iterable[Metric]:
        model, loads = self._model_name, self._state.loads_by_group()
        reported = {(model, str(g.leader)): load for g, load in loads if load is not None}
        for family, value in _OF_LOAD:
            yield family.of({labels: value(load) for labels, load in reported.items()})
        waiting: dict[tuple[str, ...], float] = {
            labels: load.num_waiting for labels, load in reported.items()
        }
        if self._state.num_unplaced:
            waiting[model, NO_ENGINE] = self._state.num_unplaced
        yield WAITING.of(waiting)
        yield WAITING_BY_REASON.of({(*labels, CAPACITY): num for labels, num in waiting.items()})
        yield GROUP_SIZE.of({(model, str(g.leader)): len(g.stages) for g, _ in loads})

    def _instances(self) -> Iterable[Metric]:
        instances = {
            (self._model_name, str(instance.spec.instance_id)): instance
            for instance in self._state.instances
        }
        for family, value in _OF_INSTANCE:
            yield family.of({labels: value(instance) for labels, instance in instances.items()})
        yield STEP_TOKENS.of_histograms(
            {labels: _steps(instance) for labels, instance in instances.items()}
        )
        yield MEMORY_BYTES.of(
            {
                (*labels, part): num_bytes
                for labels, instance in instances.items()
                for part, num_bytes in _memory_parts(instance).items()
            }
        )
        yield UNDROPPED_BLOCKS.of(
            {labels: _undropped_blocks(one) for labels, one in instances.items() if one.alive}
        )
        yield CACHE_CONFIG.of(
            {(*labels, *_cache_config(instance)): 1.0 for labels, instance in instances.items()}
        )

    def _cluster(self) -> Iterable[Metric]:
        state, vitals = self._state, self._engine.vitals()
        yield INSTANCES.of(
            {(self._model_name, what): num for what, num in _by_state(state, vitals).items()}
        )
        for family, value in (
            (MISSING, vitals.num_missing),
            (ERRORS, vitals.num_errors),
            (DEATHS, state.num_deaths),
            (SCALE_UP, state.is_scale_up_wanted),
            (CUT_LINKS, len(state.cut_links)),
            (MOVED, state.num_moved),
            (RERUN, state.num_rerun),
            (QUARANTINED, state.num_quarantined),
            (GUILTY, state.num_guilty),
        ):
            yield family.of({(self._model_name,): value})


def _by_state(state: ClusterState, vitals: Vitals) -> dict[str, int]:
    """They sum to all that there are."""
    num_others = {
        "starting": vitals.num_starting,
        "missing": vitals.num_missing,
        "leaving": state.size.leaving,
    }
    return {"serving": vitals.num_instances - sum(num_others.values()), **num_others}


def _steps(instance: InstanceSnapshot) -> Histogram:
    totals = instance.totals
    num_tokens = totals.prompt_tokens + totals.generation_tokens
    return Histogram.of_counts(STEP_TOKEN_BOUNDS, totals.steps, num_tokens)


def _memory_parts(instance: InstanceSnapshot) -> dict[str, int]:
    """They sum to the instance's memory; nothing of a dead one."""
    if not instance.alive:
        return {}
    spec, freed = instance.spec, instance.dropped_bytes
    kv = spec.kv_units * spec.unit_bytes
    return {"weights": spec.memory_bytes - kv - freed, "kv": kv, "freed": freed}


def _undropped_blocks(instance: InstanceSnapshot) -> int:
    return instance.spec.blocks_when_holding(instance.spec.num_layers)


def _cache_config(instance: InstanceSnapshot) -> tuple[str, str]:
    return str(instance.spec.block_size), str(_undropped_blocks(instance))
