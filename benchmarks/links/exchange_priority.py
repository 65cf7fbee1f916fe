"""What an exchange does to activations, over a slow link.

    python -m benchmarks.links.exchange_priority --link-gbps 1

One instance sends a microbatch's hidden states every few milliseconds to the next stage, which
meanwhile pulls the KV of several requests from it, over and over. The link is emulated (see
``emulated_link``); everything else is the real transport. Four ways to do it:

* alone: no bulk;
* one connection: each request's KV is one message on the activations' own connection;
* own connection, unbounded: the bulk mover with whole requests as chunks, all at once;
* coordinated: the bulk mover as it is, with chunks of about one stage time.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from benchmarks.links.emulated_link import Route, parse_address, run_link
from benchmarks.report import Report
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Activation, KvMoved
from kunserve.core.step import StepPlan
from kunserve.core.transfer import KvPull
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.bulk.pacing import BulkPacing, chunk_bytes_for
from kunserve.transport.bulk.wire import Bytes
from kunserve.transport.peers.links import PeerLinks
from kunserve.transport.wire.sockets import ANY_PORT
from kunserve_lab.world.viewed_memory import ViewedMemory

SENDER, TAKER = InstanceId(0), InstanceId(1)
LAYERS = LayerRange(15, 30)
UNIT_BYTES = 12 * 1024
WARM_UP_S = 0.3
COOL_DOWN_S = 4.0
"""How long activations still on their way are waited for."""


@dataclass(frozen=True, slots=True)
class Load:
    """What crosses the link."""

    link_gbps: float
    seconds: float
    activation_bytes: int
    period_s: float
    num_requests: int
    request_bytes: int

    @property
    def blocks_per_request(self) -> int:
        """Blocks of LAYERS in one request's KV."""
        return max(1, self.request_bytes // (LAYERS.num_layers * UNIT_BYTES))


@dataclass(frozen=True, slots=True)
class Way:
    """One way of moving bulk."""

    name: str
    pacing: BulkPacing | None
    """None where the mover is not used."""
    on_links: bool = False
    """Whether bulk goes through the activations' connection."""


class Memory(ViewedMemory):
    """KV units only."""

    def __init__(self, num_units: int) -> None:
        self._kv = np.ones(num_units * UNIT_BYTES, np.uint8)

    def unit_view(self, unit: int, num_units: int) -> Bytes:
        """The bytes of consecutive units."""
        return self._kv[unit * UNIT_BYTES : (unit + num_units) * UNIT_BYTES]


@dataclass(slots=True)
class Outcome:
    """What one way gave."""

    latencies_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    """Per request and round, from the start of the round to its KV's arrival."""
    rounds_s: list[float] = field(default_factory=list)
    bulk_bytes: int = 0
    seconds: float = 0.0


def request_id(number: int) -> RequestId:
    """The name of the n-th request."""
    return RequestId(f"cmpl-{number}")


def entries_of(load: Load, number: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The n-th request's blocks, back to back."""
    first = number * load.blocks_per_request
    blocks = np.arange(first, first + load.blocks_per_request, dtype=np.int32)
    return blocks * LAYERS.num_layers - LAYERS.first


def memory_for(load: Load) -> Memory:
    """Memory for every request's blocks."""
    return Memory(load.num_requests * load.blocks_per_request * LAYERS.num_layers)


def run_sender(control: Connection, load: Load, way: Way) -> None:
    """The earlier stage, in a process of its own."""
    mover = BulkMover(SENDER, ANY_PORT, memory_for(load), pacing=way.pacing)
    links = PeerLinks(SENDER, ANY_PORT)
    mover.yield_to(links.activations_pending)
    for number in range(load.num_requests):
        mover.export_kv(request_id(number), entries_of(load, number))
    control.send(mover.address)
    to_links, to_bulk = control.recv()
    links.connect({TAKER: to_links})
    mover.connect({TAKER: to_bulk})
    next_s = time.monotonic()
    while True:
        timeout_s = max(0.0, next_s - time.monotonic())
        if control.poll(timeout_s):
            if control.recv() == "stop":
                break
            for number in range(load.num_requests):
                moved = KvMoved(TransitionId(1), request_id(number), 0, load.blocks_per_request)
                links.send(TAKER, moved, memoryview(bytes(load.request_bytes)))
            continue
        if time.monotonic() < next_s:
            continue
        step = StepPlan(GroupId(1), StepId(time.monotonic_ns()), (), (), ())
        links.send(TAKER, Activation(step), memoryview(bytes(load.activation_bytes)))
        next_s += load.period_s
    links.close()
    mover.close()


@contextmanager
def child(target: Any, *arguments: Any) -> Iterator[Connection]:
    """A spawned process and the pipe to it; told to stop at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
        ours.send("stop")
        process.join(10.0)
    finally:
        process.kill()
        process.join()
        ours.close()


class Taker:
    """The later stage: receives activations, and pulls every request's KV round after round."""

    def __init__(
        self, load: Load, way: Way, links: PeerLinks, mover: BulkMover, sender: Connection
    ) -> None:
        self._load = load
        self._way = way
        self._links = links
        self._mover = mover
        self._sender = sender
        self._is_warm = False
        self._left = 0
        self._round_began_s = 0.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Warm up, measure, and wait for what is still under way."""
        poller = zmq.Poller()
        for target in (*self._links.poll_sockets, *self._mover.poll_sockets):
            poller.register(target, zmq.POLLIN)
        began_s = time.monotonic()
        end_s = began_s + WARM_UP_S + self._load.seconds
        while (now_s := time.monotonic()) < end_s + COOL_DOWN_S:
            if not self._is_warm and now_s > began_s + WARM_UP_S:
                self._is_warm = True
                began_s = now_s
            if self._is_warm and self._left == 0 and now_s < end_s:
                self._begin_round(now_s)
            if now_s >= end_s and self._left == 0:
                break
            poller.poll(5)
            self._read()
        self.outcome.seconds = time.monotonic() - began_s
        return self.outcome

    def _begin_round(self, now_s: float) -> None:
        load = self._load
        if not self._way.on_links and self._way.pacing is None:
            return
        self._round_began_s = now_s
        self._left = load.num_requests
        if self._way.on_links:
            self._sender.send("bulk")
            return
        for number in range(load.num_requests):
            piece = KvPull(
                TransitionId(1), request_id(number), SENDER, LAYERS, 0, load.blocks_per_request
            )
            self._mover.pull_kv(piece, entries_of(load, number))

    def _read(self) -> None:
        for message, payload in self._links.receive():
            if isinstance(message, Activation):
                if self._is_warm:
                    sent_s = message.plan.step_id / 1e9
                    self.outcome.latencies_s.append(time.monotonic() - sent_s)
            else:
                assert payload is not None
                self._arrived(payload.nbytes)
        for pulled in self._mover.completed():
            assert pulled.ok, pulled
            self._arrived(self._load.blocks_per_request * LAYERS.num_layers * UNIT_BYTES)

    def _arrived(self, num_bytes: int) -> None:
        took_s = time.monotonic() - self._round_began_s
        self._left -= 1
        self.outcome.bulk_bytes += num_bytes
        self.outcome.stalls_s.append(took_s)
        if self._left == 0:
            self.outcome.rounds_s.append(took_s)


def measure(load: Load, way: Way) -> Outcome:
    """Run one way from start to end."""
    mover = BulkMover(TAKER, ANY_PORT, memory_for(load), pacing=way.pacing)
    links = PeerLinks(TAKER, ANY_PORT)
    with child(run_sender, load, way) as sender:
        routes = [
            Route(parse_address(links.address), is_limited_inwards=True),
            Route(parse_address(sender.recv()), is_limited_inwards=False),
        ]
        with child(run_link, load.link_gbps, routes) as link:
            to_links, to_bulk = link.recv()
            mover.connect({SENDER: to_bulk})
            sender.send((to_links, mover.address))
            outcome = Taker(load, way, links, mover, sender).run()
    links.close()
    mover.close()
    return outcome


def ways(load: Load, stage_time_s: float, in_flight: int) -> list[Way]:
    """Everything that is compared."""
    coordinated = BulkPacing(
        chunk_bytes=chunk_bytes_for(load.link_gbps, stage_time_s),
        max_in_flight=in_flight,
        link_gbps=0.9 * load.link_gbps,
    )
    unbounded = BulkPacing(
        chunk_bytes=load.request_bytes, max_in_flight=load.num_requests, max_yield_s=0.0
    )
    return [
        Way("alone", None),
        Way("one connection", None, on_links=True),
        Way("own connection, unbounded", unbounded),
        Way("coordinated", coordinated),
    ]


def describe(report: Report, way: Way, outcome: Outcome, alone: Outcome) -> None:
    """One way's figures, beside those of activations that have the link to themselves."""
    for name, percentile in (("P50", 50), ("P99", 99)):
        latency_s = float(np.percentile(outcome.latencies_s, percentile))
        alone_s = float(np.percentile(alone.latencies_s, percentile))
        report.add(f"activation {name}", latency_s * 1e3, "ms", way=way.name)
        report.add(f"{name} against alone", latency_s / alone_s, "x", way=way.name)
    if outcome.rounds_s:
        gbps = outcome.bulk_bytes * 8 / outcome.seconds / 1e9
        report.add("bulk", gbps, "Gbit/s", way=way.name)
        report.add("a request's stall", float(np.mean(outcome.stalls_s)) * 1e3, "ms", way=way.name)
        report.add("all requests'", float(np.mean(outcome.rounds_s)) * 1e3, "ms", way=way.name)


def main() -> None:
    """Every way, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link-gbps", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each way")
    parser.add_argument("--activation-kib", type=int, default=36, help="32 tokens of SmolLM2")
    parser.add_argument("--period-ms", type=float, default=10.0, help="between activations")
    parser.add_argument("--stage-ms", type=float, default=2.0, help="a chunk takes about as long")
    parser.add_argument("--in-flight", type=int, default=2, help="chunks, when coordinated")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--request-mib", type=int, default=8, help="KV of one request")
    options = parser.parse_args()
    load = Load(
        link_gbps=options.link_gbps,
        seconds=options.seconds,
        activation_bytes=options.activation_kib * 1024,
        period_s=options.period_ms / 1e3,
        num_requests=options.requests,
        request_bytes=options.request_mib << 20,
    )
    with Report(
        "exchange_priority",
        link_gbps=load.link_gbps,
        activation_kib=options.activation_kib,
        period_ms=options.period_ms,
        requests=options.requests,
        request_mib=options.request_mib,
        seconds=load.seconds,
    ) as report:
        alone: Outcome | None = None
        for way in ways(load, options.stage_ms / 1e3, options.in_flight):
            outcome = measure(load, way)
            alone = alone or outcome
            describe(report, way, outcome, alone)


if __name__ == "__main__":
    main()
