"""Settings of one instance."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from kunserve.core.config.flag import Flag
from kunserve.core.errors import ConfigError

MIB = 1 << 20
CUDA_BLOCK_SIZE = 64
"""Larger than on a CPU, because blocks of one layer lie far from each other."""
VLLM_BLOCK_SIZE = 32
"""Of which its CPU kernels want a multiple."""
GPU_MEMORY_UTILIZATION = 0.9
_instance = partial(Flag, "Instances")


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """One instance's resources."""

    tensor_parallel_size: Annotated[int, _instance(least=1, most=64)] = 1
    """Ranks of each instance: processes that hold and compute a part of every layer each. They
    share --instance-memory and --num-threads; on GPUs each has one."""
    enable_expert_parallel: Annotated[bool, _instance()] = False
    """Of a model with experts, each rank of --tensor-parallel-size has some whole ones [a part of
    every one]."""
    device: Annotated[str, _instance(choices=("auto", "cpu", "cuda"))] = "cpu"
    """Where instances compute; with cuda they take the GPUs in turn; auto is cuda where there are
    GPUs that can map memory, and cpu elsewhere."""
    engine: Annotated[Literal["own", "vllm"], _instance()] = "own"
    """Whose model classes compute: KunServe's, or vLLM's, which know more models (on CPUs, from
    Hugging Face folders; it needs `pip install 'kunserve[vllm]'`)."""
    memory_bytes: Annotated[int, _instance("--instance-memory", suits_device=True)] = 1024 * MIB
    """Memory of each instance for weights and KV together [1024MiB; on a GPU see
    --gpu-memory-utilization]."""
    weights: Annotated[Literal["auto", "shared", "private"], _instance()] = "auto"
    """shared: a NUMA node's instances map one copy, so nothing is dropped; private: each has its
    own; auto: shared where that works."""
    weight_sharers: int = 0
    """Instances that bear the memory of such a copy, at the start; 0: each has its own.

    A process of an instance is told (``Plan.instance``).
    """
    bears_weights: bool = True
    """Whether a part of the copy counts as its memory: of one that joins later none does."""
    huge_pages: Annotated[Literal["auto", "off"], _instance()] = "auto"
    """auto: weights and KV on CPUs lie in pages of 2 MiB, from which they are read faster, as far
    as the system has free ones."""
    gpu_memory_utilization: Annotated[float | None, _instance(above=0, most=1)] = None
    """With --device cuda: share of each GPU's memory for its instances together, for weights, KV
    and everything beside [0.9].

    A process of an instance gets its own share instead (``Plan.instance``), with all that it needs;
    ``memory_bytes`` is what that leaves for weights and KV.
    """
    kv_cache_memory_bytes: Annotated[int | None, _instance()] = None
    """KV memory of each instance; overrides --instance-memory."""
    block_size: Annotated[int, _instance(least=1, most=256, suits_device=True)] = 16
    """Tokens in a KV block [16; 64 on a GPU, 32 with --engine vllm]."""
    disable_hybrid_kv_cache_manager: Annotated[bool, _instance()] = True
    """Keep KV of layers with a window (Gemma 2 and 3) whole. With --no-... these layers write over
    what no step reads again, so that more requests fit; it needs --no-enable-prefix-caching, and
    has its price: docs/decisions/local-attention.md."""
    num_threads: Annotated[int, _instance(least=1, most=256)] = 1
    """Compute threads of each instance; each rank has at least one."""
    granule_bytes: int = 256 * 1024
    """Smallest piece of memory that moves between weights and KV."""
    attention: Annotated[
        Literal["fused", "flashinfer"],
        _instance("--attention-backend --attention", ignores_case=True),
    ] = "fused"
    """fused: our kernels; flashinfer: with --device cuda, where it is installed."""
    enforce_eager: Annotated[bool, _instance()] = False
    """With --device cuda: record no steps as CUDA graphs."""
    map_when_idle: Annotated[bool, _instance()] = True
    """With --device cuda: map memory for a drop between steps; --no-... maps it beside them."""
    nccl_between_hosts: Annotated[bool, _instance()] = False
    """With --device cuda: stages on different hosts give each other hidden states by NCCL, on ports
    of its choice and not encrypted [by the links]."""

    def __post_init__(self) -> None:
        """A share is of a GPU's memory, and ranks are processes of CPUs."""
        self._check_ranks()
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, not {share}"
            )
        if share is not None and self.device == "cpu":
            raise ConfigError("--gpu-memory-utilization needs --device cuda; see --instance-memory")

    def _check_ranks(self) -> None:
        num_ranks = self.tensor_parallel_size
        if num_ranks < 1:
            raise ConfigError(f"--tensor-parallel-size must be 1 or more, not {num_ranks}")
        if num_ranks > 1 and self.attention != "fused":
            raise ConfigError(
                f"--attention-backend {self.attention} computes on one rank only: leave "
                f"--tensor-parallel-size {num_ranks} out"
            )
        if self.device == "cpu" and self.num_threads > num_ranks and self.num_threads % num_ranks:
            raise ConfigError(
                f"--num-threads {self.num_threads} are for all ranks of an instance together: "
                f"--tensor-parallel-size {num_ranks} does not divide them"
            )
        if self.enable_expert_parallel and num_ranks == 1:
            raise ConfigError(
                "--enable-expert-parallel spreads experts over the ranks of each instance: it "
                "needs --tensor-parallel-size of 2 or more"
            )

    @classmethod
    def of_device(cls, device: str, **given: Any) -> "InstanceConfig":
        """What was given, and for the rest what suits the device."""
        if given.get("engine") == "vllm":
            given.setdefault("block_size", VLLM_BLOCK_SIZE)
        if device == "cuda":
            given.setdefault("block_size", CUDA_BLOCK_SIZE)
            if not given.keys() & {"memory_bytes", "kv_cache_memory_bytes"}:
                given.setdefault("gpu_memory_utilization", GPU_MEMORY_UTILIZATION)
        return cls(device=device, **given)
