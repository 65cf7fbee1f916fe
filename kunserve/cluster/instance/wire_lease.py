"""An instance's hold on a front of another host: as ``lease``, but asked for and given on the wire.

    served -> (no answer for the lease's time) alone -> (an answer) served
              alone -> (the grace is over) gone        (the front says "given up") gone

The lease counts from when the instance asked, by the instance's own clock. The front gives an
instance up only when it has heard nothing for longer than that, so by then it has stopped.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from kunserve.cluster.instance.lease import LOOK_S, LeaseTerms
from kunserve.cluster.waking_clock import WakingClock
from kunserve.transport.wire.pulse import GIVEN_UP, Answer, question_at

logger = logging.getLogger(__name__)

LEASE_PART = 0.8
"""Of the time after which the front gives a silent instance up: clocks do not run equally fast."""


def boot_s() -> float:
    """A clock that goes on while the machine sleeps, as the front's may."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WireLease:
    """Implements ``Hold`` and ``Pulse``: asks the front, and tells the loop whether to work."""

    def __init__(
        self,
        terms: LeaseTerms,
        lease_s: float,
        *,
        clock: Callable[[], float] = boot_s,
        die: Callable[[str], None] | None = None,
    ) -> None:
        """``die`` ends the process at once, for the reason given."""
        self._clock = clock
        self._lease_s = lease_s
        self._grace_s = terms.grace_s
        self._die = die or _die
        self.started_by = terms.front
        self.front = terms.front
        """The front that serves now; another one when a new one has answered."""
        self._valid_until_s = clock() + lease_s

    @property
    def is_alone(self) -> bool:
        """Whether the lease is over, so that nobody may be served."""
        return self._clock() >= self._valid_until_s

    def start(self) -> None:
        """Watch the grace, in a thread of its own."""
        self._valid_until_s = self._clock() + self._lease_s
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def question(self) -> bytes:
        """See ``Pulse``."""
        return question_at(self._clock())

    def answered(self, data: bytes) -> None:
        """See ``Pulse``."""
        asked_s, front = Answer.read(data)
        if front == GIVEN_UP:
            self._die("the front has given this process up")
            return
        self._valid_until_s = max(self._valid_until_s, asked_s + self._lease_s)
        self.front = front

    def _watch(self) -> None:
        clock = WakingClock(time.monotonic)
        alone_since_s: float | None = None
        while True:
            time.sleep(LOOK_S)
            now_s = clock.now_s()
            if not self.is_alone:
                alone_since_s = None
            elif alone_since_s is None:
                alone_since_s = now_s
                logger.error("the front cannot be reached: this instance serves nobody")
            elif now_s - alone_since_s > self._grace_s:
                self._die(f"no front for {self._grace_s:g} s")
                return


def _die(reason: str) -> None:
    logger.error("leaving: %s", reason)
    os.kill(os.getpid(), signal.SIGKILL)
