"""How long a drop or a restore keeps running requests waiting, on the real engine.

    python -m benchmarks.serving.drop_stall [--rounds 5]

Two instances of SmolLM2, one thread each. Every round fills both with streams, forces a drop
while further prompts arrive (so that steps are long while KV moves), then keeps a few streams and
forces a restore. Stall, total, gap and remap are the server's own account of each transition; the
longest pause between two tokens of a stream around it is the client's.
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.report import Report
from kunserve_lab.bench.client import Call, CallSettings, stream
from kunserve_lab.bench.prompts import TokenIdPrompts
from kunserve_lab.bench.replay import open_session
from kunserve_lab.bench.server_process import running_server

MODEL = "smollm2-135m"
MIB = 1 << 20
POLL_S = 0.02
PATIENCE_S = 30.0


@dataclass(slots=True)
class Stream:
    """One request under way."""

    call: Call
    task: "asyncio.Task[Any]"

    def longest_pause_s(self, from_s: float, until_s: float) -> float | None:
        """Between two tokens, of which the later came in that time; None when there are none."""
        times = self.call.token_times_s
        pauses = [b - a for a, b in itertools.pairwise(times) if from_s <= b <= until_s]
        return max(pauses, default=None)


@dataclass(slots=True)
class Kind:
    """What all drops, or all restores, gave."""

    records: list[dict[str, Any]] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)


class Driver:
    """Streams and admin calls to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, options: argparse.Namespace):
        self._session = session
        self._url = url
        self._options = options
        self._settings = CallSettings(MODEL, "/v1/completions", chat=False, ignore_eos=True)
        self._prompts = TokenIdPrompts(options.seed, vocab_size=40_000)
        self._num_streams = 0
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        """On the clock of the streams' token times."""
        return time.perf_counter() - self._start_s

    def send(self, count: int) -> list[Stream]:
        """Begin that many streams."""
        tokens_in, tokens_out = self._options.input_tokens, self._options.output_tokens
        streams = []
        for _ in range(count):
            call = Call(self._num_streams, self._url, 0.0, tokens_in, tokens_out, 0.0, [])
            body = self._settings.body(
                self._prompts.prompt(self._num_streams, tokens_in), tokens_out
            )
            self._num_streams += 1
            work = stream(self._session, self._settings, call, body, self._start_s)
            streams.append(Stream(call, asyncio.create_task(work)))
        return streams

    async def decoding(self, streams: Sequence[Stream]) -> None:
        """Wait until all of them have begun to decode."""
        while any(len(one.call.token_times_s) < 3 for one in streams):
            for one in streams:
                assert not one.task.done(), f"a stream ended early: {one.task.result()}"
            await asyncio.sleep(POLL_S)

    async def end(self, streams: Sequence[Stream]) -> None:
        """Hang up."""
        for one in streams:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in streams), return_exceptions=True)

    async def transition(self, kind: str, streams: Sequence[Stream], into: Kind) -> None:
        """Force one, wait for its end, and note what it cost."""
        before_s = self.now_s()
        known = len(await self._records(kind))
        deadline_s = before_s + PATIENCE_S
        while True:
            async with self._session.post(f"{self._url}/kunserve/{kind}", json={}) as response:
                if response.status == 200:
                    break
                assert self.now_s() < deadline_s, await response.text()
            await asyncio.sleep(0.2)
        while True:
            records = await self._records(kind)
            if len(records) > known and records[-1]["finished_s"] is not None:
                break
            await asyncio.sleep(POLL_S)
        assert records[-1]["outcome"] == "done", records[-1]
        await asyncio.sleep(1.0)
        into.records.append(records[-1])
        for one in streams:
            pause_s = one.longest_pause_s(before_s, self.now_s())
            if pause_s is not None:
                into.pauses_s.append(pause_s)

    async def _records(self, kind: str) -> list[dict[str, Any]]:
        async with self._session.get(f"{self._url}/kunserve/state") as response:
            state = await response.json()
        return [one for one in state["transitions"] if one["kind"] == kind]


async def measure(url: str, options: argparse.Namespace) -> dict[str, Kind]:
    """All rounds."""
    found = {"drop": Kind(), "restore": Kind()}
    async with open_session(600.0) as session:
        driver = Driver(session, url, options)
        for _ in range(options.rounds):
            streams = driver.send(options.streams)
            await driver.decoding(streams)
            arriving = driver.send(options.arriving)
            await driver.transition("drop", streams, found["drop"])
            await driver.end([*streams, *arriving])
            kept = driver.send(options.kept)
            await driver.decoding(kept)
            await driver.transition("restore", kept, found["restore"])
            await driver.end(kept)
    return found


def describe(report: Report, kind: str, found: Kind) -> None:
    """Mean and largest of every quantity."""
    report.add("count", len(found.records), "", transition=kind)
    moved = [record["moved_bytes"] / MIB for record in found.records]
    report.add("moved", sum(moved) / len(moved), "MiB", transition=kind)
    for name, values in (
        ("stall", [record["max_stall_s"] for record in found.records]),
        ("total", [record["finished_s"] - record["started_s"] for record in found.records]),
        ("gap", [record["gap_s"] for record in found.records]),
        ("remap", [record["remap_s"] for record in found.records]),
        ("client's pause", found.pauses_s),
    ):
        if values:
            report.add(f"{name}, mean", sum(values) / len(values) * 1e3, "ms", transition=kind)
            report.add(f"{name}, most", max(values) * 1e3, "ms", transition=kind)


def main() -> None:
    """Measure, then say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=10, help="that decode when a drop comes")
    parser.add_argument("--arriving", type=int, default=4, help="prompts just before a drop")
    parser.add_argument("--kept", type=int, default=4, help="streams when a restore comes")
    parser.add_argument("--input-tokens", type=int, default=520)
    parser.add_argument("--output-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    options, serve_flags = parser.parse_known_args()
    flags = [MODEL, "--num-instances", "2", "--instance-memory", "343MiB", "--enable-admin"]
    flags += ["--max-num-batched-tokens", "128", "--overload-policy", "recompute"]
    flags += ["--weights", "private", *serve_flags]  # shared ones leave nothing to drop
    with running_server(flags) as server:
        found = asyncio.run(measure(server.url, options))
    with Report("drop_stall", rounds=options.rounds, streams=options.streams) as report:
        for kind, values in found.items():
            describe(report, kind, values)


if __name__ == "__main__":
    main()
