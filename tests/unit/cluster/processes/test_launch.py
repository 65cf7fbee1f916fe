import asyncio
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kunserve.cluster.processes import launch
from kunserve.cluster.processes.launch import (
    InstanceOrder,
    LastWords,
    LocalProcess,
    blame_for,
    check_growth,
    check_memory,
)
from kunserve.cluster.processes.process_mark import mark_of
from kunserve.cluster.processes.weights_files import WeightsFiles
from kunserve.control.cluster.requests.quarantine import Blame, Cause, blame_of
from kunserve.core.config import (
    MIB,
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ServerConfig,
)
from kunserve.core.errors import TooLittleMemory
from kunserve.core.faults import (
    EXIT_LOST_MESSAGES,
    EXIT_MACHINE_FAILED,
    EXIT_REMAP_FAILED,
    Fault,
)
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.plan import Measured, Plan
from kunserve.core.python_command import python_command
from kunserve.engine.memory import free_memory
from kunserve.engine.memory.free_memory import FRONT_BYTES, PROCESS_BYTES
from kunserve.transport.wire.network import FrontPlace


def config(num_instances: int, **instance: int) -> KunServeConfig:
    return KunServeConfig(
        instance=InstanceConfig(**instance), cluster=ClusterConfig(num_instances=num_instances)
    )


def test_instances_are_refused_together_before_any_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The front counts too, as far as it has not got its memory yet."""
    each = 1024 * MIB + PROCESS_BYTES
    monkeypatch.setattr(free_memory, "anonymous_bytes", lambda: 60 * MIB)
    monkeypatch.setattr(launch, "available_bytes", lambda: 2 * each + FRONT_BYTES - 60 * MIB)
    with caplog.at_level(logging.INFO):
        check_memory(config(2, memory_bytes=1024 * MIB))
    needed = "needed=2596MiB (each of 2 instances: 1024 and 224 beside it)"
    assert f"memory {needed} available=2596MiB" in caplog.text
    with pytest.raises(TooLittleMemory, match="3 instances of 1024 MiB.*has 2596 MiB left"):
        check_memory(config(3, memory_bytes=1024 * MIB))
    check_memory(config(3, memory_bytes=1024 * MIB, kv_cache_memory_bytes=MIB))
    monkeypatch.setattr(launch, "available_bytes", lambda: 2 * each)
    with pytest.raises(TooLittleMemory, match="100 MiB more for this process"):
        check_memory(config(2, memory_bytes=1024 * MIB))


def test_several_fronts_take_memory_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are started after the instances, and would find nothing left."""
    each = 1024 * MIB + PROCESS_BYTES
    made = config(2, memory_bytes=1024 * MIB)
    monkeypatch.setattr(free_memory, "anonymous_bytes", lambda: 60 * MIB)
    monkeypatch.setattr(launch, "available_bytes", lambda: 2 * each + 4 * FRONT_BYTES - 60 * MIB)
    for count in (1, 3):
        check_memory(replace(made, server=ServerConfig(api_server_count=count)))
    with pytest.raises(TooLittleMemory, match=r"process and 4 fronts \(--api-server-count\)"):
        check_memory(replace(made, server=ServerConfig(api_server_count=4)))


def test_a_cluster_that_cannot_grow_to_its_most_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    each = 1024 * MIB + PROCESS_BYTES
    monkeypatch.setattr(launch, "available_bytes", lambda: 3 * each + FRONT_BYTES)
    made = config(2, memory_bytes=1024 * MIB)
    for most, is_told in ((3, False), (4, True)):
        caplog.clear()
        check_memory(replace(made, cluster=ClusterConfig(num_instances=2, max_instances=most)))
        assert ("memory for 3 instances only" in caplog.text) == is_told


