"""Two hosts beside one: throughput, time per token, activations beside an exchange, a host's death.

    python -m benchmarks.links.two_hosts [--parts serve,exchange,death] [--rounds 5]

Hosts are network namespaces on this machine (needs root), so both sides have the same cores. One
host is a front with two instances over Unix sockets; two hosts are the same two instances, one on
each, over TCP with CURVE. They take turns within every round. ``exchange`` sends activations over a
shaped link beside KV; ``death`` cuts a host off in silence, as a pulled plug does.
"""

import argparse
import multiprocessing
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.links.exchange_priority import (
    SENDER,
    TAKER,
    Load,
    Outcome,
    Taker,
    Way,
    entries_of,
    memory_for,
    request_id,
)
from benchmarks.links.hosts import Hosts, enter, places_on
from benchmarks.links.hosts_front import FrontOnHost, Orders
from benchmarks.report import Report
from kunserve.core.ids import GroupId, StepId
from kunserve.core.messages import Activation
from kunserve.core.step import StepPlan
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.peers.links import PeerLinks
from kunserve.transport.wire.network import Network, new_keys

MODEL = "smollm2-135m"


class Work(NamedTuple):
    """Processor time, in seconds."""

    front: float
    computing: float
    """Of the instances' busiest threads, which run their loops."""
    wires: float
    """Of all their other threads: sockets, encryption, bulk."""

    @classmethod
    def of(cls, front: int, instances: list[int]) -> "Work":
        """So far, of these processes."""
        times = [_thread_times_s(pid) for pid in instances]
        computing = sum(map(max, times))
        return cls(sum(_thread_times_s(front)), computing, sum(map(sum, times)) - computing)

    def since(self, before: "Work", num_tokens: int) -> "Work":
        """Per token."""
        return Work(*((b - a) / num_tokens for a, b in zip(before, self, strict=True)))


