"""Metrics of groups, instances and the whole cluster, read from the controller's snapshot."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kunserve.cluster.api import Vitals
from kunserve.core.load import PAUSE_BOUNDS_S, STEP_TOKEN_BOUNDS, LeaderTotals, LoadReport
from kunserve.core.snapshots import ClusterState, InstanceSnapshot, ObservedDrops
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_row import Row, Samples, Value, counter, gauge, histogram

NO_ENGINE = "none"
"""Label of requests that wait for an engine to take them: so that gauges sum to all of them."""
CAPACITY = "capacity"
"""Why requests wait. vLLM's other reason, ``deferred``, does not exist here."""
OUT, BACK = "out", "back"


@dataclass(frozen=True, slots=True)
class Look:
    """The cluster at one moment."""

    state: ClusterState
    vitals: Vitals

    @property
    def loads(self) -> list[LoadReport]:
        """Of the groups that have reported."""
        return [load for _, load in self.state.loads_by_group() if load is not None]


def _of_group(name: str, meaning: str, value: Callable[[LoadReport], float]) -> Row[Look]:
    """A gauge of every group that has reported, by its leader."""
    return gauge(name, meaning, lambda look: _by_leader(look, value), "engine")


def _by_leader(look: Look, value: Callable[[LoadReport], float]) -> dict[tuple[str, ...], float]:
    loads = look.state.loads_by_group()
    return {(str(group.leader),): value(load) for group, load in loads if load is not None}


def of_instance(
    make: Callable[..., Row[Look]],
    name: str,
    meaning: str,
    read: Callable[[InstanceSnapshot], Samples],
    *labels: str,
) -> Row[Look]:
    """Of every instance that was ever ready; one value, or some with labels of their own."""

    def samples(look: Look) -> Samples:
        found: dict[tuple[str, ...], Value] = {}
        for instance in look.state.instances:
            values, engine = read(instance), str(instance.spec.instance_id)
            by_labels = values if isinstance(values, Mapping) else {(): values}
            found.update({(engine, *more): value for more, value in by_labels.items()})
        return found

    return make(name, meaning, samples, "engine", *labels)


def _counted(name: str, meaning: str, value: Callable[[LeaderTotals], float]) -> Row[Look]:
    """What every instance has counted as a leader."""
    return of_instance(counter, name, meaning, lambda one: value(one.totals))


def _observed(
    make: Callable[..., Row[Look]], name: str, meaning: str, value: Callable[[ObservedDrops], float]
) -> Row[Look]:
    """Under the policy ``observe`` only."""

    def samples(look: Look) -> Samples:
        return {} if look.state.observed is None else value(look.state.observed)

    return make(name, f"Under the policy `observe`: {meaning}", samples)


def waiting_of(look: Look) -> dict[tuple[str, ...], float]:
    """Requests that wait, by the engine that has them."""
    unplaced = look.state.num_unplaced
    nowhere: dict[tuple[str, ...], float] = {(NO_ENGINE,): unplaced} if unplaced else {}
    return _by_leader(look, lambda load: load.num_waiting) | nowhere


def _steps(instance: InstanceSnapshot) -> Histogram:
    totals = instance.totals
    num_tokens = totals.prompt_tokens + totals.generation_tokens
    return Histogram.of_counts(STEP_TOKEN_BOUNDS, totals.steps, num_tokens)


def _pauses(instance: InstanceSnapshot) -> Histogram:
    totals = instance.totals
    return Histogram.of_counts(PAUSE_BOUNDS_S, totals.pauses, totals.paused_s)


def _memory_parts(instance: InstanceSnapshot) -> dict[tuple[str, ...], Value]:
    """They sum to the instance's memory; nothing of a dead one."""
    if not instance.alive:
        return {}
    spec, freed = instance.spec, instance.dropped_bytes
    kv = spec.kv_units * spec.unit_bytes
    return {("weights",): spec.memory_bytes - kv - freed, ("kv",): kv, ("freed",): freed}


def _undropped_blocks(instance: InstanceSnapshot) -> int:
    return instance.spec.blocks_when_holding(instance.spec.num_layers)


def _cache_config(instance: InstanceSnapshot) -> dict[tuple[str, ...], Value]:
    return {(str(instance.spec.block_size), str(_undropped_blocks(instance))): 1.0}


def _swapped_bytes(instance: InstanceSnapshot) -> dict[tuple[str, ...], Value]:
    """Over all stages of the groups that the instance led: a block has every layer somewhere."""
    block_bytes = instance.spec.unit_bytes * instance.spec.num_layers
    totals = instance.totals
    return {
        (OUT,): totals.swapped_out_blocks * block_bytes,
        (BACK,): totals.swapped_back_blocks * block_bytes,
    }


