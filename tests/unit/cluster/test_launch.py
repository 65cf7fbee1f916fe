import signal

import msgspec
import pytest

from kunserve.cluster import launch
from kunserve.cluster.launch import (
    EXIT_LOST_MESSAGES,
    EXIT_REMAP_FAILED,
    PROCESS_BYTES,
    StepFailure,
    blame_for,
    check_memory,
)
from kunserve.control.cluster.quarantine import Blame, Cause
from kunserve.core.config import MIB, ClusterConfig, InstanceConfig, KunServeConfig
from kunserve.core.errors import TooLittleMemory
from kunserve.core.ids import RequestId
from kunserve.engine.memory import RemapFailed


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


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (1, Cause.INSIDE),
        (-signal.SIGSEGV, Cause.INSIDE),
        (-signal.SIGKILL, Cause.OUTSIDE),
        (-signal.SIGTERM, Cause.OUTSIDE),
        (EXIT_LOST_MESSAGES, Cause.OUTSIDE),
        (EXIT_REMAP_FAILED, Cause.OUTSIDE),
        (None, Cause.OUTSIDE),
    ],
)
def test_who_is_to_blame_for_an_end(exit_code: int | None, cause: Cause) -> None:
    assert blame_for(exit_code, b"") == Blame(cause)
    words = msgspec.json.encode(StepFailure((RequestId("a"), RequestId("b"))))
    assert blame_for(exit_code, words) == Blame(Cause.INSIDE, (RequestId("a"), RequestId("b")))


def test_a_failed_remap_is_known_by_its_exit_code() -> None:
    assert RemapFailed.EXIT_CODE == EXIT_REMAP_FAILED
