"""The private folder that a cluster's sockets lie in."""

import os
import shutil
import tempfile
from pathlib import Path

from kunserve.core.errors import ConfigError

LONGEST_PATH_BYTES = 107
"""What the system takes for a socket's path."""
_LONGEST_NAME = 24


class SocketFolder:
    """Owner of the folder. Only the user who started the cluster can enter it.

    So nobody else can connect to a process of the cluster, nor wait in a dead one's place.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Make a new one, or own the one that an earlier front of the cluster has left."""
        self.path = _make() if path is None else path

    def address(self, name: str) -> str:
        """Where a socket of this name is bound and reached."""
        return address_in(self.path, name)

    def remove(self) -> None:
        """The cluster is gone. Callable twice."""
        shutil.rmtree(self.path, ignore_errors=True)


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
    # Containers often allow writing to shared memory only.
    for parent in (_temporary(), Path("/tmp"), Path("/dev/shm")):
        if parent is None or not has_room(parent):
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="kunserve-", dir=parent))
        except OSError as error:
            tried.append(f"{parent} ({error.strerror})")
    raise ConfigError(f"no folder for the cluster's sockets can be made: tried {', '.join(tried)}")


def _temporary() -> Path | None:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none that can be written
        return None
