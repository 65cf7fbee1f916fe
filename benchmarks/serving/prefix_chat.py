"""Multi-turn chat with and without the prefix cache, and its cost where nothing is shared.

    python -m benchmarks.serving.prefix_chat [--rounds 4] [--streams 1 4] [--peers DIR]

The built-in model. Two servers of one instance, one with the prefix cache and one without, and
vLLM's CPU build with its prefix cache if DIR has it (see `benchmarks.serving.peers`). All run at
once and take turns, in the other direction every second round. A conversation has 10 turns behind a
system prompt of 500 tokens that all conversations of a round have; a turn's prompt is all that was
said, the server's answers included. Figures are medians over rounds and their ranges; a ratio is
taken within each round. Where nothing is shared each round has several short turns of both, and the
processor time of the instance per token is compared too, which others on the machine disturb less.
Targets: mean TTFT at least 3 times lower with the cache, and at least 0.99 of the tokens per second
where no two prompts have anything in common.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.report import Report
from benchmarks.serving.peer_servers import Server, ours, running, say, vllm
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.metrics import compute_metrics
from kunserve_lab.bench.prompts import TokenIdPrompts, WordPrompts
from kunserve_lab.bench.replay import open_session
from kunserve_lab.bench.session import Target, find_model, measure
from kunserve_lab.bench.sse import DONE, EventBuffer
from kunserve_lab.workload.arrivals import immediate_arrivals
from kunserve_lab.workload.lengths import random_lengths
from kunserve_lab.workload.workload import Workload

READY_S = 600.0
"""vLLM takes minutes to start on a busy machine."""
ON, OFF = "with cache", "without"
UNSHARED_CASE, CPU_CASE = "nothing shared", "nothing shared, processor time"
TURNS, SYSTEM_WORDS, TURN_WORDS, ANSWER_TOKENS = 10, 500, 30, 16
"""Words of the list are about a token each."""
UNSHARED = {"requests": 16, "input": 128, "output": 64, "streams": 8}
UNSHARED_TURNS = 4
"""Of each server in a round, the order turned around after each."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion."""

    text: str
    ttft_s: float


async def ask(session: aiohttp.ClientSession, server: Server, model: str, prompt: str) -> Answer:
    """Stream one completion."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    events, pieces, first_s = EventBuffer(), [], 0.0
    start_s = time.perf_counter()
    async with session.post(server.url + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for data in response.content.iter_any():
            for payload in events.feed(data):
                if payload == DONE:
                    continue
                choices = msgspec.json.decode(payload)["choices"]
                if choices:
                    first_s = first_s or time.perf_counter()
                    pieces.append(choices[0]["text"])
    return Answer("".join(pieces), first_s - start_s)


async def converse(
    session: aiohttp.ClientSession, server: Server, model: str, system: str, number: int
) -> list[float]:
    """One conversation; the TTFT of each turn."""
    words = WordPrompts(number)
    prompt, ttfts_s = system, []
    for turn in range(TURNS):
        prompt += f"\nUser: {words.prompt(turn, TURN_WORDS)}\nAssistant:"
        answer = await ask(session, server, model, prompt)
        ttfts_s.append(answer.ttft_s)
        prompt += answer.text
    return ttfts_s


async def chat(server: Server, streams: int, round_number: int) -> float:
    """So many conversations at once: the mean TTFT of all turns, in seconds."""
    model = await find_model([server.url], None, None, READY_S)
    system = WordPrompts(1_000 + 100 * streams + round_number).prompt(0, SYSTEM_WORDS)
    async with open_session(300.0) as session:
        talks = (
            converse(session, server, model, system, 100 * round_number + number)
            for number in range(streams)
        )
        ttfts_s = [ttft_s for talk in await asyncio.gather(*talks) for ttft_s in talk]
    return statistics.mean(ttfts_s)


@dataclass(frozen=True, slots=True)
class Unshared:
    """What prompts that have nothing in common came to."""

    tokens_per_s: float
    cpu_s: float
    """Of the instance."""


async def unshared(server: Server, seed: int) -> Unshared:
    """Prompts that have nothing in common."""
    model = await find_model([server.url], None, None, READY_S)
    settings = CallSettings(
        model=model, endpoint="/v1/completions", chat=False, ignore_eos=True, timeout_s=300
    )
    count = UNSHARED["requests"]
    lengths = random_lengths(count, UNSHARED["input"], UNSHARED["output"], 0.0, seed)
    workload = Workload(immediate_arrivals(count), lengths, "all at once")
    target = Target((server.url,), settings, (), max_concurrency=UNSHARED["streams"])
    before_s = cpu_seconds(server)
    outcome = await measure(target, workload, TokenIdPrompts(seed))
    metrics = compute_metrics(outcome.records, outcome.duration_s)
    return Unshared(metrics.output_throughput, cpu_seconds(server) - before_s)


def cpu_seconds(server: Server) -> float:
    """Processor time of our instances so far; 0 of another server."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    name = "kunserve:instance_cpu_seconds_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def compare_unshared(servers: Sequence[Server], round_number: int) -> dict[str, Unshared]:
    """Several turns of each server; by name, the medians."""
    found: dict[str, list[Unshared]] = {server.name: [] for server in servers}
    for turn in range(UNSHARED_TURNS):
        for server in servers if turn % 2 else servers[::-1]:
            seed = 7_000 + UNSHARED_TURNS * round_number + turn
            found[server.name].append(asyncio.run(unshared(server, seed)))
    return {
        name: Unshared(
            statistics.median(one.tokens_per_s for one in runs),
            statistics.median(one.cpu_s for one in runs),
        )
        for name, runs in found.items()
    }


