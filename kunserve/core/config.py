"""The one frozen tree of settings. A default lives here and nowhere else."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kunserve.core.cost import NO_WINDOWS, CostCoefficients, Windows
from kunserve.core.errors import ConfigError
from kunserve.core.front_config import ChatConfig, LogConfig
from kunserve.core.kv_blocks import KvBlocks, KvRing, check_hybrid
from kunserve.core.rank_settings import check_expert_ranks, check_rank_weights, check_ranks
from kunserve.core.speculative_config import SpeculativeConfig

MIB = 1 << 20

OverloadPolicy: TypeAlias = Literal["recompute", "swap", "park", "migrate", "observe", "drop"]
DispatchPolicy: TypeAlias = Literal["soonest", "round-robin"]

CUDA_BLOCK_SIZE = 64
"""On a GPU: larger than on a CPU, because blocks of one layer lie far from each other."""
GPU_MEMORY_UTILIZATION = 0.9
"""Of a GPU's memory, for all of its instances."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str = "smollm2-135m"
    """The built-in model's name, a Hugging Face folder or hub id, or a .gguf file."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer; the model's own when None."""
    served_model_name: tuple[str, ...] = ()
    """Names in the API; the first one is in answers and metrics. ``model`` when empty."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights and KV. float16 on a GPU only."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    quantization: Literal["none", "auto", "gguf", "compressed-tensors"] = "none"
    """How weights lie in memory: expanded to ``dtype``; as they are stored, where the device can
    compute with them; or as told, which must be how they are stored."""
    seed: int = 0
    """Seeds dummy weights and the sampling of requests that bring no seed."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; what the model and the memory allow when None."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """Defaults of sampling: the model's own (``generation_config.json``), or neutral ones."""

    def __post_init__(self) -> None:
        """A name that no client could give is a mistake."""
        if not all(self.served_model_name):
            raise ConfigError("a served model name must not be empty")


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """One instance's resources."""

    device: str = "cpu"
    """Where weights and KV lie and steps are computed: "cpu" or "cuda"."""
    memory_bytes: int = 1024 * MIB
    """Arena for weights and KV together, on that device."""
    gpu_memory_utilization: float | None = None
    """If given, the share of a GPU's memory that each instance takes, with all that it needs:
    ``memory_bytes`` is what that leaves for weights and KV. The flag of this name is the share of
    all instances on a GPU together, which the front divides."""
    kv_cache_memory_bytes: int | None = None
    """If given, the arena is the weights plus this, and ``memory_bytes`` is ignored."""
    block_size: int = 16
    """Tokens per KV block."""
    disable_hybrid_kv_cache_manager: bool = True
    """Whether KV of layers with a window is kept whole, as that of the others. Otherwise it is
    written over when no step reads it any more, and more requests fit."""
    kv_ring: KvRing | None = None
    """Where it is: what the model and the steps make of it."""
    num_threads: int = 1
    """Compute threads of each instance, over all its ranks."""
    tensor_parallel_size: int = 1
    """Ranks of each instance: processes that hold and compute a part of every layer each."""
    enable_expert_parallel: bool = False
    """Ranks have whole experts each, instead of a part of every one."""
    granule_bytes: int = 256 * 1024
    """Smallest piece of memory that moves between weights and KV."""
    huge_pages: Literal["auto", "off"] = "auto"
    """Whether memory on CPUs is taken in pages of 2 MiB, as far as the system gives some."""
    attention: Literal["fused", "reference", "flashinfer"] = "fused"
    """``flashinfer`` on a GPU only; ``reference``, plain torch, is what tests compare with."""
    enforce_eager: bool = False
    """On a GPU: ask for every operation of every step, instead of recording steps as graphs."""

    def __post_init__(self) -> None:
        """A share is of a GPU's memory, and ranks are processes of CPUs."""
        check_ranks(self.tensor_parallel_size, self.device, self.attention, self.num_threads)
        check_expert_ranks(self.tensor_parallel_size, self.enable_expert_parallel)
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, not {share}"
            )
        if share is not None and self.device == "cpu":
            raise ConfigError("--gpu-memory-utilization needs --device cuda; see --instance-memory")

    @property
    def blocks(self) -> KvBlocks:
        """How many blocks a request's tokens take."""
        return KvBlocks(self.block_size, self.kv_ring)

    @classmethod
    def of_device(cls, device: str, **given: Any) -> "InstanceConfig":
        """What was given, and for the rest what suits the device."""
        if device == "cuda":
            given.setdefault("block_size", CUDA_BLOCK_SIZE)
            if not given.keys() & {"memory_bytes", "kv_cache_memory_bytes"}:
                given.setdefault("gpu_memory_utilization", GPU_MEMORY_UTILIZATION)
        return cls(device=device, **given)


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """Relief by swapping: a preempted request's KV waits in host memory."""

    host_bytes_per_s: float
    """Of each instance's link to host memory, each way."""
    host_bytes: int | None = None
    """Host memory of each instance for KV; None is no limit."""
    max_park_s: float | None = None
    """Requests that decode are parked there too, no longer than this, so that whoever waits gets
    its first token. None: nobody is parked."""
    is_second_line: bool = False
    """A group uses host memory only after ``AllowParking``: nothing is left to drop for it."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one group's scheduler."""

    max_num_seqs: int = 256
    """Requests that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens computed in one step, at most."""
    tpot_slo_s: float | None = None
    """How long a decode may wait for its next token while prompts queue. None: it runs in every
    step, however long that takes."""
    watermark: float = 0.01
    """Share of the KV memory that an admission leaves free, so that it does not preempt at once."""
    enable_prefix_caching: bool = True
    """Whether KV of equal beginnings is computed once."""
    lookahead: bool = True
    """In a pipeline, form microbatches of equal predicted time over all queued work."""
    min_microbatch_tokens: int = 64
    """Lookahead makes no smaller microbatches to have more of them."""
    profile: str | None = None
    """File of ``kunserve profile``; when None the default place is looked at."""
    cost: CostCoefficients | None = None
    """From the profile, or assumed from the model's shape; None costs every token the same."""
    speculative_config: SpeculativeConfig | None = None
    """What is guessed ahead of the tokens that are known; None: nothing."""
    swap: SwapConfig | None = None
    """With overload policies ``swap`` and ``park``, and with parking behind ``drop``.
    None: the KV of a preempted request is computed again."""

    def __post_init__(self) -> None:
        """Swapping is paced by the time that steps take, so that must be known."""
        if self.swap is not None and self.cost is None:
            raise ConfigError("swapping needs the cost of steps: give a profile")

    @property
    def windows(self) -> Windows:
        """Which part of their context tokens see, as far as costs tell."""
        return NO_WINDOWS if self.cost is None else self.cost.windows


