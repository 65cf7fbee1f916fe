"""Tokens per second of structured outputs, beside the same server's plain ones: the ratio.

    python -m benchmarks.serving.structured [--streams 8] [--tokens 128] [--rounds 7]

SmolLM2, greedy. Every round runs the streams twice in turn, plain and each in a schema of its own,
with the same prompts and the same number of tokens: the schemas have room for more, so that all
end by length. Plain greedy streams are the fastest there are, because their largest logit is all
that is looked at.
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


def main() -> None:
    """Print both rates and their ratio, medians with ranges."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    settings = {"streams": args.streams, "tokens": args.tokens, "rounds": args.rounds}
    with (
        running_server([MODEL, "--num-instances", "1"]) as server,
        Report("structured", **settings) as report,
    ):
        found = asyncio.run(measure(server.url, args.streams, args.tokens, args.rounds))
        for name, values in (
            ("plain", [plain for plain, _ in found]),
            ("structured", [structured for _, structured in found]),
            ("structured / plain", [structured / plain for plain, structured in found]),
        ):
            unit = "" if "/" in name else "tokens/s"
            report.add(name, statistics.median(values), unit, figure="median")
            report.add(name, min(values), unit, figure="least")
            report.add(name, max(values), unit, figure="most")


if __name__ == "__main__":
    main()
