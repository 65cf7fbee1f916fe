"""What steps wait for in this instance's lanes, and what becomes of it where it does not come."""

import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kunserve.core.faults import StepVoid
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.hops.lanes import Lane

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Until what is awaited is there: its sender computes it, and perhaps something before."""
PATIENCE_WITH_THE_DEAD_S = 0.25
WAIT_GAP_S = 100e-6
"""Between two looks while something is awaited, for threads that move KV meanwhile."""


@dataclass(slots=True)
class Read:
    """Rows, or tokens, that a step waits for."""

    lane: Lane
    number: int
    word: int
    """Address of what says that they are there."""
    are_tokens: bool
    since_s: float
    came: int
    """An event of the stream, behind its wait."""
    is_here: bool = False
    is_void: bool = False


class Reads:
    """Owner of what is awaited. A stream that waits for a word has no deadline: here it has one.

    Called with the ``lock`` of the hops taken where that is said.
    """

    def __init__(self, driver: Driver, lock: threading.RLock, thread_stream: int) -> None:
        """``thread_stream`` is that of the thread that calls ``look``."""
        self._driver, self._lock, self._thread_stream = driver, lock, thread_stream
        self._awaited: list[Read] = []
        self._unmarked: list[Read] = []
        """Of the step that is being asked for."""
        self._seen = driver.host_alloc(4096)

    def open(self, lane: Lane, number: int, stream: int, *, are_tokens: bool = False) -> Read:
        """Have the stream wait for a word. Takes the lock."""
        word = lane.slots.token_word(number) if are_tokens else lane.slots.word(number)
        event = self._driver.event()
        read = Read(lane, number, word, are_tokens, time.monotonic(), event)
        with self._lock:
            self._driver.wait_value(word, number, stream)
            self._driver.record(event, stream)
            self._awaited.append(read)
            self._unmarked.append(read)
        return read

    def await_one(self, read: Read, look_up: Callable[[], None] | None) -> bool:
        """Return once it is there; False if it never will be."""
        while look_up is not None and not self._driver.is_done(read.came):
            look_up()
            time.sleep(WAIT_GAP_S)
        self._driver.wait(read.came)
        return not read.is_void

    def mark(self) -> list[Read]:
        """What was opened since the last call."""
        reads, self._unmarked = self._unmarked, []
        return reads

    def ended(self, reads: Sequence[Read]) -> None:
        """The device has computed what reads them. Takes the lock.

        Raises StepVoid if they never came.
        """
        with self._lock:
            for read in reads:
                self._awaited.remove(read)
                self._driver.event_destroy(read.came)
                read.lane.num_open -= 1
                if not read.are_tokens:
                    read.lane.slots.give_back(read.number)
        if any(read.is_void for read in reads):
            raise StepVoid("a stage has told of hidden states, or tokens, that have not come")

    def give_up_tokens(self) -> None:
        """Of these no more are wanted: the next ``look`` makes the steps void that wait for any.

        Takes the lock.
        """
        with self._lock:
            for read in self._awaited:
                if read.are_tokens:
                    read.since_s = -math.inf

    def look(self, now_s: float) -> None:
        """Write what has not come in time, so that the stream goes on. With the lock."""
        for read in self._awaited:
            is_dead = read.lane.left_s is not None
            patience_s = PATIENCE_WITH_THE_DEAD_S if is_dead else PATIENCE_S
            if read.is_here or read.is_void or now_s - read.since_s < patience_s:
                continue
            if self._value_at(read.word) == read.number:
                read.is_here = True
                continue
            what = "tokens" if read.are_tokens else "hidden states"
            logger.error("%s have not come, the step is void is_dead=%s", what, is_dead)
            read.is_void = True
            self._driver.write_value(read.word, read.number, self._thread_stream)
            self._driver.synchronize(self._thread_stream)

    def _value_at(self, address: int) -> int:
        self._driver.copy_out(self._seen, address, 4, self._thread_stream)
        self._driver.synchronize(self._thread_stream)
        return int.from_bytes(ctypes.string_at(self._seen, 4), "little")

    def close(self) -> None:
        """Nothing may be awaited."""
        self._driver.host_free(self._seen)
