import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kunserve.cluster.processes import weights_files
from kunserve.cluster.processes.weights_files import WeightsFiles
from kunserve.core.config import MIB, InstanceConfig, KunServeConfig
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Measured, Plan

PLAN = Plan(KunServeConfig(), Measured(weight_sharers=2))


def fds_of(files: WeightsFiles, number: int, plan: Plan = PLAN, model: str = "m") -> list[int]:
    """Which files they are."""
    fds = files.fds_of(InstanceId(number), plan, model)
    return [os.fstat(fd).st_ino for fd in fds]


def with_ranks(num_ranks: int) -> Plan:
    instance = InstanceConfig(tensor_parallel_size=num_ranks)
    return replace(PLAN, config=replace(PLAN.config, instance=instance))


def test_instances_of_a_node_have_one_file() -> None:
    files = WeightsFiles()
    (one,) = fds_of(files, 0)
    assert fds_of(files, 1) == fds_of(files, 5) == [one]
    assert fds_of(files, 0, Plan(KunServeConfig())) == []
    files.close()


def test_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_files, "numa_nodes", lambda: [{0}, {1}, {2}, {3}])
    files = WeightsFiles()
    plan = with_ranks(2)
    assert len({*fds_of(files, 0, plan), *fds_of(files, 1, plan)}) == 4, "on other nodes"
    assert fds_of(files, 2, plan) == fds_of(files, 0, plan)
    for fd in files.fds_of(InstanceId(0), plan, "m"):
        os.ftruncate(fd, MIB)
        os.posix_fallocate(fd, 0, MIB)
    for fd in files.fds_of(InstanceId(1), plan, "m"):
        os.posix_fallocate(fd, 0, MIB)
    assert files.mapped_bytes(2) == 2 * MIB
    files.close()


def test_the_next_front_finds_what_instances_have() -> None:
    first, second, third = WeightsFiles(), WeightsFiles(), WeightsFiles()
    (inode,) = fds_of(first, 0)
    (fd,) = first.fds_of(InstanceId(0), PLAN, "m")
    os.posix_fallocate(fd, 0, MIB)
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, pass_fds=[fd], stdin=subprocess.PIPE) as process:
        first.close()
        for files in (second, third):
            files.find([process.pid, 2**22 + 1])
            assert files.mapped_bytes(1) == MIB, "before it has started one itself"
        assert fds_of(second, 1) == [inode]
        assert fds_of(third, 1, model="another") != [inode], "other settings, another copy"
        assert fds_of(third, 1) != [inode], "it was given up"
        process.kill()
    for files in (second, third):
        files.close()


def test_a_descriptor_that_closes_meanwhile_hides_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process opens and closes others while it is looked at."""
    first, second = WeightsFiles(), WeightsFiles()
    (inode,) = fds_of(first, 0)
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: ["1000000", *real(folder)])
    second.find([os.getpid()])
    assert fds_of(second, 1) == [inode]
    for files in (first, second):
        files.close()