def _thread_times_s(pid: int) -> list[float]:
    """User and system time of each thread, in nanoseconds of the scheduler's account."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks]


def serve(report: Report, rounds: int, requests: int) -> None:
    """Throughput and time per token, alone and as a pipeline."""
    with Hosts(["a", "b"]) as hosts, ExitStack() as stack:
        one = Orders(hosts["a"].address, [], MODEL, checks_invariants=False)
        two = Orders(hosts["a"].address, places_on(hosts, "ab"), MODEL, checks_invariants=False)
        fronts = {
            name: stack.enter_context(FrontOnHost(hosts["a"], orders))
            for name, orders in (("one host", one), ("two hosts", two))
        }
        for shape in ("two groups", "one pipeline"):
            if shape == "one pipeline":
                for front in fronts.values():
                    assert "groups=1+1->2" in front.ask("drop")
            measure(report, shape, fronts, rounds, requests)


def measure(
    report: Report, shape: str, fronts: dict[str, FrontOnHost], rounds: int, requests: int
) -> None:
    """One shape of the groups, over all rounds."""
    rates: dict[str, list[float]] = {name: [] for name in fronts}
    per_token_s: dict[str, list[float]] = {name: [] for name in fronts}
    work: dict[str, list[Work]] = {name: [] for name in fronts}
    processes = {
        name: (front.process.pid, front.ask("state")["pids"]) for name, front in fronts.items()
    }
    num_prompt, num_tokens = 128, 64
    for number in range(rounds + 1):
        order = list(fronts.items())[:: 1 if number % 2 else -1]
        for name, front in order:
            before = Work.of(*processes[name])
            found = front.ask(f"load {requests} {num_prompt} {num_tokens}")
            if number:  # the first round warms up
                work[name].append(Work.of(*processes[name]).since(before, requests * num_tokens))
                rates[name].append(requests * num_tokens / found["seconds"])
                per_token_s[name].append(statistics.median(found["per_token_s"]))
    for name in fronts:
        for what, values, scale, unit in (
            ("throughput", rates[name], 1.0, "tokens/s"),
            ("P50 TPOT", per_token_s[name], 1e3, "ms"),
        ):
            report.add(what, statistics.median(values) * scale, unit, shape=shape, at=name)
            report.add(f"{what}, least", min(values) * scale, unit, shape=shape, at=name)
            report.add(f"{what}, most", max(values) * scale, unit, shape=shape, at=name)
    # Steadier than time on a machine that others use, too.
    for part in Work._fields:
        per_token = {name: [getattr(one, part) for one in found] for name, found in work.items()}
        for name in fronts:
            value = statistics.median(per_token[name]) * 1e3
            report.add(f"processor time per token, {part}", value, "ms", shape=shape, at=name)
        ratios = [b / a for a, b in zip(*per_token.values(), strict=True)]
        name = f"processor time per token, {part}, two hosts / one"
        report.add(name, statistics.median(ratios), "x", shape=shape)
    for what, found in (("throughput", rates), ("P50 TPOT", per_token_s)):
        ratios = [b / a for a, b in zip(found["one host"], found["two hosts"], strict=True)]
        target = 0.97 if what == "throughput" else 1.05
        ratio = statistics.median(ratios)
        report.add(f"{what}, two hosts / one", ratio, "x", shape=shape, target=target)


def run_sender(control: Connection, pid: int, network: Network, load: Load, way: Way) -> None:
    """The earlier stage, on its host."""
    enter(pid)
    mover = BulkMover(SENDER, "", memory_for(load), pacing=way.pacing, network=network)
    links = PeerLinks(SENDER, network=network)
    mover.yield_to(links.activations_pending)
    for number in range(load.num_requests):
        mover.export_kv(request_id(number), entries_of(load, number))
    control.send((links.address, mover.address, network.public_key))
    to_links, to_bulk, key = control.recv()
    links.connect({TAKER: to_links}, {TAKER: key})
    mover.connect({TAKER: to_bulk}, {TAKER: key}, near=())
    next_s = time.monotonic()
    while not control.poll(max(0.0, next_s - time.monotonic())):
        if time.monotonic() < next_s:
            continue
        step = StepPlan(GroupId(1), StepId(time.monotonic_ns()), (), (), ())
        links.send(TAKER, Activation(step), memoryview(bytes(load.activation_bytes)))
        next_s += load.period_s
    links.close()
    mover.close()


def run_taker(control: Connection, pid: int, network: Network, load: Load, way: Way) -> None:
    """The later stage, on its host: it pulls KV beside the activations that come."""
    enter(pid)
    mover = BulkMover(TAKER, "", memory_for(load), pacing=way.pacing, network=network)
    links = PeerLinks(TAKER, network=network)
    control.send((links.address, mover.address, network.public_key))
    to_links, to_bulk, key = control.recv()
    links.connect({SENDER: to_links}, {SENDER: key})
    mover.connect({SENDER: to_bulk}, {SENDER: key}, near=())
    control.send(Taker(load, way, links, mover, control).run())
    links.close()
    mover.close()


def over_link(load: Load, way: Way) -> Outcome:
    """Both stages, each on its host."""
    spawn = multiprocessing.get_context("spawn")
    with Hosts(["a", "b"], gbps=load.link_gbps) as hosts:
        ends: list[tuple[BaseProcess, Connection]] = []
        for target, name in ((run_sender, "a"), (run_taker, "b")):
            ours, theirs = multiprocessing.Pipe()
            keys = new_keys()
            network = Network(hosts[name].address, keys.public, keys.secret, keys.public)
            arguments: Any = (theirs, hosts[name].pid, network, load, way)
            process = spawn.Process(target=target, args=arguments, daemon=True)
            process.start()
            ends.append((process, ours))
        to_sender, to_taker = (pipe for _, pipe in ends)
        at_sender, at_taker = to_sender.recv(), to_taker.recv()
        to_sender.send(at_taker)
        to_taker.send(at_sender)
        outcome: Outcome = to_taker.recv()
        to_sender.send("stop")
        for child, _ in ends:
            child.join(10.0)
    return outcome


def exchange(report: Report, gbps: float, seconds: float) -> None:
    """Activations alone, and beside KV as instances of two hosts move it."""
    load = Load(gbps, seconds, 36 * 1024, 0.010, 8, 8 << 20)
    ways = [
        Way("alone", None),
        Way("beside an exchange, rate known", BulkPacing.for_link(gbps, is_network=True)),
        Way("beside an exchange, rate unknown", BulkPacing.for_link(None, is_network=True)),
    ]
    for way in ways:
        outcome = over_link(load, way)
        for name, percentile in (("P50", 50), ("P99", 99)):
            latency_s = float(np.percentile(outcome.latencies_s, percentile))
            settings: dict[str, Any] = {"way": way.name, "gbps": gbps}
            if name == "P99" and way.pacing is not None:
                settings["target_ms"] = 10.0
            report.add(f"activation {name}", latency_s * 1e3, "ms", **settings)
        if outcome.rounds_s:
            rate = outcome.bulk_bytes * 8 / outcome.seconds / 1e9
            report.add("bulk", rate, "Gbit/s", way=way.name, gbps=gbps)


def death(report: Report, rounds: int) -> None:
    """From a host's end until its requests stream again on the other one."""
    for way in ("plug pulled", "processes killed"):
        gaps_s = [one_death(way) for _ in range(rounds)]
        report.add("to serving again", statistics.median(gaps_s), "s", way=way, target_s=3.0)
        report.add("to serving again, most", max(gaps_s), "s", way=way)


def one_death(way: str) -> float:
    """The longest pause that a client of the dead host sees."""
    with Hosts(["f", "a", "b"]) as hosts:
        orders = Orders(hosts["f"].address, places_on(hosts, "aabb"), MODEL)
        with FrontOnHost(hosts["f"], orders) as front:
            front.ask("load 8 64 8")
            for number in range(8):
                front.ask(f"submit r{number} {number} 64 400")
            for number in range(8):
                front.ask(f"flow r{number} 5")
            since_s = front.ask("now")
            if way == "plug pulled":
                front.ask(f"unreachable {hosts['b'].address}")
                hosts.cut_off("b")
            else:
                front.ask("kill 2 3")
            for number in range(8):
                front.ask(f"result r{number}")
            gap_s: float = front.ask(f"gap {since_s}")
            if way == "plug pulled":
                hosts.rejoin("b")  # its processes learn that they are given up, and end
            front.ask(f"reachable {hosts['b'].address}")
    return gap_s


def main() -> None:
    """The parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="serve,exchange,death")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8, help="at once")
    parser.add_argument("--deaths", type=int, default=2, help="of each kind")
    parser.add_argument("--link-gbps", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each way to exchange")
    options = parser.parse_args()
    parts = options.parts.split(",")
    with Report("two_hosts", model=MODEL) as report:
        if "serve" in parts:
            serve(report, options.rounds, options.requests)
        if "exchange" in parts:
            exchange(report, options.link_gbps, options.seconds)
        if "death" in parts:
            death(report, options.deaths)


if __name__ == "__main__":
    main()
