"""One front at a time, and a state that is whole or not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kunserve.cluster.processes import run_folder as run_folder_module
from kunserve.cluster.processes.process_mark import kill_marked, mark_of, open_marked
from kunserve.cluster.processes.run_folder import FrontLock, RunFolder, read_state
from kunserve.cluster.processes.seat import RunState
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from tests.conftest import wait_until

STATE = RunState("front", 3, "digest", "/tmp/sockets", {InstanceId(0): "1:2"})


def test_the_lock_tells_whether_a_front_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder_module, "LOCK_S", 0.05)
    folder = RunFolder(tmp_path / "run")
    assert not FrontLock(folder.path).is_free()
    assert not FrontLock(folder.path).try_to_take()
    with pytest.raises(ConfigError, match="another server is at this address.*--port"):
        RunFolder(folder.path)
    folder.remove()
    assert not folder.path.exists() and FrontLock(folder.path).is_free()
    RunFolder(folder.path).remove()


def test_the_lock_of_a_folder_that_was_removed_holds_nobody_back(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run")
    (first.path / "front.lock").unlink()
    RunFolder(first.path).remove()


def test_the_state_is_read_as_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.read() is None
    folder.write(STATE)
    assert folder.read() == STATE == read_state(folder.path)
    for nonsense in (b"", b"{", b"[]", b'{"epoch": 1}', b"\xff"):
        (folder.path / "state.json").write_bytes(nonsense)
        assert folder.read() is None
    folder.write(STATE)
    (folder.path / "sockets").mkdir()
    folder.clear()
    assert folder.read() is None and not (folder.path / "sockets").exists()
    folder.remove()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(ConfigError, match="only you can enter"):
        RunFolder(tmp_path / "run")


def test_a_folder_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match="run folder"):
            RunFolder(tmp_path / name)


def test_marks_name_one_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mark = mark_of(process.pid)
        assert mark is not None and mark == mark_of(process.pid) != mark_of(os.getpid())
        kill_marked(f"{process.pid}:1")  # another process had that number once
        assert mark_of(process.pid) == mark
        fd = open_marked(mark)
        assert fd is not None
        os.close(fd)
        kill_marked(mark)
        wait_until(lambda: mark_of(process.pid) is None)
        assert open_marked(mark) is None
        process.wait()
        assert mark_of(process.pid) is None
        kill_marked(mark)