def _by_state(look: Look) -> dict[tuple[str, ...], float]:
    """They sum to all that there are."""
    vitals = look.vitals
    others: dict[tuple[str, ...], float] = {
        ("starting",): vitals.num_starting,
        ("missing",): vitals.num_missing,
        ("leaving",): look.state.size.leaving,
    }
    return {("serving",): vitals.num_instances - sum(others.values()), **others}


GROUP_ROWS: tuple[Row[Look], ...] = (
    _of_group(
        "vllm:num_requests_running", "Requests in the running batch.", lambda load: load.num_running
    ),
    _of_group(
        "vllm:kv_cache_usage_perc",
        "Used share of the KV memory, 0 to 1.",
        lambda load: load.used_blocks / max(1, load.capacity_blocks),
    ),
    _of_group(
        "kunserve:kv_capacity_blocks", "KV blocks of the group.", lambda load: load.capacity_blocks
    ),
    _of_group("kunserve:kv_used_blocks", "KV blocks in use.", lambda load: load.used_blocks),
    _of_group(
        "kunserve:prefix_cached_blocks",
        "KV blocks that only the prefix cache holds: they are free as soon as someone needs them.",
        lambda load: load.cached_blocks,
    ),
    _of_group(
        "kunserve:demand_blocks",
        "KV blocks that are used, that running requests will still need, and that the head of the "
        "queue needs.",
        lambda load: load.demand_blocks,
    ),
    _of_group(
        "kunserve:num_requests_stalled",
        "Requests waiting for their KV in an exchange.",
        lambda load: load.num_stalled,
    ),
    gauge(
        "vllm:num_requests_waiting",
        "Requests waiting to run; `engine` is `none` for those that no engine has.",
        waiting_of,
        "engine",
    ),
    gauge(
        "vllm:num_requests_waiting_by_reason",
        "The same; the reason is always `capacity`.",
        lambda look: {(*engine, CAPACITY): number for engine, number in waiting_of(look).items()},
        "engine",
        "reason",
    ),
    gauge(
        "kunserve:group_size",
        "Instances in the group that this one leads.",
        lambda look: {(str(group.leader),): len(group.stages) for group in look.state.groups},
        "engine",
    ),
)
INSTANCE_ROWS: tuple[Row[Look], ...] = (
    _counted(
        "vllm:num_preemptions_total",
        "Requests preempted for lack of KV memory.",
        lambda done: done.num_preemptions,
    ),
    _counted(
        "vllm:prefix_cache_queries_total",
        "Tokens looked for in the prefix cache.",
        lambda done: done.prefix_queried_tokens,
    ),
    _counted(
        "vllm:prefix_cache_hits_total",
        "Tokens whose KV was found in the prefix cache.",
        lambda done: done.prefix_hit_tokens,
    ),
    _counted(
        "vllm:spec_decode_num_drafts_total",
        "Times that guesses of a request were checked.",
        lambda done: done.num_drafts,
    ),
    _counted(
        "vllm:spec_decode_num_draft_tokens_total",
        "Guessed tokens that were checked.",
        lambda done: done.num_draft_tokens,
    ),
    _counted(
        "vllm:spec_decode_num_accepted_tokens_total",
        "Guessed tokens that were right.",
        lambda done: done.num_accepted_tokens,
    ),
    _counted(
        "kunserve:lost_tokens_total",
        "Tokens of KV thrown away by preemptions.",
        lambda done: done.lost_tokens,
    ),
    of_instance(
        gauge, "kunserve:instance_alive", "1 while the instance lives.", lambda one: one.alive
    ),
    of_instance(
        gauge,
        "kunserve:instance_ranks",
        "Processes of the instance (`--tensor-parallel-size`).",
        lambda one: one.spec.tensor_parallel_size,
    ),
    of_instance(
        gauge,
        "kunserve:dropped_layers",
        "Layers whose weights are dropped.",
        lambda one: one.spec.num_layers - one.held.num_layers,
    ),
    of_instance(
        gauge,
        "kunserve:dropped_bytes",
        "Weight bytes that serve as KV memory.",
        lambda one: one.dropped_bytes,
    ),
    of_instance(
        histogram,
        "vllm:iteration_tokens_total",
        "Tokens of a step: prompt tokens computed, and tokens made.",
        _steps,
    ),
    of_instance(
        gauge,
        "kunserve:memory_bytes",
        "The instance's memory, by part: `weights`, `kv`, and `freed`, which is KV memory that was "
        "weights.",
        _memory_parts,
        "part",
    ),
    of_instance(
        gauge,
        "kunserve:kv_undropped_blocks",
        "KV blocks of the instance when it holds all layers.",
        lambda one: _undropped_blocks(one) if one.alive else {},
    ),
    of_instance(
        gauge,
        "vllm:cache_config_info",
        "Always 1; the labels tell of the KV memory when nothing is dropped.",
        _cache_config,
        "block_size",
        "num_gpu_blocks",
    ),
)
CLUSTER_ROWS: tuple[Row[Look], ...] = (
    gauge(
        "kunserve:instances",
        "Instances, by what they do: `serving`, `starting` (the cluster grows), `missing` (started "
        "anew), `leaving` (the cluster shrinks).",
        _by_state,
        "state",
    ),
    gauge(
        "kunserve:instances_missing",
        "Instances that do not serve now and are being started anew.",
        lambda look: look.vitals.num_missing,
    ),
    counter(
        "kunserve:internal_errors_total",
        "Internal errors that the front survived; each one is a bug.",
        lambda look: look.vitals.num_errors,
    ),
    counter(
        "kunserve:instance_deaths_total",
        "Instances that died, killed ones included.",
        lambda look: look.state.num_deaths,
    ),
    gauge(
        "kunserve:scale_up_wanted",
        "1 while memory was short in the last 10 s and dropping could not give enough.",
        lambda look: look.state.is_scale_up_wanted,
    ),
    gauge(
        "kunserve:cut_links",
        "Pairs of instances that did not reach each other lately: no drop merges them for a while.",
        lambda look: len(look.state.cut_links),
    ),
    gauge(
        "kunserve:longest_forming_seconds",
        "For how long the oldest of the groups that form has formed; 0 while none does.",
        lambda look: look.state.longest_forming_s,
    ),
    counter(
        "kunserve:requests_moved_total",
        "Waiting requests that changed groups.",
        lambda look: look.state.num_moved,
    ),
    counter(
        "kunserve:requests_rerun_total",
        "Requests that went on elsewhere because an instance died that had them.",
        lambda look: look.state.num_rerun,
    ),
    counter(
        "kunserve:quarantined_requests_total",
        "Times that a request ran among suspects only, because instances had died that ran it.",
        lambda look: look.state.num_quarantined,
    ),
    counter(
        "kunserve:guilty_requests_total",
        "Requests ended with an error because instances died again and again when they ran.",
        lambda look: look.state.num_guilty,
    ),
)
OVERLOAD_ROWS: tuple[Row[Look], ...] = (
    gauge(
        "kunserve:paused",
        "1 while drops and restores are made by hand only.",
        lambda look: look.state.paused,
    ),
    _observed(
        gauge,
        "kunserve:observed_merges",
        "merges that would stand now.",
        lambda drops: drops.num_merged,
    ),
    _observed(
        gauge,
        "kunserve:observed_requests_waiting",
        "requests that wait now, and would run.",
        lambda drops: drops.num_requests_now,
    ),
    _observed(
        counter,
        "kunserve:observed_drops_total",
        "drops that would have been made.",
        lambda drops: drops.num_drops,
    ),
    _observed(
        counter,
        "kunserve:observed_restores_total",
        "restores that would have been made.",
        lambda drops: drops.num_restores,
    ),
    _observed(
        counter,
        "kunserve:observed_freed_bytes_total",
        "weight bytes that these drops would have freed.",
        lambda drops: drops.freed_bytes,
    ),
    _observed(
        counter,
        "kunserve:observed_requests_total",
        "requests that these drops would have admitted at once, at least.",
        lambda drops: drops.num_requests,
    ),
    _observed(
        counter,
        "kunserve:observed_wait_seconds_total",
        "waiting for memory that these drops would have avoided, summed over requests.",
        lambda drops: drops.wait_s,
    ),
)
HOST_MEMORY_ROWS: tuple[Row[Look], ...] = (
    of_instance(
        counter,
        "kunserve:swapped_bytes_total",
        "KV bytes that the group copied `out` to host memory, and `back`.",
        _swapped_bytes,
        "direction",
    ),
    _of_group(
        "kunserve:num_requests_away",
        "Running requests whose KV is in host memory, or on its way there or back.",
        lambda load: load.num_away,
    ),
    of_instance(
        histogram,
        "kunserve:request_pause_seconds",
        "How long a request was away in host memory, swapped or parked. A stay that a change of "
        "groups ended is not counted, because the request is computed again.",
        _pauses,
    ),
)
