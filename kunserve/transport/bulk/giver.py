"""What peers ask the mover for: given in order, behind activations, at the link's rate."""

import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from kunserve.transport.bulk import wire as bulk_wire
from kunserve.transport.bulk.pacing import BulkPacing, TokenBucket
from kunserve.transport.bulk.source import BulkSource
from kunserve.transport.bulk.wire import Answer, Bytes, Chunk, Located
from kunserve.transport.wire.sockets import Socket

YIELD_STEP_S = 0.0002
"""How often a paused chunk looks whether the activation has gone."""


class BulkGiver:
    """Owner of the chunks that peers wait for. Belongs to the mover's thread."""

    def __init__(
        self, inbox: Socket, source: BulkSource, lock: threading.RLock, pacing: BulkPacing
    ) -> None:
        """Answers go out of ``inbox``; memory is touched under ``lock``."""
        self._inbox = inbox
        self._source = source
        self._lock = lock
        self._max_yield_s = pacing.max_yield_s
        self._egress = TokenBucket(pacing.link_gbps, pacing.credit_s)
        self._backlog: deque[tuple[bytes, Chunk]] = deque()
        self._activations_pending: Callable[[], bool] = _never
        self._yielding_since_s: float | None = None
        self.num_bytes = 0
        """Given so far."""

    def yield_to(self, activations_pending: Callable[[], bool]) -> None:
        """Pause between chunks while this, called from the thread, is true."""
        self._activations_pending = activations_pending

    def enqueue(self, route: bytes, chunk: Chunk) -> None:
        """A peer asks for a chunk."""
        self._backlog.append((route, chunk))

    def give(self) -> None:
        """Answer requests, in order, as far as the rate and waiting activations allow."""
        while self._backlog and self._delay_s(time.monotonic()) == 0.0:
            route, chunk = self._backlog.popleft()
            with self._lock:
                answer, data = self._source.serve(chunk)
            self._answer(route, chunk, answer, data)

    def delay_s(self, now_s: float) -> float | None:
        """When ``give`` may answer the next; None if nobody waits."""
        return self._delay_s(now_s) if self._backlog else None

    def _answer(
        self, route: bytes, chunk: Chunk, answer: Answer, data: Bytes | Located | None
    ) -> None:
        if isinstance(data, Located):
            self._yielding_since_s = None
            self.num_bytes += sum(num_bytes for _, num_bytes in data.extents)
            located = bulk_wire.encode(bulk_wire.Reply(chunk.ticket, answer, data))
            self._inbox.send_multipart((route, located), zmq.NOBLOCK)
            return
        head = bulk_wire.encode(bulk_wire.Reply(chunk.ticket, answer))
        if data is None:
            self._inbox.send_multipart((route, head), zmq.NOBLOCK)
            return
        self._egress.take(data.nbytes, time.monotonic())
        self._yielding_since_s = None
        self.num_bytes += data.nbytes
        self._inbox.send_multipart((route, head), zmq.NOBLOCK | zmq.SNDMORE)
        self._inbox.send(data.data, zmq.NOBLOCK, copy=False)

    def _delay_s(self, now_s: float) -> float:
        delay_s = self._egress.delay_s(now_s)
        if delay_s > 0.0 or not self._activations_pending():
            return delay_s
        if self._yielding_since_s is None:
            self._yielding_since_s = now_s
        if now_s - self._yielding_since_s < self._max_yield_s:
            return YIELD_STEP_S
        return 0.0


def _never() -> bool:
    return False
