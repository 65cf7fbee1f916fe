"""From settings to a plan: what the model, a profile and the machine say is found out."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kunserve.core.config import MIB, KunServeConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import ConfigError
from kunserve.core.extras import find_extra
from kunserve.core.kv_blocks import KvRing, ring_of
from kunserve.core.plan import CardShare, Measured, Plan, SwapPlan
from kunserve.core.snapshots import InstanceSpec
from kunserve.engine.memory.copy_rate import measure_copy_rate
from kunserve.engine.memory.free_memory import available_bytes
from kunserve.engine.nodes import node_numbers, numa_nodes
from kunserve.model.profile import ProfileSubject, find_cost
from kunserve.model.sharding import check_shardable, spread_over_ranks
from kunserve.model.spec import ModelSpec, period_of
from kunserve.policy.batch.cost import assumed_cost

logger = logging.getLogger("kunserve.server")


def make_plan(
    config: KunServeConfig, spec: ModelSpec, kept: str | None, layer_bytes: float | None
) -> Plan:
    """The plan, and a line of log about each part of it.

    ``kept`` is how weights stay quantised in memory, and ``layer_bytes`` what a layer's take then,
    if they do. Raises ConfigError for what the model or the machine cannot do.
    """
    check_length(config, spec)
    ring = find_ring(config, spec)
    num_ranks = config.instance.tensor_parallel_size
    if num_ranks > 1:
        check_shardable(spread_over_ranks(spec, config.instance), num_ranks)
    share, device = None, config.instance.device
    if device != "cpu" and config.cluster.launcher == "local":  # else each has its GPUs to itself
        share = find_extra("cards", "cuda", f"--device {device}").find_share(
            config, spec, layer_bytes
        )
    cost = find_step_cost(config, spec, kept, layer_bytes)
    return Plan(config, Measured(cost, find_swap(config, share), ring, share, find_sharers(config)))


def find_sharers(config: KunServeConfig) -> int:
    """Among how many instances each copy of the weights counts; 0: each has its own.

    The fewest that stand on a NUMA node at the start. Says why, where they could have shared.
    """
    instance, cluster = config.instance, config.cluster
    if instance.weights == "private":
        return 0
    nodes = numa_nodes()
    num_nodes, num_ranks = max(1, len(nodes)), instance.tensor_parallel_size
    copies = Counter(
        copy
        for one in range(cluster.num_instances)
        for copy in enumerate(node_numbers(one, num_ranks, num_nodes))
    )
    fewest = min(copies.values())
    why = None
    if instance.device != "cpu":
        why = "GPUs have memory of their own"
    elif instance.engine != "own":
        why = f"--engine {instance.engine} loads weights of its own"
    elif cluster.launcher != "local" or cluster.topology is not None:
        why = "instances stand on several hosts"
    elif cluster.pipeline_stages > 1:
        why = "pipelines from the start have one copy in all"
    elif max(cluster.num_instances, cluster.max_instances or 0) < 2:
        why = "there is one instance"
    elif instance.weights == "auto" and config.overload.policy == "observe":
        why = "--overload-policy observe tells what drops of private ones would gain"
    elif num_nodes > 1 and (fewest < 2 or instance.num_threads // num_ranks > min(map(len, nodes))):
        why = "no two instances compute on one NUMA node alone"
    if why is None:
        return fewest
    level = logging.WARNING if instance.weights == "shared" else logging.INFO
    logger.log(level, "weights are private: %s", why)
    return 0


def shared_weights_line(specs: Sequence[InstanceSpec]) -> str | None:
    """How much memory one copy of the weights leaves for KV, for people; None: there are more."""
    if not specs or not specs[0].shared_weights_bytes:
        return None
    spec = specs[0]
    kv_bytes = spec.kv_units * spec.unit_bytes
    private_bytes = max(0, spec.memory_bytes - spec.shared_weights_bytes)
    return (
        f"weights {spec.shared_weights_bytes / MIB:.0f} MiB once for {len(specs)} instances, "
        f"KV {kv_bytes / MIB:.0f} MiB each (private: {private_bytes / MIB:.0f})"
    )


def idle_cores(config: KunServeConfig, num_cores: int) -> str | None:
    """What to set where most cores of a machine without GPUs would do nothing."""
    instance, num = config.instance, config.cluster.num_instances
    used = num * max(instance.tensor_parallel_size, instance.num_threads)
    if instance.device != "cpu" or config.cluster.launcher != "local" or 2 * used > num_cores:
        return None
    return (
        f"{used} of {num_cores} cores compute: --num-threads {num_cores // num} would use them all"
    )


def find_ring(config: KunServeConfig, spec: ModelSpec) -> KvRing | None:
    """The ring for KV of layers with a window, if one is wanted.

    Raises ConfigError for a model that has no such layers, or another pattern of them.
    """
    instance = config.instance
    if instance.disable_hybrid_kv_cache_manager:
        return None
    period, step_tokens = period_of(spec), config.scheduler.max_num_batched_tokens
    assert spec.sliding_window is not None, spec
    ring = ring_of(spec.sliding_window, period, instance.block_size, step_tokens)
    logger.info(
        "layers with a window keep KV of %d tokens: %d of the window, %d of a step "
        "(--max-num-batched-tokens), and parts of blocks; stages end after every %d layers",
        ring.num_blocks * instance.block_size,
        spec.sliding_window,
        step_tokens,
        period,
    )
    return ring


def find_step_cost(
    config: KunServeConfig,
    spec: ModelSpec,
    quantization: str | None = None,
    layer_bytes: float | None = None,
) -> CostCoefficients | None:
    """The costs that batch formation predicts by; None if nothing does.

    From the profile if there is one, else assumed from the model's shape: measuring at start
    would take longer than loading the model. ``layer_bytes`` is what a layer's quantised weights
    take. Raises ConfigError for a profile that does not fit.
    """
    scheduler, instance = config.scheduler, config.instance
    uses_host_memory, has_slo = config.overload.uses_host_memory, scheduler.tpot_slo_s is not None
    if not (scheduler.lookahead or uses_host_memory or has_slo):
        return None
    subject = ProfileSubject.of(
        spec,
        instance.num_threads,
        instance.block_size,
        quantization,
        instance.tensor_parallel_size,
    )
    path = None if scheduler.profile is None else Path(scheduler.profile)
    kind = "a GPU (`kunserve profile --device cuda` makes one)"
    if instance.engine != "own":
        kind = f"--engine {instance.engine}"
    cost, origin = None, f"no --profile of {kind}"
    # The usual place has profiles of our engine on CPUs.
    if path is not None or (instance.device, instance.engine) == ("cpu", "own"):
        cost, origin = find_cost(subject, path)
    if cost is not None:
        logger.info("step costs profile=%s", origin)
        return cost
    if has_slo:
        raise ConfigError(f"--tpot-slo needs measured step times; there is {origin}")
    if uses_host_memory and instance.device != "cpu":
        raise ConfigError(
            f"with --device {instance.device}, KV goes to host memory at the pace of measured step "
            f"times; there is {origin}"
        )
    logger.info("step costs assumed from the model's shape: %s", origin)
    return assumed_cost(spec, layer_bytes)


def find_swap(config: KunServeConfig, share: CardShare | None = None) -> SwapPlan | None:
    """The way to host memory, measured, if the overload policy wants it.

    An instance gets as much host memory as it has for weights and KV. Beside a GPU's memory there
    may be less of the host's: half of what is available is shared out.
    """
    if not config.overload.uses_host_memory:
        return None
    device = config.instance.device
    host_bytes = config.instance.memory_bytes if share is None else share.memory_bytes
    if device != "cpu":
        most = max(config.cluster.num_instances, config.cluster.max_instances or 0)
        host_bytes = min(host_bytes, available_bytes() // (2 * most))
    swap = SwapPlan.of(config.overload, measure_copy_rate(device), host_bytes)
    assert swap is not None, config.overload
    logger.info(
        "swap host_memory=%d MiB each, copies %.1f GB/s",
        host_bytes // MIB,
        swap.host_bytes_per_s / 1e9,
    )
    return swap


def check_length(config: KunServeConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for a longest request that the model was not made for."""
    asked = config.model.max_model_len
    if asked is not None and asked > spec.max_position:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {spec.max_position} tokens that the model "
            "was trained for"
        )