def main() -> None:
    """Start all, measure in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with the peers' installs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    servers = [
        ours(options.threads, name=ON, caches_prefixes=True),
        ours(options.threads, name=OFF),
    ]
    root: Path | None = options.peers
    if root is not None and (root / "vllm/bin/python").exists():
        servers.append(vllm(root, options.threads, caches_prefixes=True))
    cases = [f"chat, {streams} at once" for streams in options.streams]
    values: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        for server in servers:
            stack.enter_context(running(server, Path(logs)))
        say(f"starting {', '.join(server.name for server in servers)} ...")
        for round_number in range(options.rounds + 1):
            turn = servers if round_number % 2 else servers[::-1]
            for server in turn:
                found = [
                    asyncio.run(chat(server, streams, round_number)) for streams in options.streams
                ]
                if round_number:  # the first round warms up
                    for case, value in zip(cases, found, strict=True):
                        values.setdefault((case, server.name), []).append(value)
            for name, one in compare_unshared(servers[:2], round_number).items():
                if round_number:
                    values.setdefault((UNSHARED_CASE, name), []).append(one.tokens_per_s)
                    values.setdefault((CPU_CASE, name), []).append(one.cpu_s)
            say(f"round {round_number} of {options.rounds} done")
    with Report("prefix_chat", model="SmolLM2-135M", threads=options.threads) as report:
        names = [server.name for server in servers]
        for case in cases:
            show(report, case, "mean TTFT", 1e3, "ms", names, values)
            ratio(report, case, "off/on", values[case, OFF], values[case, ON])
            if "vllm" in names:
                ratio(report, case, "vLLM/ours", values[case, "vllm"], values[case, ON])
        show(report, UNSHARED_CASE, "throughput", 1.0, "tokens/s", names[:2], values)
        ratio(
            report, UNSHARED_CASE, "on/off", values[UNSHARED_CASE, ON], values[UNSHARED_CASE, OFF]
        )
        ratio(report, CPU_CASE, "off/on", values[CPU_CASE, OFF], values[CPU_CASE, ON])


def show(
    report: Report,
    case: str,
    what: str,
    factor: float,
    unit: str,
    names: Sequence[str],
    values: dict[tuple[str, str], list[float]],
) -> None:
    """Medians and ranges over rounds."""
    for name in names:
        found = [factor * value for value in values[case, name]]
        report.add(what, statistics.median(found), unit, case=case, server=name)
        report.add(f"{what}, least", min(found), unit, case=case, server=name)
        report.add(f"{what}, most", max(found), unit, case=case, server=name)


def ratio(
    report: Report, case: str, name: str, over: Sequence[float], under: Sequence[float]
) -> None:
    """Of the two in each round: the median and the range."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    report.add("ratio", statistics.median(ratios), "x", case=case, of=name)
    report.add("ratio, least", min(ratios), "x", case=case, of=name)
    report.add("ratio, most", max(ratios), "x", case=case, of=name)


if __name__ == "__main__":
    main()
