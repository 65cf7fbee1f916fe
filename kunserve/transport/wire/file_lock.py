"""Locks on files, of which the kernel lets go when their holder dies, of whatever."""

import fcntl
import os
from pathlib import Path


def is_held(path: Path) -> bool | None:
    """Whether somebody holds the lock of a file; None if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
