"""Multi-turn chat with and without the prefix cache, and its cost where nothing is shared.

    python -m benchmarks.prefix_chat [--rounds 4] [--streams 1 4] [--peers DIR]

The built-in model. Two servers of one instance, one with the prefix cache and one without, and
vLLM's CPU build with its prefix cache if DIR has it (see `benchmarks.peers`). All run at once and
take turns, in the other direction every second round. A conversation has 10 turns behind a system
prompt of 500 tokens that all conversations of a round have; a turn's prompt is all that was said,
the server's answers included. Figures are medians over rounds and their ranges; a ratio is taken
within each round. Targets: mean TTFT at least 3 times lower with the cache, and at least 0.99 of
the tokens per second where no two prompts have anything in common.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.peers import READY_S, Server, ours, running, say, vllm
from benchmarks.report import Report
from kunserve.bench.client import CallSettings
from kunserve.bench.metrics import compute_metrics
from kunserve.bench.prompts import TokenIdPrompts, WordPrompts
from kunserve.bench.replay import open_session
from kunserve.bench.session import Target, find_model, measure
from kunserve.bench.sse import DONE, EventBuffer
from kunserve.workload.arrivals import immediate_arrivals
from kunserve.workload.lengths import random_lengths
from kunserve.workload.workload import Workload

ON, OFF = "with cache", "without"
TURNS, SYSTEM_WORDS, TURN_WORDS, ANSWER_TOKENS = 10, 500, 30, 16
"""Words of the list are about a token each."""
UNSHARED = {"requests": 32, "input": 128, "output": 64, "streams": 8}


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


async def unshared(server: Server, round_number: int) -> float:
    """Output tokens per second of prompts that have nothing in common."""
    model = await find_model([server.url], None, None, READY_S)
    settings = CallSettings(
        model=model, endpoint="/v1/completions", chat=False, ignore_eos=True, timeout_s=300
    )
    count = UNSHARED["requests"]
    seed = 7_000 + round_number
    lengths = random_lengths(count, UNSHARED["input"], UNSHARED["output"], 0.0, seed)
    workload = Workload(immediate_arrivals(count), lengths, "all at once")
    target = Target((server.url,), settings, (), max_concurrency=UNSHARED["streams"])
    outcome = await measure(target, workload, TokenIdPrompts(seed))
    return compute_metrics(outcome.records, outcome.duration_s).output_throughput


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
                found.append(asyncio.run(unshared(server, round_number)))
                if round_number:  # the first round warms up
                    for case, value in zip([*cases, "nothing shared"], found, strict=True):
                        values.setdefault((case, server.name), []).append(value)
            say(f"round {round_number} of {options.rounds} done")
    with Report("prefix_chat", model="SmolLM2-135M", threads=options.threads) as report:
        names = [server.name for server in servers]
        for case in cases:
            show(report, case, "mean TTFT", 1e3, "ms", names, values)
            ratio(report, case, "off/on", values[case, OFF], values[case, ON])
            if "vllm" in names:
                ratio(report, case, "vLLM/ours", values[case, "vllm"], values[case, ON])
        case = "nothing shared"
        show(report, case, "throughput", 1.0, "tokens/s", names, values)
        ratio(report, case, "on/off", values[case, ON], values[case, OFF])


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
