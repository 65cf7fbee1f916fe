"""Tokens per second with prompt lookup, beside the same server's without: the ratio.

    python -m benchmarks.serving.speculative [--streams 1,8] [--kinds chat,noise,summary,...]

Two servers of one instance each, with and without `--speculative-config`. Every round asks both for
the same answers in turn, one stream after the other or several side by side. The answers must be
the same, token by token. ``noise`` is drawn at a high temperature: there lookup finds next to
nothing, and must cost nothing. The other kinds ask for texts of this project's own pages. On a
machine that others use the instances' CPU time says more than
the clock.
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.report import Report, Setting
from kunserve_lab.bench.server_process import running_server

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
COUNTERS = tuple(
    f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")
)
CPU = "kunserve:instance_cpu_seconds"
TIMEOUT = aiohttp.ClientTimeout(total=1200)


ROOT = Path(__file__).parents[2]
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain why the sky is blue to a child.",
    "Give me three tips to sleep better.",
    "Write a short poem about the sea.",
    "What is the difference between a list and a tuple in Python?",
    "How do I boil an egg?",
    "Tell me about the history of the bicycle.",
    "Why do leaves change their colour in autumn?",
)
TASKS = {
    "summary": "Summarise this text in a few sentences.\n\n{}",
    "extraction": "Copy every sentence of this text that speaks of memory.\n\n{}",
    "edit": "Repeat this text word for word, but write every number as a word.\n\n{}",
}


def documents() -> list[str]:
    """Pieces of this project's own pages, of a few hundred tokens."""
    pieces = []
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        text = path.read_text()
        if len(text) > 900:
            pieces.append(text[:1200])
    return pieces[:8]


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


@dataclass(frozen=True)
class Turn:
    """One server's answers."""

    answers: list[list[int]]
    seconds: float
    cpu_s: float
    """Of its instance."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


async def turn(url: str, bodies: list[dict[str, Any]], streams: int) -> Turn:
    """Ask for all of them."""
    answers = []
    before = await counters(url)
    async with aiohttp.ClientSession(url, timeout=TIMEOUT) as session:
        began_s = time.perf_counter()
        for first in range(0, len(bodies), streams):
            batch = bodies[first : first + streams]
            answers += await asyncio.gather(*(_answer(session, body) for body in batch))
        seconds = time.perf_counter() - began_s
    return Turn(answers, seconds, (await counters(url))[CPU] - before[CPU])


async def counters(url: str) -> dict[str, float]:
    """What the server has guessed so far, and computed."""
    async with aiohttp.ClientSession(url) as session, session.get("/metrics") as answer:
        text = await answer.text()
    return {
        name: sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(f"{name}_total{{")
        )
        for name in (*COUNTERS, CPU)
    }


async def compare(
    report: Report, urls: tuple[str, str], kind: str, streams: int, args: argparse.Namespace
) -> None:
    """One kind, so many streams: rounds of both servers in turn, after one that does not count."""
    bodies = bodies_of(kind, max(streams, args.answers), args.max_tokens)
    rounds: list[tuple[Turn, Turn]] = []
    before = await counters(urls[1])
    for number in range(args.rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        found = {which: await turn(urls[which], bodies, streams) for which in order}
        assert found[0].answers == found[1].answers, f"{kind}: guesses have changed an answer"
        rounds.append((found[0], found[1]))
    after = await counters(urls[1])
    drafts, guesses, right = (after[name] - before[name] for name in COUNTERS)
    del rounds[0]
    settings: dict[str, Setting] = {"kind": kind, "streams": streams}
    report.add("without", median(one.rate for one, _ in rounds), "tokens/s", **settings)
    report.add("with", median(two.rate for _, two in rounds), "tokens/s", **settings)
    for name, ratios in (
        ("with / without", [two.rate / one.rate for one, two in rounds]),
        ("CPU time without / with", [one.cpu_s / two.cpu_s for one, two in rounds]),
    ):
        report.add(name, median(ratios), "x", **settings)
        report.add(f"{name}, least", min(ratios), "x", **settings)
        report.add(f"{name}, most", max(ratios), "x", **settings)
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
