"""An instance's hold on its front: without a front it stops working, and after a while it dies.

    served -> (the front's lock is free) alone -> (a new front's state names this process) served
                                         alone -> (the grace is over) gone

A thread of its own looks, so also while a step runs or hangs.
"""

import logging
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kunserve.cluster.processes.process_mark import kill_marked, mark_of, own_mark
from kunserve.cluster.processes.run_folder import FrontLock, read_state
from kunserve.cluster.processes.seat import RunState
from kunserve.cluster.waking_clock import WakingClock

logger = logging.getLogger(__name__)

LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What an instance is told about its front."""

    run_folder: str
    front: str
    """The front that started the instance (``RunState.front``)."""
    grace_s: float
    epoch: int = 0
    """Of that front (``RunState.epoch``)."""


class Hold(Protocol):
    """What the loop asks a lease, whatever it rests on."""

    @property
    def started_by(self) -> str:
        """The front that started the instance."""
        ...

    @property
    def front(self) -> str:
        """The front that serves now."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether no front is there, so that no work makes sense."""
        ...


class Lease:
    """Implements ``Hold`` for an instance on its front's own machine."""

    def __init__(self, terms: LeaseTerms) -> None:
        self._folder = Path(terms.run_folder)
        self._lock = FrontLock(self._folder)
        self._grace_s = terms.grace_s
        self._mark = mark_of(os.getpid())
        self.started_by = terms.front
        self.front = terms.front
        """The front that serves now; another one when a new one has come."""
        self.is_alone = False
        """Whether no front is there, so that no work makes sense."""
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def _watch(self) -> None:
        clock = WakingClock(time.monotonic)
        alone_since_s = clock.now_s()
        num_failed = 0
        while True:
            time.sleep(LOOK_S)
            now_s = clock.now_s()
            try:
                if not self._look(has_grace=now_s - alone_since_s <= self._grace_s):
                    alone_since_s = now_s
            except Exception as error:  # no descriptor is left, or the folder's host is away
                num_failed += 1
                if num_failed & (num_failed - 1) == 0:
                    logger.exception("cannot tell whether there is a front count=%d", num_failed)
                if now_s - alone_since_s > self._grace_s:
                    _die(f"no front was seen for {self._grace_s:g} s: {error}")

    def _look(self, *, has_grace: bool) -> bool:
        """Whether no front is there. Raises OSError where that cannot be told."""
        state = read_state(self._folder)
        if state is not None and state.front != self.front:
            if self._mark not in {own_mark(mark) for mark in state.marks.values()}:
                _die("a new front does not know this process")
            self.front = state.front
        self.is_alone = self._lock.is_free()
        if self.is_alone and not has_grace:
            if self._lock.try_to_take():
                self._end_all(state)
            elif not self._folder.exists():
                _die("the cluster has ended")
        return self.is_alone

    def _end_all(self, state: RunState | None) -> None:
        """No front came, and none can come while this process has the lock: end the cluster.

        The others too, because a process that is stopped cannot end itself.
        """
        if state is not None:
            for mark in state.marks.values():
                if own_mark(mark) != self._mark:
                    kill_marked(mark)
            shutil.rmtree(state.socket_folder, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        _die(f"no front for {self._grace_s:g} s")


def _die(reason: str) -> None:
    logger.error("leaving: %s", reason)
    os.kill(os.getpid(), signal.SIGKILL)
