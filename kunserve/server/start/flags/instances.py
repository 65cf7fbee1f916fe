"""Flags of the instances: their memory, their batches, and how they are watched."""

import click

from kunserve.core.config import (
    CUDA_BLOCK_SIZE,
    GPU_MEMORY_UTILIZATION,
    MIB,
    ClusterConfig,
    InstanceConfig,
    SchedulerConfig,
)
from kunserve.core.speculative_config import SpeculativeConfig
from kunserve.server.start.flags.option import (
    ByteSize,
    FiniteRange,
    JsonSettings,
    all_of,
    flags_of,
)

MAX_INSTANCES = 4096
"""Of one controller: so many have been simulated; `benchmarks/many_instances` serves 1,000."""
_INSTANCE = InstanceConfig()
_cluster = flags_of("Instances", ClusterConfig())
_instance = flags_of("Instances", _INSTANCE)
_batches = flags_of("Batches", SchedulerConfig())
_faults = flags_of("Faults and traces", ClusterConfig())

INSTANCE_FLAGS = all_of(
    _cluster("--num-instances", type=click.IntRange(1, MAX_INSTANCES), help="Replicas."),
    _cluster(
        "--min-instances",
        type=click.IntRange(min=1),
        help="With --max-instances: the cluster shrinks to so many when it has little to do "
        "[--num-instances].",
    ),
    _cluster(
        "--max-instances",
        type=click.IntRange(min=1),
        help="Start instances up to so many while memory is short and nothing is left to drop, "
        "and let them go later [the size changes by `kunserve scale` only].",
    ),
    _cluster(
        "--cluster",
        "launcher",
        type=click.Choice(["local", "ray"]),
        help="Where instances are started: on this machine, or on the nodes of a Ray cluster "
        "(needs the extra ray: pip install '.[ray]' in KunServe's folder).",
    ),
    _cluster(
        "--ray-address",
        help="host:port of Ray's head [the cluster that this machine is a node of].",
    ),
    _cluster(
        "--ray-name",
        help="With --cluster ray: tells this server from others of the Ray cluster. The same "
        "command, given on any node within --front-grace of the end of this front, takes its "
        "instances over [the port's number].",
    ),
    _cluster(
        "--ray-placement",
        type=click.Choice(["spread", "pack"]),
        help="With --cluster ray: instances on many nodes, or on few.",
    ),
    _cluster(
        "--ray-autoscaling",
        is_flag=True,
        help="With --cluster ray: Ray's autoscaler adds nodes. Instances for which there is no "
        "room are asked of it, and wait up to --start-timeout; else they are refused.",
    ),
    _cluster(
        "--dispatch-policy",
        type=click.Choice(["soonest", "round-robin"]),
        help="soonest: requests wait in one queue for the instance that starts them first; "
        "round-robin: each goes to the next instance in turn, as behind a plain balancer.",
    ),
    _cluster(
        "--prefix-aware-dispatch/--no-prefix-aware-dispatch",
        help="With prefix caching and soonest: requests go where the KV of their beginning lies, "
        "unless that instance has much more to do than another.",
    ),
    _cluster(
        "--pipeline-parallel-size",
        "pipeline_stages",
        type=click.IntRange(1, 64),
        help="Instances that share one copy of the weights from the start, and for good: for "
        "comparison, with an --overload-policy that drops nothing.",
    ),
    _instance(
        "--tensor-parallel-size",
        type=click.IntRange(1, 64),
        help="Ranks of each instance: processes that hold and compute a part of every layer each. "
        "They share --instance-memory and --num-threads; on GPUs each has one.",
    ),
    _instance(
        "--enable-expert-parallel",
        is_flag=True,
        help="Of a model with experts, each rank of --tensor-parallel-size has some whole ones "
        "[a part of every one].",
    ),
    _cluster(
        "--topology",
        help="TOML or JSON file that says on which host and in which rack each instance stands: "
        "groups merge within a host first, and layers come from the nearest that has them "
        "[all on one host].",
    ),
    _instance(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        help="Where instances compute; with cuda they take the GPUs in turn; auto is cuda where "
        "there are GPUs that can map memory, and cpu elsewhere.",
    ),
    _instance(
        "--instance-memory",
        "memory_bytes",
        default=None,
        type=ByteSize(),
        help="Memory of each instance for weights and KV together "
        f"[{_INSTANCE.memory_bytes // MIB}MiB; on a GPU see --gpu-memory-utilization].",
    ),
    _instance(
        "--huge-pages",
        type=click.Choice(["auto", "off"]),
        help="auto: weights and KV on CPUs lie in pages of 2 MiB, from which they are read faster, "
        "as far as the system has free ones.",
    ),
    _instance(
        "--gpu-memory-utilization",
        type=FiniteRange(0, 1, min_open=True),
        help="With --device cuda: share of each GPU's memory for its instances together, for "
        f"weights, KV and everything beside [{GPU_MEMORY_UTILIZATION}].",
    ),
    _instance(
        "--kv-cache-memory-bytes",
        type=ByteSize(),
        help="KV memory of each instance; overrides --instance-memory.",
    ),
    _instance(
        "--block-size",
        default=None,
        type=click.IntRange(1, 256),
        help=f"Tokens in a KV block [{_INSTANCE.block_size}; {CUDA_BLOCK_SIZE} on a GPU].",
    ),
    _instance(
        "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
        help="Keep KV of layers with a window (Gemma 2 and 3) whole. With --no-... these layers "
        "write over what no step reads again, so that more requests fit; it needs "
        "--no-enable-prefix-caching, and has its price: docs/decisions/local-attention.md.",
    ),
    _instance(
        "--num-threads",
        type=click.IntRange(1, 256),
        help="Compute threads of each instance; each rank has at least one.",
    ),
    _instance(
        "--attention-backend",
        "--attention",
        "attention",
        type=click.Choice(["fused", "flashinfer"], case_sensitive=False),
        help="fused: our kernels; flashinfer: with --device cuda, where it is installed.",
    ),
    _instance(
        "--enforce-eager",
        is_flag=True,
        help="With --device cuda: record no steps as CUDA graphs.",
    ),
    _batches(
        "--max-num-seqs",
        type=click.IntRange(min=1),
        help="Requests that run at once, per group.",
    ),
    _batches(
        "--max-num-batched-tokens",
        type=click.IntRange(min=1),
        help="Most tokens in one step. With --tpot-slo steps may be smaller, never larger.",
    ),
    _batches(
        "--tpot-slo",
        "tpot_slo_s",
        type=FiniteRange(min=0, min_open=True),
        help="Seconds that a request may wait for its next token. Steps take half of it, and up to "
        "all of it while prompts queue and memory is not short; where they may not be larger, "
        "next tokens skip steps. Needs `kunserve profile` [next tokens in every step, however "
        "long it takes].",
    ),
    _batches(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep the KV of prompts and answers while memory is free, and compute only what comes "
        "after the longest beginning that is kept.",
    ),
    _batches(
        "--speculative-config",
        type=JsonSettings(SpeculativeConfig),
        help="Guess ahead by prompt lookup, as JSON: "
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 4}. Outputs stay the same. Steps check guesses where that gives more '
        "tokens in the same time: in small batches, and where answers repeat their prompts.",
    ),
    _batches(
        "--lookahead/--no-lookahead",
        help="In a pipeline, balance microbatches by predicted time over the whole queue.",
    ),
    _batches(
        "--profile",
        help="Costs measured by `kunserve profile` [where it writes by default].",
    ),
)

FAULT_FLAGS = all_of(
    _faults(
        "--start-timeout",
        "start_timeout_s",
        type=FiniteRange(min=0, min_open=True),
        help="Seconds until every instance must be ready.",
    ),
    _faults(
        "--hang-timeout",
        "hang_timeout_s",
        type=FiniteRange(min=0, min_open=True),
        help="Replace an instance whose loop stands still so many seconds (and ten longest steps).",
    ),
    _faults(
        "--link-timeout",
        "link_timeout_s",
        type=FiniteRange(min=0.1),
        help="Between hosts: a connection on which nothing comes for so many seconds is broken.",
    ),
    _faults(
        "--front-grace",
        "front_grace_s",
        type=FiniteRange(min=0),
        help="Seconds that instances outlive this process, so that the same command, given again, "
        "serves without loading weights.",
    ),
    _faults(
        "--trace-out",
        help="Write steps, transfers and transitions there at the end (for Perfetto).",
    ),
    _faults(
        "--check-invariants",
        is_flag=True,
        help="Check every part's invariants whenever idle (slow; for the hunt of bugs).",
    ),
)
