"""Tokens per second of structured outputs, beside the same server's plain ones: the ratio.

    python -m benchmarks.serving.structured [--streams 8] [--tokens 128] [--rounds 7]
    python -m benchmarks.serving.structured --dear 32

SmolLM2, greedy. Every round runs the streams twice in turn, plain and each in a schema of its own,
with the same prompts and the same number of tokens: the schemas have room for more, so that all
end by length. Plain greedy streams are the fastest there are, because their largest logit is all
that is looked at.

``--dear N``: what somebody else's form costs. A plain stream and one in a schema run beside a
request of N outputs, which is plain, then one of a grammar whose masks take about 15 ms each.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

import aiohttp

from benchmarks.report import Report
from kunserve_lab.bench.server_process import running_server

MODEL = "smollm2-135m"
_ITEMS: list[dict[str, Any]] = [
    {"type": "string", "minLength": 12},
    {"type": "integer"},
    {"enum": ["red", "green", "blue", "violet"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 5},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    {"type": "string", "format": "date-time"},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "string", "minLength": 4}]},
    {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
]


def schema_of(stream: int) -> dict[str, Any]:
    """An array of objects that no stream comes to the end of."""
    names = [f"{name}_{stream}" for name in ("first", "second", "third")]
    properties = {name: _ITEMS[(stream + at) % len(_ITEMS)] for at, name in enumerate(names)}
    item = {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1000}


async def _stream(
    session: aiohttp.ClientSession, number: int, num_tokens: int, is_structured: bool
) -> None:
    body: dict[str, Any] = {
        "prompt": f"Here is a list of {number + 3} records, written as JSON:\n",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if is_structured:
        body["structured_outputs"] = {"json": schema_of(number)}
    async with session.post("/v1/completions", json=body) as answer:
        said = await answer.json()
    assert answer.status == 200, said
    assert said["usage"]["completion_tokens"] == num_tokens, said


async def _turn(
    session: aiohttp.ClientSession, num_streams: int, num_tokens: int, is_structured: bool
) -> float:
    """Tokens per second of all streams together."""
    began_s = time.perf_counter()
    await asyncio.gather(
        *(_stream(session, number, num_tokens, is_structured) for number in range(num_streams))
    )
    return num_streams * num_tokens / (time.perf_counter() - began_s)


async def measure(url: str, num_streams: int, num_tokens: int, rounds: int) -> list[list[float]]:
    """Plain and structured rates of each round, after one that does not count."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        return [
            [await _turn(session, num_streams, num_tokens, kind) for kind in (False, True)]
            for _ in range(rounds + 1)
        ][1:]


def dear_grammar(num_rules: int = 60) -> str:
    """Many rules that all begin alike: each token may be of any of them."""
    names = range(num_rules)
    rules = [f'a{i} ::= [a-z] "{i}" | " " [a-z] b{i}\nb{i} ::= [a-z] b{i} | [0-9]' for i in names]
    return "\n".join(["root ::= " + " | ".join(f"a{i} root" for i in names), *rules])


async def _crowd(session: aiohttp.ClientSession, num_outputs: int, is_dear: bool) -> None:
    """A request, again and again until it is cancelled: outputs of the grammar soon end in errors,
    because of the library's limits.
    """
    body: dict[str, Any] = {"prompt": "once", "n": num_outputs, "max_tokens": 4000}
    if is_dear:
        body["structured_outputs"] = {"grammar": dear_grammar()}
    else:
        body["ignore_eos"] = True
    while True:
        async with session.post("/v1/completions", json=body) as answer:
            await answer.read()


async def _beside(
    session: aiohttp.ClientSession, num_outputs: int, num_tokens: int, is_dear: bool
) -> tuple[float, float]:
    """Seconds per token of a plain stream and of one in a schema, both beside the crowd."""
    crowd = asyncio.create_task(_crowd(session, num_outputs, is_dear))
    await asyncio.sleep(2.0)
    took_s = []
    for is_structured in (False, True):
        began_s = time.perf_counter()
        await _stream(session, 0, num_tokens, is_structured)
        took_s.append((time.perf_counter() - began_s) / num_tokens)
    crowd.cancel()
    await asyncio.gather(crowd, return_exceptions=True)
    await asyncio.sleep(1.0)
    return took_s[0], took_s[1]


async def measure_dear(
    url: str, num_outputs: int, num_tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds per token of either stream beside either crowd, each round in turn."""
    found: dict[str, list[float]] = {}
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=600)) as session:
        await _stream(session, 0, num_tokens, True)
        for _ in range(rounds):
            for crowd, is_dear in (("plain", False), ("dear", True)):
                took_s = await _beside(session, num_outputs, num_tokens, is_dear)
                for stream, each_s in zip(("plain", "schema"), took_s, strict=True):
                    found.setdefault(f"{stream} beside {crowd}", []).append(1e3 * each_s)
    for stream in ("plain", "schema"):
        pairs = zip(found[f"{stream} beside dear"], found[f"{stream} beside plain"], strict=True)
        found[f"{stream}: dear / plain"] = [dear / plain for dear, plain in pairs]
    return found


def main() -> None:
    """Print both rates and their ratio, medians with ranges."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dear", type=int, default=0, metavar="N", help="outputs of the dear form")
    args = parser.parse_args()
    settings = {"tokens": args.tokens, "rounds": args.rounds}
    settings |= {"dear": args.dear} if args.dear else {"streams": args.streams}
    with (
        running_server([MODEL, "--num-instances", "1"]) as server,
        Report("structured", **settings) as report,
    ):
        if args.dear:
            values_of = asyncio.run(measure_dear(server.url, args.dear, args.tokens, args.rounds))
        else:
            rates = asyncio.run(measure(server.url, args.streams, args.tokens, args.rounds))
            values_of = {
                "plain": [plain for plain, _ in rates],
                "structured": [structured for _, structured in rates],
                "structured / plain": [structured / plain for plain, structured in rates],
            }
        for name, values in values_of.items():
            unit = "" if "/" in name else "ms/token" if args.dear else "tokens/s"
            report.add(name, statistics.median(values), unit, figure="median")
            report.add(name, min(values), unit, figure="least")
            report.add(name, max(values), unit, figure="most")


if __name__ == "__main__":
    main()
