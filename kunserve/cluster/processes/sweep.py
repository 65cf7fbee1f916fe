"""Folders of clusters that ended without a chance to clean up: removed when the next one starts."""

import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kunserve.cluster.processes.process_mark import mark_of, own_mark, pid_of
from kunserve.cluster.processes.run_folder import FrontLock, read_state
from kunserve.transport.wire.socket_folder import PREFIX, is_abandoned, places

logger = logging.getLogger(__name__)

YOUNG_S = 60.0
"""A folder that changed so lately may belong to a cluster that begins."""


def sweep() -> list[Path]:
    """Remove what dead clusters of this user have left, and nothing of one that may go on."""
    removed = []
    for folder in _left_by_somebody():
        try:
            is_removed = _remove_if_dead(folder)
        except OSError:
            continue  # its owner has just removed it
        if is_removed:
            removed.append(folder)
            logger.info("removed what a dead cluster has left folder=%s", folder)
    return removed


def _left_by_somebody() -> Iterator[Path]:
    for place in dict.fromkeys(places()):
        for folder in place.glob(f"{PREFIX}*"):
            try:
                found = folder.lstat()
            except OSError:
                continue
            is_private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
            is_old = time.time() - found.st_mtime > YOUNG_S
            if is_private and is_old and found.st_uid == os.getuid():
                yield folder


def _remove_if_dead(folder: Path) -> bool:
    if not (folder / "front.lock").exists():
        if not is_abandoned(folder):
            return False
        shutil.rmtree(folder)
        return True
    # The next front, or an instance whose grace is over, needs the lock as well.
    lock = FrontLock(folder)
    state = read_state(folder)
    marks = () if state is None else state.marks.values()
    if any(mark_of(pid_of(mark)) == own_mark(mark) for mark in marks) or not lock.try_to_take():
        return False
    try:
        shutil.rmtree(folder)
    finally:
        lock.release()
    return True
