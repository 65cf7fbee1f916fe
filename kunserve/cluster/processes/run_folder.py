"""A served cluster's private folder: who is its front now, and what the next front must know.

``front.lock``  held by the front for as long as it lives, also while it is stopped
``state.json``  written by the front whenever a process starts

The kernel lets go of the lock when its holder dies, whatever it dies of. So the lock tells the
instances that their front is gone, and keeps a second front away.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

import msgspec

from kunserve.cluster.processes.seat import RunState
from kunserve.core.errors import ConfigError
from kunserve.transport.wire.file_lock import is_held

LOCK_S = 3.0
"""How long to try for the lock: instances hold it for moments, one that leaves a little longer."""
POLL_S = 0.01


class FrontLock:
    """The lock on a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "front.lock"
        self._fd: int | None = None

    def try_to_take(self) -> bool:
        """Take it, unless somebody has it or the folder is gone."""
        assert self._fd is None, "taken already"
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(self._path).st_ino:
                self._fd = fd
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        return False

    def is_free(self) -> bool:
        """Whether nobody has it, and no front lives."""
        return not is_held(self._path)

    def release(self) -> None:
        """Let go. Callable twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class RunFolder:
    """Implements ``Seat`` for fronts of one machine."""

    def __init__(self, path: Path) -> None:
        """Make the folder if need be, and take its lock. Raises ConfigError when it cannot."""
        self.path = path
        self._lock = FrontLock(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.lstat()
        except OSError as error:
            raise ConfigError(f"cannot use the run folder {path}: {error.strerror}") from None
        is_private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o077 == 0
        if not is_private or found.st_uid != os.getuid():
            raise ConfigError(f"the run folder {path} must be a folder that only you can enter")
        deadline_s = time.monotonic() + LOCK_S
        while not self._lock.try_to_take():
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"another server is at this address, with its folder {path}: stop it, or give "
                    "another --port"
                )
            time.sleep(POLL_S)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # one that left removed it

    def read(self) -> RunState | None:
        """See ``Seat``."""
        return read_state(self.path)

    def write(self, state: RunState) -> None:
        """See ``Seat``. As JSON: it outlives who wrote it, and people may have to read it."""
        fresh = self.path / "state.json.new"
        fresh.write_bytes(msgspec.json.encode(state))
        fresh.replace(self.path / "state.json")

    def clear(self) -> None:
        """See ``Seat``."""
        (self.path / "state.json").unlink(missing_ok=True)
        for place in self.path.iterdir():
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)

    def remove(self) -> None:
        """See ``Seat``."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def read_state(folder: Path) -> RunState | None:
    """The state in a folder; None if there is none that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / "state.json").read_bytes(), type=RunState)
    return None
