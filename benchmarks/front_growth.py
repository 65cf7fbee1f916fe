"""How tokens per second grow with the number of HTTP fronts.

    python -m benchmarks.front_growth [--fronts 1 2 4] [--streams 128] [--rounds 3]

The whole server but the model: a real controller, its channel and its fronts, before fake instances
that are all in one other process (`benchmarks.fake_host`). Clients stream completions in a process
of their own. Rounds of all numbers of fronts are interleaved.

Tokens per second grow with fronts as far as cores are free. So processor time per 10,000 tokens is
told of each part. That of the controller's process is what cannot be spread over more cores: 10,000
divided by it is the most tokens per second that any number of fronts can write (``bound``). With
one front the controller's process writes HTTP itself. ``cores`` is what all of it kept busy.
"""

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from benchmarks.fake_host import HostLauncher
from benchmarks.front_overhead import read_all
from benchmarks.fronts import cpu_s
from benchmarks.report import Report
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import FakeSettings
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    SchedulerConfig,
    ServerConfig,
)
from kunserve.core.plan import Plan
from kunserve.model.generation_config import SamplingDefaults
from kunserve.model.source import resolve_model
from kunserve.server.start.app import create_app
from kunserve.server.start.launch_parts import load_tokenizer
from kunserve.server.start.serve import Drain, serve
from kunserve_extras.fronts.keeper import FrontKeeper, listeners_of
from kunserve_lab.world.fake_main import MODULE as FAKE_MODULE

NUM_TOKENS = 400
"""Of each answer: what a request costs beside its tokens is a small part."""
FAKE = FakeSettings(FAKE_MODULE, kv_blocks=4096, layer_bytes=16 * 1024, step_s=0.01)
PATH = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Case:
    """How a server is loaded."""

    num_fronts: int
    num_streams: int
    num_instances: int


def config_of(case: Case) -> KunServeConfig:
    """Settings under which memory and the token budget hold nobody up."""
    return KunServeConfig(
        instance=InstanceConfig(block_size=16, granule_bytes=4096),
        scheduler=SchedulerConfig(max_num_batched_tokens=4096),
        cluster=ClusterConfig(num_instances=case.num_instances, front_grace_s=0.0),
        server=ServerConfig(api_server_count=case.num_fronts),
    )


@contextlib.asynccontextmanager
async def served(case: Case, cluster: LocalCluster) -> AsyncIterator[tuple[int, list[int]]]:
    """HTTP before the cluster: its port, and the fronts' processes."""
    config, drain = config_of(case), Drain()
    first = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = first.getsockname()[1]
    if case.num_fronts == 1:
        listeners = [first]
        model = config.model
        source = resolve_model(model.model, model.load_format)
        app = create_app(cluster, load_tokenizer(source, None, None), "bench", config)
        running = asyncio.create_task(serve(app, config, listeners, drain))
        pids = []
    else:
        listeners = listeners_of(first, case.num_fronts)
        keeper = FrontKeeper(cluster, "bench", config, SamplingDefaults(), listeners)
        running = asyncio.create_task(keeper.run(drain, catches_signals=False))
        await keeper.until_up()
        pids = keeper.pids
    try:
        yield port, pids
    finally:
        drain.request()
        await running
        for listener in listeners:
            listener.close()


def read_and_tell(pipe: Connection, port: int, num_streams: int) -> None:
    """The client process: begins when told to, and says what it cost."""
    pipe.recv()
    started_s = time.process_time()
    read_all(port, num_streams, PATH, BODY)
    pipe.send(time.process_time() - started_s)


async def measure(case: Case) -> dict[str, float]:
    """One round: all streams at once, from the first request to the last token."""
    launcher = HostLauncher()
    cluster = await LocalCluster.start(
        Plan(config_of(case)), vocab_size=FAKE.vocab_size, fake=FAKE, launcher=launcher
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    try:
        async with served(case, cluster) as (port, pids):
            client = context.Process(target=read_and_tell, args=(theirs, port, case.num_streams))
            client.start()
            parts = {"controller": [os.getpid()], "fronts": pids, "instances": [launcher.pid]}
            await asyncio.sleep(1.0)  # the client has imported what it needs
            before = {name: sum(map(cpu_s, part)) for name, part in parts.items()}
            started_s = time.perf_counter()
            ours.send("go")
            client_s: float = await asyncio.to_thread(ours.recv)
            took_s = time.perf_counter() - started_s
            spent = {name: sum(map(cpu_s, part)) - before[name] for name, part in parts.items()} | {
                "clients": client_s
            }
            await asyncio.to_thread(client.join)
    finally:
        await cluster.close()
        await launcher.end()
    return figures(case, took_s, spent)


def figures(case: Case, took_s: float, spent_s: dict[str, float]) -> dict[str, float]:
    """What is told of one round."""
    ten_thousands = case.num_streams * NUM_TOKENS / 1e4
    found = {"tokens per second": 1e4 * ten_thousands / took_s}
    found |= {f"{name} per 10k": seconds / ten_thousands for name, seconds in spent_s.items()}
    found["bound"] = 1e4 * ten_thousands / spent_s["controller"]
    found["cores"] = sum(spent_s.values()) / took_s
    return found


def unit_of(name: str) -> str:
    """Of a figure."""
    return "CPU s" if "10k" in name else "" if name == "cores" else "/s"


def tell(report: Report, rounds: dict[int, list[dict[str, float]]]) -> None:
    """Medians and ranges, and how the rate grows: of each round the ratio to its first case."""
    first = next(iter(rounds))
    for num_fronts, found in rounds.items():
        for name in found[0]:
            values = [one[name] for one in found]
            report.add(name, statistics.median(values), unit_of(name), fronts=num_fronts)
        rates = [one["tokens per second"] for one in found]
        report.add("rate, least", min(rates), "/s", fronts=num_fronts)
        report.add("rate, most", max(rates), "/s", fronts=num_fronts)
        ratios = [
            one["tokens per second"] / other["tokens per second"]
            for one, other in zip(found, rounds[first], strict=True)
        ]
        report.add("rate / first", statistics.median(ratios), "x", fronts=num_fronts)


def main() -> None:
    """Every number of fronts, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rounds: dict[int, list[dict[str, float]]] = {number: [] for number in options.fronts}
    for _ in range(options.rounds):
        for num_fronts in options.fronts:
            case = Case(num_fronts, options.streams, options.instances)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rounds[num_fronts].append(runner.run(measure(case)))
    settings = {"streams": options.streams, "instances": options.instances}
    with Report("front_growth", rounds=options.rounds, **settings) as report:
        tell(report, rounds)


if __name__ == "__main__":
    main()
