"""Links between simulated instances: bandwidth, latency, sharing, and who goes first."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kunserve.core.ids import InstanceId
from kunserve.sim.events import EventHeap

BULK_CHUNK_BYTES = 1 << 20
"""What a waiting activation may still be behind: one chunk of bulk is on the wire."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way from one instance to another."""

    number: int
    src: InstanceId
    dst: InstanceId
    num_bytes: float
    done: Callable[[], None]
    started: Callable[[], bool] | None
    """Asked when its turn comes: False means that there is nothing to send."""
    urgent_out_s: float = 0.0
    """What the two cards had spent on activations when it began, or was last put off."""
    urgent_in_s: float = 0.0


class _Port:
    """One direction of one instance's network card."""

    def __init__(self) -> None:
        self.current: Transfer | None = None
        self.waiting: dict[InstanceId, deque[Transfer]] = {}
        """By the other end, whose port shares the queue: only its head can be next."""
        self.urgent_free_s = 0.0
        self.urgent_s = 0.0
        """Time that activations have used so far."""


class Network:
    """Full-duplex cards on a fabric that is never the bottleneck.

    A card carries one bulk transfer at a time each way, in order of coming: with the small
    pieces that are sent this shares it out evenly. With priority an activation passes bulk
    (but for the chunk on the wire) and its time is taken from it; without, it waits its turn.
    """

    def __init__(
        self, heap: EventHeap, bytes_per_s: float, latency_s: float, *, priority: bool = True
    ) -> None:
        self._heap = heap
        self._rate = bytes_per_s
        self._latency_s = latency_s
        self._priority = priority
        self._out: dict[InstanceId, _Port] = {}
        self._in: dict[InstanceId, _Port] = {}
        self._num_transfers = 0
        self.bulk_bytes = 0.0
        """Delivered so far; as is the next."""
        self.activation_bytes = 0.0

    def send_bulk(
        self,
        src: InstanceId,
        dst: InstanceId,
        num_bytes: float,
        done: Callable[[], None],
        started: Callable[[], bool] | None = None,
    ) -> None:
        """Call ``done`` when the bytes have arrived, or found nothing to send."""
        transfer = Transfer(self._num_transfers, src, dst, num_bytes, done, started)
        self._num_transfers += 1
        out, into = self._port(self._out, src), self._port(self._in, dst)
        if out.current is None and into.current is None:
            self._start(transfer, out, into)
            return
        queue = out.waiting.get(dst)
        if queue is None:
            queue = out.waiting[dst] = into.waiting[src] = deque()
        queue.append(transfer)

    def send_activation(
        self, src: InstanceId, dst: InstanceId, num_bytes: float, done: Callable[[], None]
    ) -> None:
        """Call ``done`` when the hidden states of a microbatch have arrived."""
        self.activation_bytes += num_bytes
        if not self._priority:
            self.bulk_bytes -= num_bytes
            self.send_bulk(src, dst, num_bytes, lambda: self._heap.after(self._latency_s, done))
            return
        out, into = self._port(self._out, src), self._port(self._in, dst)
        now_s = self._heap.now_s()
        behind_s = 0.0
        if out.current is not None or into.current is not None:
            behind_s = BULK_CHUNK_BYTES / self._rate
        begin_s = max(now_s + behind_s, out.urgent_free_s, into.urgent_free_s)
        took_s = num_bytes / self._rate
        out.urgent_free_s = into.urgent_free_s = begin_s + took_s
        out.urgent_s += took_s
        into.urgent_s += took_s
        self._heap.at(begin_s + took_s + self._latency_s, done)

    def _port(self, ports: dict[InstanceId, _Port], instance_id: InstanceId) -> _Port:
        port = ports.get(instance_id)
        if port is None:
            port = ports[instance_id] = _Port()
        return port

    def _start_waiting(self, out: _Port, into: _Port) -> None:
        """Either port may be free: let those go that came first and whose both ends are."""
        while True:
            queues: list[deque[Transfer]] = []
            if out.current is None:
                queues += [q for q in out.waiting.values() if q and self._is_free(q[0])]
            if into.current is None:
                queues += [q for q in into.waiting.values() if q and self._is_free(q[0])]
            if not queues:
                return
            transfer = min(queues, key=_number_of_head).popleft()
            self._start(transfer, self._out[transfer.src], self._in[transfer.dst])

    def _is_free(self, transfer: Transfer) -> bool:
        ports = self._out[transfer.src], self._in[transfer.dst]
        return ports[0].current is None and ports[1].current is None

    def _start(self, transfer: Transfer, out: _Port, into: _Port) -> None:
        if transfer.started is not None and not transfer.started():
            self._heap.after(0.0, transfer.done)
            return
        out.current = into.current = transfer
        transfer.urgent_out_s, transfer.urgent_in_s = out.urgent_s, into.urgent_s
        now_s = self._heap.now_s()
        begin_s = max(now_s, out.urgent_free_s, into.urgent_free_s)
        self._heap.at(begin_s + transfer.num_bytes / self._rate, self._arrive, transfer)

    def _arrive(self, transfer: Transfer) -> None:
        out, into = self._out[transfer.src], self._in[transfer.dst]
        late_s = max(out.urgent_s - transfer.urgent_out_s, into.urgent_s - transfer.urgent_in_s)
        if late_s > 0.0:
            transfer.urgent_out_s, transfer.urgent_in_s = out.urgent_s, into.urgent_s
            self._heap.after(late_s, self._arrive, transfer)
            return
        out.current = into.current = None
        self.bulk_bytes += transfer.num_bytes
        transfer.done()
        self._start_waiting(out, into)


def _number_of_head(queue: deque[Transfer]) -> int:
    return queue[0].number
