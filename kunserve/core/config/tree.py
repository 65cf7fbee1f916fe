"""The whole configuration."""

from dataclasses import dataclass, field

from kunserve.core.config.cluster import ClusterConfig
from kunserve.core.config.front import ChatConfig, LogConfig, ServerConfig
from kunserve.core.config.instance import InstanceConfig
from kunserve.core.config.model import ModelConfig
from kunserve.core.config.overload import OverloadConfig
from kunserve.core.config.scheduler import SchedulerConfig
from kunserve.core.errors import ConfigError
from kunserve.core.kv_blocks import check_hybrid


@dataclass(frozen=True, slots=True)
class KunServeConfig:
    """Everything ``kunserve serve`` needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        """Settings that cannot go together are a mistake."""
        policy, stages = self.overload.policy, self.cluster.pipeline_stages
        if self.cluster.num_instances % stages:
            raise ConfigError(
                f"{self.cluster.num_instances} instances cannot be parted into pipelines of "
                f"{stages}"
            )
        if stages > 1 and policy in ("drop", "observe"):
            raise ConfigError(
                f"pipelines of {stages} from the start have no layers to drop or restore: they go "
                f"with overload policy 'recompute', 'swap', 'park' or 'migrate', not {policy!r}"
            )
        self.cluster.check_size()
        num_ranks, quantization = self.instance.tensor_parallel_size, self.model.quantization
        if num_ranks > 1 and quantization not in ("none", "auto"):
            raise ConfigError(
                f"--tensor-parallel-size {num_ranks}: quantised weights are expanded on several "
                f"ranks, so leave --quantization {quantization} out"
            )
        if not self.instance.disable_hybrid_kv_cache_manager:
            check_hybrid(
                self.instance.device,
                num_ranks,
                self.scheduler.enable_prefix_caching,
                policy,
            )
