"""Nobody but the user can reach a cluster's sockets, nor take a dead process's place."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.transport.peers.links import PeerLinks
from kunserve.transport.wire.socket_folder import LONGEST_PATH_BYTES, SocketFolder

AS_ANOTHER_USER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
path = sys.argv[1]
for act in ("connect", "bind"):
    one = socket.socket(socket.AF_UNIX)
    try:
        getattr(one, act)(path if act == "connect" else path + "2")
    except PermissionError:
        print("refused", act)
try:
    print(os.listdir(os.path.dirname(path)))
except PermissionError:
    print("refused list")
"""


def test_the_folder_is_its_users_alone() -> None:
    folder = SocketFolder()
    links = PeerLinks(InstanceId(0), folder.address("links-0-123"))
    at = Path(links.address.removeprefix("ipc://"))
    assert at.parent == folder.path and at.is_socket()
    state = folder.path.stat()
    assert (stat.S_IMODE(state.st_mode), state.st_uid) == (0o700, os.geteuid())
    links.close()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_connect_nor_wait_in_a_dead_ones_place() -> None:
    folder = SocketFolder()
    links = PeerLinks(InstanceId(0), folder.address("links-0-123"))
    path = links.address.removeprefix("ipc://")
    said = subprocess.run(
        [sys.executable, "-I", "-c", AS_ANOTHER_USER, path],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split("\n")[:3] == ["refused connect", "refused bind", "refused list"]
    links.close()
    folder.remove()


def test_paths_are_short_enough_wherever_the_temporary_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = SocketFolder()
    address = folder.address("links-1000-4194304")
    assert len(address.removeprefix("ipc://")) <= LONGEST_PATH_BYTES
    PeerLinks(InstanceId(0), address).close()
    folder.remove()


def test_a_machine_without_any_folder_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that can be written is taken; in some containers it is shared memory."""
    true, refused = tempfile.mkdtemp, ["/tmp"]

    def mkdtemp(prefix: str, dir: Path) -> str:
        if str(dir) in refused:
            raise OSError(30, "Read-only file system")
        return true(prefix=prefix, dir=dir)

    def gettempdir() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    folder = SocketFolder()
    assert folder.path.parent == Path("/dev/shm")
    folder.remove()
    refused.append("/dev/shm")
    with pytest.raises(ConfigError, match="no folder for the cluster's sockets.*Read-only"):
        SocketFolder()
