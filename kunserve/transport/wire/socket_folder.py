"""The private folder that a cluster's sockets lie in."""

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kunserve.core.errors import ConfigError
from kunserve.transport.wire.file_lock import is_held

LONGEST_PATH_BYTES = 107
"""What the system takes for a socket's path."""
_LONGEST_NAME = 24
PREFIX = "kunserve-"
"""Of the name of every folder that a cluster makes among temporary files."""
_OWNER = "owner.lock"


class SocketFolder:
    """Owner of the folder. Only the user who started the cluster can enter it.

    So nobody else can connect to a process of the cluster, nor wait in a dead one's place.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Make a new one, or own the one that an earlier front of the cluster has left."""
        self.path = _make() if path is None else path
        # The kernel lets go of it when this process dies, of whatever.
        self._lock_fd: int | None = os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(BlockingIOError):  # an earlier front is not quite dead
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def address(self, name: str) -> str:
        """Where a socket of this name is bound and reached."""
        return address_in(self.path, name)

    def remove(self) -> None:
        """The cluster is gone. Callable twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def is_abandoned(folder: Path) -> bool:
    """Whether its owner is dead and nobody listens there: no instance waits for a next owner.

    A folder that holds anything but sockets is none of ours.
    """
    sockets = [path for path in folder.iterdir() if path.name != _OWNER]
    if not all(stat.S_ISSOCK(path.lstat().st_mode) for path in sockets):
        return False
    has_owner = is_held(folder / _OWNER)
    if has_owner or (has_owner is None and not sockets):
        return False
    return not any(map(_has_listener, sockets))


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True  # it listens, though it answers nobody now
    return True


def address_in(folder: Path | str, name: str) -> str:
    """The address of a socket, for processes that have been told of the folder."""
    assert len(name) <= _LONGEST_NAME, name
    return f"ipc://{folder}/{name}"


def has_room(folder: Path) -> bool:
    """Whether paths of sockets in the folder are short enough for the system."""
    return len(os.fsencode(folder)) <= LONGEST_PATH_BYTES - 2 * _LONGEST_NAME


def _make() -> Path:
    """A new folder of mode 0700, where paths may be short enough; ConfigError if there is none."""
    tried = []
    for parent in places():
        if not has_room(parent):
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            tried.append(f"{parent} ({error.strerror})")
    raise ConfigError(f"no folder for the cluster's sockets can be made: tried {', '.join(tried)}")


def places() -> Iterator[Path]:
    """Where folders are made: the first that can be used."""
    with contextlib.suppress(FileNotFoundError):  # there is none that can be written
        yield Path(tempfile.gettempdir())
    yield Path("/tmp")
    yield Path("/dev/shm")  # containers often allow writing to shared memory only