def test_growth_is_refused_where_it_would_take_what_running_instances_were_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = 1024 * MIB + PROCESS_BYTES
    monkeypatch.setattr(launch, "available_bytes", lambda: 2 * each)
    monkeypatch.setattr(launch, "held_bytes", lambda pid: each - pid * MIB)
    made = Plan(config(2, memory_bytes=1024 * MIB))
    none = WeightsFiles()
    check_growth(made, 2, [0, 0], none)
    check_growth(made, 1, [0, 1024], none)
    with pytest.raises(TooLittleMemory, match=r"^1 more of 1024 MiB .* has 1247 MiB left beside"):
        check_growth(made, 1, [1000, 249], none)
    unknown = config(2, memory_bytes=1024 * MIB, kv_cache_memory_bytes=MIB)
    check_growth(Plan(unknown), 9, [0], none)


def test_an_instance_more_needs_no_memory_for_shared_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 1024 MiB each, 300 MiB are half of 600 MiB of weights, which all have mapped."""
    own = 724 * MIB + PROCESS_BYTES
    monkeypatch.setattr(launch, "held_bytes", lambda pid: own + 600 * MIB - pid * MIB)
    monkeypatch.setattr(WeightsFiles, "mapped_bytes", lambda self, num_ranks: 600 * MIB)
    monkeypatch.setattr(launch, "available_bytes", lambda: own)
    plan = Plan(config(2, memory_bytes=1024 * MIB), Measured(weight_sharers=2))
    check_growth(plan, 1, [0, 0], WeightsFiles())
    with pytest.raises(TooLittleMemory, match="has 947 MiB left beside"):
        check_growth(plan, 1, [0, 1], WeightsFiles())


def test_what_a_process_holds() -> None:
    assert free_memory.held_bytes(os.getpid()) > 8 * MIB
    assert free_memory.held_bytes(2**22 + 1) == 0


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (1, Cause.INSIDE),
        (-signal.SIGSEGV, Cause.INSIDE),
        (-signal.SIGKILL, Cause.OUTSIDE),
        (-signal.SIGTERM, Cause.OUTSIDE),
        (EXIT_LOST_MESSAGES, Cause.NOBODY),
        (EXIT_REMAP_FAILED, Cause.NOBODY),
        (EXIT_MACHINE_FAILED, Cause.NOBODY),
        (None, Cause.OUTSIDE),
    ],
)
def test_who_is_to_blame_for_an_end(exit_code: int | None, cause: Cause) -> None:
    assert blame_for(exit_code, b"") == Blame(cause)
    named = (RequestId("a"), RequestId("b"))
    for fault in Fault:
        blame = blame_for(exit_code, msgspec.json.encode(LastWords(fault, named)))
        assert blame == blame_of(fault, named), "words tell more than a code"


def test_only_a_failed_step_speaks_against_the_requests_in_it() -> None:
    named = (RequestId("a"),)
    assert {fault: blame_of(fault, named) for fault in Fault} == {
        Fault.REQUEST: Blame(Cause.INSIDE, named),
        Fault.UNKNOWN: Blame(Cause.OUTSIDE),
        Fault.MACHINE: Blame(Cause.NOBODY),
        Fault.ORDER: Blame(Cause.NOBODY),
    }


def test_a_child_does_not_run_another_kunserve_of_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "kunserve"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    root = str(Path(launch.__file__).parents[3])
    run = [*python_command(), "-m", "kunserve.cluster.processes.launch"]
    result = subprocess.run(run, env={"PYTHONPATH": root}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert python_command() == [sys.executable], "this process would find it there, too"


@pytest.mark.parametrize("tells_moves", [False, True])
def test_what_a_process_says_before_its_end_is_kept(tells_moves: bool) -> None:
    """More than a pipe holds; and it has read its order."""
    words = "import sys; order = sys.stdin.readline(); print(len(order) * 'word', end='')"

    async def story() -> None:
        order = InstanceOrder(InstanceId(0), None, "", "/" * 30_000, Plan(KunServeConfig()))
        process = LocalProcess(order, ("-c", words), tells_moves=tells_moves)
        assert process.said == b"" and mark_of(process.pid) == process.mark
        assert await process.wait() == "exit code 0" and process.exit_code == 0
        assert len(process.said) == 4 * (len(msgspec.json.encode(order)) + 1)
        process.follow(FrontPlace("nobody hears this"))

    asyncio.run(story())
