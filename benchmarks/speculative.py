"""Tokens per second with prompt lookup, beside the same server's without: the ratio.

    python -m benchmarks.speculative [--streams 1,8] [--kinds chat,noise,summary,extraction,edit]

Two servers of one instance each, with and without `--speculative-config`. Every round asks both for
the same answers in turn, one stream after the other or several side by side. The answers must be
the same, token by token. ``noise`` is drawn at a high temperature: there lookup finds next to
nothing, and must cost nothing. The other kinds are those of `benchmarks.prompt_lookup`, which
predicts what lookup could gain.
"""

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import aiohttp

from benchmarks.prompt_lookup import QUESTIONS, TASKS, documents
from benchmarks.report import Report, Setting
from kunserve.bench.server_process import running_server

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
TIMEOUT = aiohttp.ClientTimeout(total=1200)


def bodies_of(kind: str, num: int, max_tokens: int) -> list[dict[str, Any]]:
    """What is asked: so many chats of one kind."""
    if kind in TASKS:
        prompts = [TASKS[kind].format(text) for text in documents()]
    else:
        prompts = list(QUESTIONS)
    sampling = {"temperature": 1.8} if kind == "noise" else {"temperature": 0.0}
    return [
        {
            "messages": [{"role": "user", "content": prompts[i % len(prompts)]}],
            "max_tokens": max_tokens,
            "seed": i,
            "return_token_ids": True,
            **sampling,
        }
        for i in range(num)
    ]


async def _answer(session: aiohttp.ClientSession, body: dict[str, Any]) -> list[int]:
    async with session.post("/v1/chat/completions", json=body) as answer:
        said = await answer.json()
    assert answer.status == 200, said
    tokens: list[int] = said["choices"][0]["token_ids"]
    return tokens


async def turn(
    url: str, bodies: list[dict[str, Any]], streams: int
) -> tuple[float, list[list[int]]]:
    """Tokens per second, and all answers' tokens."""
    answers = []
    async with aiohttp.ClientSession(url, timeout=TIMEOUT) as session:
        began_s = time.perf_counter()
        for first in range(0, len(bodies), streams):
            batch = bodies[first : first + streams]
            answers += await asyncio.gather(*(_answer(session, body) for body in batch))
        seconds = time.perf_counter() - began_s
    return sum(map(len, answers)) / seconds, answers


async def counters(url: str) -> dict[str, float]:
    """What the server has guessed so far."""
    async with aiohttp.ClientSession(url) as session, session.get("/metrics") as answer:
        text = await answer.text()
    return {
        name: sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(f"vllm:spec_decode_{name}_total{{")
        )
        for name in COUNTERS
    }


async def compare(
    report: Report, urls: tuple[str, str], kind: str, streams: int, args: argparse.Namespace
) -> None:
    """One kind, so many streams: rounds of both servers in turn, after one that does not count."""
    bodies = bodies_of(kind, max(streams, args.answers), args.max_tokens)
    plain, guessing, before = [], [], await counters(urls[1])
    for number in range(args.rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        found = {which: await turn(urls[which], bodies, streams) for which in order}
        assert found[0][1] == found[1][1], f"{kind}: guesses have changed an answer"
        if number:
            plain.append(found[0][0])
            guessing.append(found[1][0])
    after = await counters(urls[1])
    drafts, guesses, right = (after[name] - before[name] for name in COUNTERS)
    ratios = [b / a for a, b in zip(plain, guessing, strict=True)]
    settings: dict[str, Setting] = {"kind": kind, "streams": streams}
    report.add("without", statistics.median(plain), "tokens/s", **settings)
    report.add("with", statistics.median(guessing), "tokens/s", **settings)
    report.add("with / without", statistics.median(ratios), "x", **settings)
    report.add("least", min(ratios), "x", **settings)
    report.add("most", max(ratios), "x", **settings)
    report.add("guesses per try", guesses / drafts if drafts else None, "", **settings)
    report.add("right", 100 * right / guesses if guesses else None, "%", **settings)


async def measure(report: Report, urls: tuple[str, str], args: argparse.Namespace) -> None:
    """Everything that was asked for."""
    for streams in map(int, args.streams.split(",")):
        for kind in args.kinds.split(","):
            await compare(report, urls, kind, streams, args)


def main() -> None:
    """Print both rates and their ratio, medians with ranges."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--kinds", default="chat,noise,summary,extraction,edit")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    flags = [args.model, "--num-instances", "1", "--instance-memory", "600MiB"]
    with (
        running_server(flags) as off,
        running_server([*flags, f"--speculative-config={json.dumps(CONFIG)}"]) as on,
        Report("speculative", model=args.model, max_tokens=args.max_tokens) as report,
    ):
        asyncio.run(measure(report, (off.url, on.url), args))


if __name__ == "__main__":
    main()
