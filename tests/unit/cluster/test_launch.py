import pytest

from kunserve.cluster import launch
from kunserve.cluster.launch import PROCESS_BYTES, check_memory
from kunserve.core.config import MIB, ClusterConfig, InstanceConfig, KunServeConfig
from kunserve.core.errors import TooLittleMemory


def config(num_instances: int, **instance: int) -> KunServeConfig:
    return KunServeConfig(
        instance=InstanceConfig(**instance), cluster=ClusterConfig(num_instances=num_instances)
    )


def test_instances_are_refused_together_before_any_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    each = 1024 * MIB + PROCESS_BYTES
    monkeypatch.setattr(launch, "available_bytes", lambda: 2 * each)
    check_memory(config(2, memory_bytes=1024 * MIB))
    with pytest.raises(TooLittleMemory, match="3 instances of 1024 MiB.*has 2388 MiB left"):
        check_memory(config(3, memory_bytes=1024 * MIB))
    check_memory(config(3, memory_bytes=1024 * MIB, kv_cache_memory_bytes=MIB))
