"""The one frozen tree of settings. A default lives here and nowhere else, and so does all that a
flag says: a setting is one annotated field.
"""

from kunserve.core.config.cluster import ClusterConfig, DispatchPolicy
from kunserve.core.config.flag import GROUPS, Flag
from kunserve.core.config.front import ChatConfig, LogConfig, ServerConfig
from kunserve.core.config.instance import CUDA_BLOCK_SIZE, MIB, VLLM_BLOCK_SIZE, InstanceConfig
from kunserve.core.config.model import ModelConfig
from kunserve.core.config.overload import OverloadConfig, OverloadPolicy
from kunserve.core.config.scheduler import (
    SchedulerConfig,
    SpeculativeConfig,
)
from kunserve.core.config.tree import KunServeConfig

__all__ = [
    "CUDA_BLOCK_SIZE",
    "GROUPS",
    "MIB",
    "VLLM_BLOCK_SIZE",
    "ChatConfig",
    "ClusterConfig",
    "DispatchPolicy",
    "Flag",
    "InstanceConfig",
    "KunServeConfig",
    "LogConfig",
    "ModelConfig",
    "OverloadConfig",
    "OverloadPolicy",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
]
