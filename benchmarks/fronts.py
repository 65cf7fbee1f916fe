"""Tokens through one HTTP front, and through several before one controller.

    python -m benchmarks.fronts [--fronts 1 2] [--streams 64] [--rounds 3]

An engine without a model gives one token to every stream at each tick, in the controller's
process. With one front it is that process that writes HTTP, as `kunserve serve` does; with more,
processes of `--api-server-count` do. Counted is processor time per token: of the controller's
process, which stays one, less what the same engine costs when nobody listens; and of the fronts,
which may be on as many cores as there are. So the controller's time bounds what a server can
write. Rounds of all numbers of fronts are interleaved. Tokens per second are said as seen; they
grow with fronts only where cores are free.
"""

import argparse
import asyncio
import logging
import multiprocessing
import socket
import statistics
import time
from pathlib import Path

import uvloop

from benchmarks.front_overhead import (
    CASES,
    NUM_TOKENS,
    PulseEngine,
    engine_alone,
    measure,
    read_all,
)
from benchmarks.report import Report
from kunserve.core.config import KunServeConfig, ServerConfig
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.start.serve import Drain
from kunserve_extras.fronts.keeper import FrontKeeper, listeners_of

CASE = CASES[0]
TICKS_PER_S = 100.0


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def several(num_fronts: int, num_streams: int, pulse_s: float) -> dict[str, float]:
    """Microseconds per token of the controller's thread, and of all fronts; tokens per second."""
    engine = PulseEngine(pulse_s)
    config = KunServeConfig(server=ServerConfig(api_server_count=num_fronts))
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    listeners = listeners_of(first, num_fronts)
    keeper, drain = FrontKeeper(engine, "bench", config, SamplingDefaults(), listeners), Drain()
    running = asyncio.create_task(keeper.run(drain, catches_signals=False))
    await keeper.until_up()
    context = multiprocessing.get_context("spawn")
    client = context.Process(target=read_all, args=(port, num_streams, CASE.path, CASE.body))
    client.start()
    await engine.wait_for(num_streams)
    pids = keeper.pids
    fronts_s, started_s, wall_s = sum(map(cpu_s, pids)), time.thread_time(), time.perf_counter()
    await engine.pulse()
    await asyncio.to_thread(client.join)
    spent_s, took_s = time.thread_time() - started_s, time.perf_counter() - wall_s
    fronts_s = sum(map(cpu_s, pids)) - fronts_s
    drain.request()
    await running
    for listener in listeners:
        listener.close()
    num_tokens = num_streams * NUM_TOKENS
    controller_s = spent_s - await engine_alone(num_streams, pulse_s)
    return {
        "controller per token": controller_s / num_tokens * 1e6,
        "fronts per token": fronts_s / num_tokens * 1e6,
        "tokens per second": num_tokens / took_s,
    }


async def one(num_streams: int, pulse_s: float) -> dict[str, float]:
    """The same of a server with one front: all of it is the controller's thread."""
    started_s = time.perf_counter()
    token_us, _ = await measure(CASE, num_streams, pulse_s)
    took_s = time.perf_counter() - started_s
    return {
        "controller per token": token_us,
        "fronts per token": 0.0,
        "tokens per second": num_streams * NUM_TOKENS / took_s,
    }


def main() -> None:
    """Every number of fronts, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pulse-ms", type=float, default=1.0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(options.rounds):
        for num_fronts in options.fronts:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                work = (
                    one(options.streams, options.pulse_ms / 1e3)
                    if num_fronts == 1
                    else several(num_fronts, options.streams, options.pulse_ms / 1e3)
                )
                for name, value in runner.run(work).items():
                    found.setdefault((num_fronts, name), []).append(value)
    with Report("fronts", streams=options.streams, rounds=options.rounds) as report:
        for (num_fronts, name), values in found.items():
            unit = "/s" if name == "tokens per second" else "us"
            report.add(name, statistics.median(values), unit, fronts=num_fronts)
            report.add(f"{name}, range", max(values) - min(values), unit, fronts=num_fronts)


if __name__ == "__main__":
    main()
