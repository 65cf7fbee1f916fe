"""What dead clusters have left is removed; nothing of one that lives or may go on."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kunserve.cluster.processes import sweep as sweep_module
from kunserve.cluster.processes.process_mark import mark_of
from kunserve.cluster.processes.run_folder import RunFolder
from kunserve.cluster.processes.seat import RunState
from kunserve.cluster.processes.sweep import YOUNG_S, sweep
from kunserve.core.ids import InstanceId
from kunserve.transport.wire.socket_folder import SocketFolder

DIES = """
import os, sys
from pathlib import Path
from kunserve.transport.wire.socket_folder import SocketFolder
from kunserve.transport.wire.sockets import bind_router
folder = SocketFolder(Path(sys.argv[1]))
bind_router(folder.address("front"))
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place that is swept."""
    monkeypatch.setattr(sweep_module, "places", lambda: iter([tmp_path]))
    yield tmp_path


def folder_of(place: Path, name: str) -> Path:
    path = place / f"kunserve-{name}"
    path.mkdir(mode=0o700)
    return path


def age(*folders: Path) -> None:
    """They have not changed for long."""
    for folder in folders:
        long_ago_s = time.time() - 2 * YOUNG_S
        os.utime(folder, (long_ago_s, long_ago_s))


def test_sockets_of_a_killed_cluster_are_removed(place: Path) -> None:
    path = folder_of(place, "dead")
    assert subprocess.run([sys.executable, "-c", DIES, str(path)], check=False).returncode == -9
    assert {one.name for one in path.iterdir()} == {"front", "owner.lock"}
    assert sweep() == [], "it is young"
    age(path)
    assert sweep() == [path] and not path.exists()


def test_what_lives_or_may_go_on_is_left(place: Path) -> None:
    living, orphaned = folder_of(place, "living"), folder_of(place, "orphaned")
    owner = SocketFolder(living)
    (orphaned / "owner.lock").touch()
    with socket.socket(socket.AF_UNIX) as instance:
        instance.bind(str(orphaned / "links-0-1"))
        instance.listen()
        age(living, orphaned)
        assert sweep() == []
    age(orphaned)
    assert sweep() == [orphaned]
    owner.remove()


def test_what_is_not_of_a_cluster_is_left(place: Path) -> None:
    empty, other, shared = (folder_of(place, name) for name in ("empty", "other", "shared"))
    (other / "notes").touch()
    (shared / "owner.lock").touch()
    shared.chmod(0o755)
    age(empty, other, shared)
    assert sweep() == []


def test_a_run_folder_is_left_while_anybody_of_the_run_lives(place: Path) -> None:
    path = place / "kunserve-0-localhost-8000"
    run = RunFolder(path)
    mine = mark_of(os.getpid())
    assert mine is not None
    run.write(RunState("front", 0, "digest", str(path), {InstanceId(0): mine}))
    age(path)
    assert sweep() == [], "its front lives"
    run._lock.release()
    age(path)
    assert sweep() == [], "its instance lives"
    (path / "state.json").unlink()
    age(path)
    assert sweep() == [path]
