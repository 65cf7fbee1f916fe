"""The least of what the machine has and what the cgroups leave, over made-up trees."""

from pathlib import Path

import pytest

from kunserve.core.errors import TooLittleMemory
from kunserve.engine.memory import pages
from kunserve.engine.memory.free_memory import available_bytes
from kunserve.engine.memory.pages import HostPages

GIB = 1 << 30
V2 = "36 25 0:32 {root} {at} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 25 0:32 {root} {at} rw - cgroup cgroup rw,memory\n"
V1_OTHER = "35 25 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


def machine(root: Path, cgroup: str, mounts: str) -> Path:
    """A machine of 64 GiB with 8 GiB available."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {64 << 20} kB\nMemFree: 100 kB\nMemAvailable: {8 << 20} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text("24 1 0:21 / /sys rw - sysfs sysfs rw\n" + mounts)
    return root


def limit_v2(folder: Path, limit: str, used: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile 7\ninactive_file {inactive}\n")


def limit_v1(folder: Path, limit: int, used: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    stat = f"inactive_file 1\ntotal_inactive_file {inactive}\n"
    (folder / "memory.stat").write_text(stat)


def test_without_cgroups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, "", "")) == 8 * GIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_bytes(tmp_path) == 8 * GIB
    assert 0 < available_bytes() < 1 << 50


def test_a_limit_anywhere_up_the_tree_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a/b\n", V2.format(root="/", at="/sys/fs/cgroup"))
    top = root / "sys/fs/cgroup"
    limit_v2(top / "a/b", "max", GIB)
    assert available_bytes(root) == 8 * GIB
    limit_v2(top / "a", str(3 * GIB), GIB)
    assert available_bytes(root) == 2 * GIB
    limit_v2(top / "a/b", str(2 * GIB), GIB)
    assert available_bytes(root) == GIB
    limit_v2(top / "a/b", str(2 * GIB), 2 * GIB, inactive=GIB // 2)
    assert available_bytes(root) == GIB // 2
    limit_v2(top / "a/b", str(GIB), 2 * GIB)
    assert available_bytes(root) == 0


def test_inside_a_container_the_mount_is_the_limit(tmp_path: Path) -> None:
    """With a cgroup namespace the path is "/"; without, it is the host's and not shown."""
    spaced = machine(tmp_path / "1", "0::/\n", V2.format(root="/", at="/sys/fs/cgroup"))
    limit_v2(spaced / "sys/fs/cgroup", str(GIB), GIB // 4)
    assert available_bytes(spaced) == GIB - GIB // 4
    host = machine(
        tmp_path / "2", "0::/docker/c1\n", V2.format(root="/docker/c1", at="/sys/fs/cgroup")
    )
    limit_v2(host / "sys/fs/cgroup", str(GIB), GIB // 2)
    assert available_bytes(host) == GIB // 2


def test_version_1_and_both_at_once(tmp_path: Path) -> None:
    cgroup = "5:cpu,cpuacct:/x\n4:memory:/docker/c1\n1:name=systemd:/y\n0::/z\n"
    mounts = V1_OTHER + V1.format(root="/docker/c1", at="/sys/fs/cgroup/memory")
    root = machine(tmp_path, cgroup, mounts + V2.format(root="/", at="/sys/fs/cgroup/unified"))
    (root / "sys/fs/cgroup/unified/z").mkdir(parents=True)
    limit_v1(root / "sys/fs/cgroup/memory", 9_223_372_036_854_771_712, GIB)
    assert available_bytes(root) == 8 * GIB
    limit_v1(root / "sys/fs/cgroup/memory", 4 * GIB, 2 * GIB, inactive=GIB)
    assert available_bytes(root) == 3 * GIB


def test_an_instance_that_its_container_would_kill_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "available_bytes", lambda: 900 << 20)
    with pytest.raises(TooLittleMemory, match="1073741824 bytes.*943718400 left"):
        HostPages(GIB, 1 << 18)
