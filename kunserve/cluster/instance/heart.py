"""What the loop does, as heartbeats tell it; and where its threads stand when none can be sent."""

import faulthandler

from kunserve.core.ids import InstanceId
from kunserve.core.messages import Alive

HEARTBEATS_PER_TIMEOUT = 5
SILENCE_PART = 0.8
"""Of the timeout of heartbeats: after so long without one every thread's stack is written."""


class Heart:
    """What the loop does, for heartbeats: their thread asks, and the next one tells of changes.

    A process whose heart does not beat is killed, and cannot be asked any more. So shortly before
    it says on its standard error where each of its threads stands.
    """

    def __init__(self, me: InstanceId, timeout_s: float, file: int = 2) -> None:
        """``file``: the descriptor that stacks are written to."""
        self.period_s = timeout_s / HEARTBEATS_PER_TIMEOUT
        self._me = me
        self._silence_s = SILENCE_PART * timeout_s
        self._file = file
        self._num_turns = 0
        self._longest_step_s = 0.0
        self._is_computing = False
        self._wants_to_leave = False

    def turn(self, *, is_computing: bool, step_s: float = 0.0) -> None:
        """The loop moves on."""
        self._num_turns += 1
        self._is_computing = is_computing
        if step_s > self._longest_step_s:
            self._longest_step_s = step_s

    def leave(self) -> None:
        """Heartbeats tell from now on that the process was asked to end."""
        self._wants_to_leave = True

    def alive(self) -> Alive:
        """What a heartbeat says."""
        # Python's own watchdog, because it needs no interpreter: whoever keeps that is in it too.
        faulthandler.dump_traceback_later(self._silence_s, file=self._file)
        return Alive(
            self._me,
            self._num_turns,
            self._longest_step_s,
            self._is_computing,
            self._wants_to_leave,
        )