MAX_PARK_S = 10.0


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """When to drop and when to restore."""

    policy: OverloadPolicy = "drop"
    """``observe`` decides as ``drop`` and preempts as ``recompute``: it drops nothing."""
    restore_below: float = 0.5
    """Restore when demand is under this share of the undropped KV memory."""
    dwell_s: float = 2.0
    """Shortest time between two transitions of one group."""
    restore_hold_s: float = 3.0
    """Demand must stay low this long before a restore."""
    forecast_s: float = 0.5
    """How far ahead demand is extrapolated: about the time that a drop takes."""
    min_deep_gain: float = 0.2
    """Least memory, of what its groups have, that a merge into more than two stages must add."""
    max_queue_per_gain: float = 1.0
    """Pairs that add little memory are made while what waits, and finds no room, is at most so many
    times what they free. For deeper pipelines it is one less (``policy/drop/worth.py``)."""
    max_group_size: int | None = None
    """Most instances that share one copy of the weights; None is no limit."""
    place_aware: bool = True
    """Whether groups that stand near each other merge first, and layers come from the nearest
    holder. Only the simulator can do otherwise, to compare."""
    max_park_s: float = MAX_PARK_S
    """Longest pause of a request that is parked in host memory."""
    park_behind_drop: bool = False
    """With ``drop``: requests are parked where memory is short and nothing is left to drop."""

    def __post_init__(self) -> None:
        """Parking is a second line of ``drop`` only."""
        if self.park_behind_drop and self.policy != "drop":
            raise ConfigError(f"park_behind_drop goes with policy 'drop', not {self.policy!r}")
        if not 0.0 < self.max_park_s < math.inf:
            raise ConfigError(f"max_park_s must be above 0 and finite, not {self.max_park_s}")
        if self.max_park_s != MAX_PARK_S and not (self.policy == "park" or self.park_behind_drop):
            raise ConfigError(
                f"max_park_s goes with policy 'park' or with park_behind_drop, not {self.policy!r}"
            )

    @property
    def uses_host_memory(self) -> bool:
        """Whether KV may go to host memory."""
        return self.policy in ("swap", "park") or self.park_behind_drop

    def swap_config(self, host_bytes_per_s: float, host_bytes: int | None) -> SwapConfig | None:
        """How groups use a host memory that is reached so fast; None if they do not."""
        if not self.uses_host_memory:
            return None
        max_park_s = None if self.policy == "swap" else self.max_park_s
        return SwapConfig(host_bytes_per_s, host_bytes, max_park_s, self.park_behind_drop)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How many instances, and how they are watched."""

    num_instances: int = 2
    dispatch_policy: DispatchPolicy = "soonest"
    """``soonest``: requests wait in one queue for the group that can start them first.
    ``round-robin``: each goes to the next group in turn at once, as to servers that know nothing
    of each other."""
    prefix_aware_dispatch: bool = True
    """With ``soonest`` and prefix caching: a request goes where its beginning lies, unless there is
    too much to do."""
    pipeline_stages: int = 1
    """Instances that share one copy of the weights from the start, and for good; 1: none do."""
    min_instances: int | None = None
    """Fewest that the cluster shrinks to when it has had little to do; None: ``num_instances``."""
    max_instances: int | None = None
    """Order instances up to so many under overload, and give them back later; None: never."""
    launcher: Literal["local", "ray"] = "local"
    """Who starts instances: this process on its machine, or Ray on the nodes of its cluster."""
    ray_address: str | None = None
    """Of Ray's head, as ``host:port``; None: the cluster that this machine is a node of."""
    ray_name: str | None = None
    """Tells this server from others of the Ray cluster: a front that is started with the same name,
    on any node, takes the instances of one that died. None: the port's number."""
    ray_placement: Literal["spread", "pack"] = "spread"
    """Instances on as many nodes as there are, or on few."""
    ray_autoscaling: bool = False
    """Whether Ray's autoscaler adds nodes, so that instances wait for one that is not there yet."""
    topology: str | None = None
    """File that says on which host each instance stands; None: all on one."""
    report_period_s: float = 0.1
    heartbeat_timeout_s: float = 10.0
    """An instance silent for this long is dead."""
    hang_timeout_s: float = 60.0
    """An instance that beats, but whose loop stands still for this long and for ten times its
    longest step, hangs. It is killed and replaced."""
    link_timeout_s: float = 1.0
    """Between hosts: a connection on which nothing comes for this long is broken."""
    start_timeout_s: float = 300.0
    """Model loading (and a first compilation of the kernels) must end within this."""
    trace_out: str | None = None
    """File for a Chrome trace of every step, transfer and transition, written at the end."""
    front_grace_s: float = 30.0
    """How long the instances of a server outlive their front, for the next one to find them."""
    check_invariants: bool = False
    """Whether the drivers check every owner's invariants when idle (for tests; it costs time)."""

    @property
    def fewest_instances(self) -> int:
        """To which the cluster shrinks by itself."""
        return self.num_instances if self.min_instances is None else self.min_instances


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front."""

    host: str = "127.0.0.1"
    port: int = 8000
    root_path: str = ""
    """What a proxy puts before every path."""
    ssl_certfile: str | None = None
    """Certificate in PEM: TLS is spoken when there is one."""
    ssl_keyfile: str | None = None
    """Its key; in the same file when None."""
    ssl_ca_certs: str | None = None
    """Those who sign certificates of clients."""
    ssl_cert_reqs: int = 0
    """Whether clients need a certificate, as ``ssl.VerifyMode``: 0 no, 1 if they want, 2 yes."""
    api_key: str | None = None
    api_key_file: str | None = None
    """More keys, one on a line."""
    allowed_origins: tuple[str, ...] = ()
    """Whose web pages may call the API from a browser; ``*`` is everybody's."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    """Whether those pages may send cookies and certificates."""
    max_num_queued_reqs: int | None = None
    """Waiting requests beyond which new ones are shed with 503; None is no limit."""
    max_num_queued_tokens: int | None = None
    request_timeout_s: float | None = None
    """A request that has not ended after this long ends with an error; None is no limit. Without
    one, a request that no instance can take ends after ``cluster.start_timeout_s``."""
    shutdown_timeout_s: float = 30.0
    """How long SIGTERM waits for in-flight requests."""
    max_connections: int = 4096
    api_server_count: int = 1
    """Processes that speak HTTP, before one controller."""
    enable_prompt_tokens_details: bool = False
    """Whether ``usage`` tells how many prompt tokens were cached."""
    enable_admin: bool = False
    """Whether the write endpoints under /kunserve answer."""

    def __post_init__(self) -> None:
        """A key that nobody could send, or that everybody sends, is a mistake."""
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise ConfigError("the API key must not be empty, nor begin or end with a space")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"the root path must begin with a slash: /{self.root_path}")
        for origin in self.allowed_origins:
            scheme, mark, rest = origin.partition("://")
            if origin not in ("*", "null") and not (scheme and mark and rest and "/" not in rest):
                raise ConfigError(
                    f"{origin!r} is no origin; write for example https://chat.example.org, "
                    "without a slash at the end"
                )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("TLS needs a certificate: give --ssl-certfile too")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("clients' certificates are checked against --ssl-ca-certs: give it")

    @property
    def wants_key(self) -> bool:
        """Whether clients need a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def has_open_admin(self) -> bool:
        """Whether the write endpoints answer without a key."""
        return self.enable_admin and not self.wants_key


@dataclass(frozen=True, slots=True)
class KunServeConfig:
    """Everything ``kunserve serve`` needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        """Settings that cannot go together are a mistake."""
        policy, stages = self.overload.policy, self.cluster.pipeline_stages
        if self.scheduler.swap is not None and not self.overload.uses_host_memory:
            raise ConfigError(
                f"host memory is for overload policies 'swap' and 'park', not {policy!r}"
            )
        if stages > 1 and policy in ("drop", "observe"):
            raise ConfigError(
                f"pipelines of {stages} from the start have no layers to drop or restore: they go "
                f"with overload policy 'recompute', 'swap', 'park' or 'migrate', not {policy!r}"
            )
        self._check_size()
        check_rank_weights(self.instance.tensor_parallel_size, self.model.quantization)
        if not self.instance.disable_hybrid_kv_cache_manager:
            check_hybrid(
                self.instance.device,
                self.instance.tensor_parallel_size,
                self.scheduler.enable_prefix_caching,
                policy,
            )
        if self.cluster.num_instances % stages:
            raise ConfigError(
                f"{self.cluster.num_instances} instances cannot be parted into pipelines of "
                f"{stages}"
            )

    def _check_size(self) -> None:
        cluster = self.cluster
        num, fewest, most = cluster.num_instances, cluster.fewest_instances, cluster.max_instances
        if (cluster.min_instances or most) and cluster.pipeline_stages > 1:
            raise ConfigError(
                "pipelines from the start have a fixed size: leave --min-instances and "
                "--max-instances out"
            )
        if fewest > num:
            raise ConfigError(f"--min-instances {fewest} is more than --num-instances {num}")
        if most is not None and most < num:
            raise ConfigError(f"--max-instances {most} is less than --num-instances {num}")
        if fewest < num and most is None:
            raise ConfigError(
                "--min-instances is for a cluster that grows and shrinks: give --max-instances too"
            )
        of_ray = {
            "--ray-address": cluster.ray_address,
            "--ray-name": cluster.ray_name,
            "--ray-autoscaling": cluster.ray_autoscaling,
        }
        for flag, value in of_ray.items():
            if value and cluster.launcher != "ray":
                raise ConfigError(f"{flag} goes with --cluster ray")
        if cluster.topology is not None and cluster.launcher == "ray":
            raise ConfigError(
                "--topology is for a cluster without Ray: its nodes say by labels where they are "
                "(`ray start --labels rack=left,link-gbps=25`)"
            )
