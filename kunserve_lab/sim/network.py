"""Links between simulated instances: bandwidth, latency, sharing, and who goes first."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import InstanceId
from kunserve.core.place import Place
from kunserve_lab.sim.events import EventHeap

BULK_CHUNK_BYTES = 1 << 20
"""What a waiting activation may still be behind: one chunk of bulk is on the wire."""


Card: TypeAlias = InstanceId | str
"""An instance's own, or its host's."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way from one instance to another."""

    number: int
    way: "Way"
    num_bytes: float
    done: Callable[[], None]
    started: Callable[[], bool] | None
    """Asked when its turn comes: False means that there is nothing to send."""
    urgent_out_s: float = 0.0
    """What the two cards had spent on activations when it began, or was last put off."""
    urgent_in_s: float = 0.0


class Way(NamedTuple):
    """From one instance to another."""

    out: Card
    into: Card
    bytes_per_s: float


class _Port:
    """One direction of one network card."""

    def __init__(self) -> None:
        self.current: Transfer | None = None
        self.waiting: dict[Card, deque[Transfer]] = {}
        """By the other end, whose port shares the queue: only its head can be next."""
        self.urgent_free_s = 0.0
        self.urgent_s = 0.0
        """Time that activations have used so far."""


class Network:
    """Full-duplex cards on a fabric that is never the bottleneck.

    A card carries one bulk transfer at a time each way, in order of coming: with the small
    pieces that are sent this shares it out evenly. With priority an activation passes bulk
    (but for the chunk on the wire) and its time is taken from it; without, it waits its turn.

    Each instance has a card. Where places are known, what goes from host to host shares the hosts'
    cards instead, if these have a rate.
    """

    def __init__(
        self,
        heap: EventHeap,
        bytes_per_s: float,
        latency_s: float,
        *,
        priority: bool = True,
        place_of: Callable[[InstanceId], Place] | None = None,
    ) -> None:
        self._heap = heap
        self._rate = bytes_per_s
        self._latency_s = latency_s
        self._priority = priority
        self._place_of = place_of
        self._out: dict[Card, _Port] = {}
        self._in: dict[Card, _Port] = {}
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
        way = self._way(src, dst)
        transfer = Transfer(self._num_transfers, way, num_bytes, done, started)
        self._num_transfers += 1
        out, into = self._ports(way)
        if out.current is None and into.current is None:
            self._start(transfer, out, into)
            return
        queue = out.waiting.get(way.into)
        if queue is None:
            queue = out.waiting[way.into] = into.waiting[way.out] = deque()
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
        way = self._way(src, dst)
        out, into = self._ports(way)
        now_s = self._heap.now_s()
        behind_s = 0.0
        if out.current is not None or into.current is not None:
            behind_s = BULK_CHUNK_BYTES / way.bytes_per_s
        begin_s = max(now_s + behind_s, out.urgent_free_s, into.urgent_free_s)
        took_s = num_bytes / way.bytes_per_s
        out.urgent_free_s = into.urgent_free_s = begin_s + took_s
        out.urgent_s += took_s
        into.urgent_s += took_s
        self._heap.at(begin_s + took_s + self._latency_s, done)

    def _way(self, src: InstanceId, dst: InstanceId) -> Way:
        if self._place_of is None:
            return Way(src, dst, self._rate)
        here, there = self._place_of(src), self._place_of(dst)
        rates = [place.link_gbps for place in (here, there) if place.link_gbps is not None]
        if here == there or not rates:
            return Way(src, dst, self._rate)
        return Way(_card_of(here), _card_of(there), min(self._rate, min(rates) * 1e9 / 8.0))

    def _ports(self, way: Way) -> tuple[_Port, _Port]:
        out = self._out.get(way.out)
        if out is None:
            out = self._out[way.out] = _Port()
        into = self._in.get(way.into)
        if into is None:
            into = self._in[way.into] = _Port()
        return out, into

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
            self._start(transfer, *self._ports(transfer.way))

    def _is_free(self, transfer: Transfer) -> bool:
        return all(port.current is None for port in self._ports(transfer.way))

    def _start(self, transfer: Transfer, out: _Port, into: _Port) -> None:
        if transfer.started is not None and not transfer.started():
            self._heap.after(0.0, transfer.done)
            return
        out.current = into.current = transfer
        transfer.urgent_out_s, transfer.urgent_in_s = out.urgent_s, into.urgent_s
        now_s = self._heap.now_s()
        begin_s = max(now_s, out.urgent_free_s, into.urgent_free_s)
        self._heap.at(
            begin_s + transfer.num_bytes / transfer.way.bytes_per_s, self._arrive, transfer
        )

    def _arrive(self, transfer: Transfer) -> None:
        out, into = self._ports(transfer.way)
        late_s = max(out.urgent_s - transfer.urgent_out_s, into.urgent_s - transfer.urgent_in_s)
        if late_s > 0.0:
            transfer.urgent_out_s, transfer.urgent_in_s = out.urgent_s, into.urgent_s
            self._heap.after(late_s, self._arrive, transfer)
            return
        out.current = into.current = None
        self.bulk_bytes += transfer.num_bytes
        transfer.done()
        self._start_waiting(out, into)


def _card_of(place: Place) -> str:
    return f"{place.rack}/{place.host}"


def _number_of_head(queue: deque[Transfer]) -> int:
    return queue[0].number
