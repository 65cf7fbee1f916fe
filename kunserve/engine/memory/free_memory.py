"""How much memory this process may still take: what the machine has, and what its cgroups allow.

A container's limit is a cgroup's. Past it the kernel kills without a word, so it is asked first.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kunserve.core.config import MIB

PROCESS_BYTES = 224 * MIB
"""Of an instance beside its arena: interpreter, torch, a step's buffers. Measured with SmolLM2."""
ENGINE_BYTES = 300 * MIB
"""More of one that computes by another engine's modules: as vLLM's were measured."""
FRONT_BYTES = 160 * MIB
"""Of the front, as measured after some requests."""
_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """The least that any limit leaves; ``root`` is where ``proc`` and ``sys`` lie."""
    return min([_machine_bytes(root), *map(_left_bytes, _cgroup_folders(root))])


def anonymous_bytes() -> int:
    """What this process holds of memory that is no file's: interpreter, libraries, buffers."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]) * 1024


def held_bytes(pid: int) -> int:
    """What a process holds of memory that is no file's, its share of an arena included.

    And what its children hold beside arenas: the other ranks of an instance, whose arenas it maps,
    too. 0 if it has ended, or is of another machine.
    """
    return _status_bytes(pid, "RssAnon", "RssShmem") + sum(
        _status_bytes(child, "RssAnon") for child in children_of(pid)
    )


def beside_bytes(pids: Iterable[int]) -> int:
    """What these processes hold of memory that is no file's."""
    return sum(_status_bytes(pid, "RssAnon") for pid in pids)


def _status_bytes(pid: int, *names: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines.splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in names if name in fields)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started; none if it has ended, or is of another machine."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []  # it has ended, or the system does not say
    return [int(child) for child in text.split()]


def front_bytes_left(num_fronts: int = 1) -> int:
    """What this process will still take as the front: what it has is no longer available.

    With several fronts each is a process beside this one, and none of them has been started.
    """
    beside = num_fronts * FRONT_BYTES if num_fronts > 1 else 0
    return max(0, FRONT_BYTES - anonymous_bytes()) + beside


class _Files(NamedTuple):
    """What a kind of cgroup calls its files."""

    limit: str
    used: str
    reclaimable: str
    """The key in ``memory.stat`` of page cache that goes before anything is killed."""


_FILES = (
    _Files("memory.max", "memory.current", "inactive_file"),
    _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of version 2 and version 1."""
_UNLIMITED_BYTES = 1 << 62


def _machine_bytes(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _left_bytes(folder: Path) -> int:
    """What one cgroup's limit leaves; a very large number where it has none."""
    for files in _FILES:
        try:
            limit = (folder / files.limit).read_text(encoding="ascii").strip()
            if limit == "max":
                return _UNLIMITED_BYTES
            used = int((folder / files.used).read_text(encoding="ascii"))
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # the other version, or the root, which has no limit
        stat = dict(line.split(" ", 1) for line in lines)
        return max(0, int(limit) - used + int(stat.get(files.reclaimable, 0)))
    return _UNLIMITED_BYTES


def _cgroup_folders(root: Path) -> list[Path]:
    """The process's cgroups that may limit memory, each with all above it."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in groups:
        number, controllers, path = line.split(":", 2)
        is_unified = number == "0" and not controllers
        if not is_unified and "memory" not in controllers.split(","):
            continue
        for mounted_root, mount_point in _mounts_of(mounts, is_unified):
            # Inside a container the mount may show a part of the tree only, which begins at or
            # below the path that the kernel names.
            inner = Path(path)
            shown = inner.relative_to(mounted_root) if inner.is_relative_to(mounted_root) else ""
            top = root / mount_point.lstrip("/")
            folder = top / shown
            found += [one for one in (folder, *folder.parents) if one.is_relative_to(top)]
    return found


def _mounts_of(mounts: list[str], is_unified: bool) -> list[tuple[str, str]]:
    """(root within the cgroup tree, mount point) of the cgroup mounts of one version."""
    found = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" if is_unified else kind == "cgroup" and "memory" in options.split(","):
            fields = before.split()
            found.append((fields[3], fields[4]))
    return found
