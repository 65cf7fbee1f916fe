"""Where a token's time goes in a pair, beside two single instances: every part, from the trace.

    python -m benchmarks.serving.pipeline_cost [--rounds 3] [--other ../another/checkout]
    python -m benchmarks.serving.pipeline_cost --streams 4 --other-flags="--no-lookahead"

Two instances of SmolLM2, one thread each. Every round decodes the same number of streams twice: on
two single instances, then on the pair that a forced drop makes of them. Parts come from `serve
--trace-out`: what each stage computed, how long a microbatch waited for the other one, and what is
left is the way between the processes. Then a queue of prompts is sent to the pair at once. `bubbles
on free cores` is what the trace gives if every stage had a core to itself
(`benchmarks.serving.free_cores`): what a stage does beside its work, and its waits. `--other` runs
the server of another checkout in turns with this one's, and says how this one's figures compare;
`--other-flags` does so with a server of other flags. Flags that are not known here are every
server's. Where cores are shared, take processor times, free cores and ratios of turns: other times
mean little.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.report import Report
from benchmarks.serving.drop_stall import MODEL, Driver, Kind, Stream
from benchmarks.serving.free_cores import play
from kunserve_lab.bench.replay import open_session
from kunserve_lab.bench.server_process import running_server

MEMORY = "343MiB"
PREFILL_OUTPUT_TOKENS = 16
WAY_S = 1e-4
"""From one stage to another, with whatever wakes it."""
PARTS = ("step", "head", "sample")
"""First words of the trace's names for what a stage computes."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Streams that decoded undisturbed, on the machine's monotonic clock."""

    is_pair: bool
    start_s: float
    end_s: float
    tpot_s: float
    is_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a stage computed."""

    instance: int
    part: str
    microbatch: str
    start_s: float
    end_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Between:
    """What a stage's thread did between two spans."""

    instance: int
    until_s: float
    cpu_s: float
    asleep_s: float
    num_sleeps: int
    num_evicted: int


def read_trace(path: Path) -> tuple[list[Span], list[Between]]:
    """Everything that was computed, in order of start; and what was done between."""
    spans, between = [], []
    for event in msgspec.json.decode(path.read_bytes())["traceEvents"]:
        part = event["name"].split(" ")[0]
        if part == "beside":
            args = event["args"]
            times = (event["ts"] / 1e6, args["cpu_us"] / 1e6, args["asleep_us"] / 1e6)
            counts = (args["num_sleeps"], args["num_evicted"])
            between.append(Between(event["pid"], *times, *counts))
            continue
        if event["ph"] != "X" or part not in PARTS or event["tid"] != 0:
            continue
        name = event["name"].split(":")[0].removeprefix(part)
        start_s, seconds = event["ts"] / 1e6, event["dur"] / 1e6
        microbatch = f"{event['args']['group']}.{name.strip()}"
        cpu_s = event.get("tdur", event["dur"]) / 1e6
        spans.append(Span(event["pid"], part, microbatch, start_s, start_s + seconds, cpu_s))
    return sorted(spans, key=lambda span: span.start_s), between


async def decode(driver: Driver, options: argparse.Namespace, is_pair: bool) -> Phase:
    """All streams, for a while."""
    streams = driver.send(options.streams)
    await driver.decoding(streams)
    start_s, from_s = time.monotonic(), driver.now_s()
    await asyncio.sleep(options.seconds)
    end_s, until_s = time.monotonic(), driver.now_s()
    tpot_s = statistics.median(gaps_of(streams, from_s, until_s))
    await driver.end(streams)
    await asyncio.sleep(0.3)
    return Phase(is_pair, start_s, end_s, tpot_s)


async def prefill(driver: Driver, options: argparse.Namespace) -> Phase:
    """A queue of prompts, until all are answered."""
    before = options.input_tokens, options.output_tokens
    options.input_tokens, options.output_tokens = options.prompt_tokens, PREFILL_OUTPUT_TOKENS
    start_s, from_s = time.monotonic(), driver.now_s()
    streams = driver.send(options.prompts)
    await asyncio.gather(*(one.task for one in streams))
    end_s, until_s = time.monotonic(), driver.now_s()
    options.input_tokens, options.output_tokens = before
    tpot_s = statistics.median(gaps_of(streams, from_s, until_s))
    return Phase(True, start_s, end_s, tpot_s, is_prefill=True)


def gaps_of(streams: Sequence[Stream], from_s: float, until_s: float) -> Iterator[float]:
    """Mean time per token of each stream within the time."""
    for one in streams:
        times = [at for at in one.call.token_times_s if from_s <= at <= until_s]
        if len(times) > 1:
            yield (times[-1] - times[0]) / (len(times) - 1)


async def measure(url: str, options: argparse.Namespace) -> list[Phase]:
    """All rounds on one server."""
    phases = []
    async with open_session(600.0) as session:
        driver = Driver(session, url, options)
        for _ in range(options.turns):
            phases.append(await decode(driver, options, is_pair=False))
            await driver.transition("drop", (), Kind())
            phases.append(await decode(driver, options, is_pair=True))
            if options.prompts:
                phases.append(await prefill(driver, options))
            await driver.transition("restore", (), Kind())
    return phases


def run(options: argparse.Namespace, checkout: Path, more_flags: list[str]) -> dict[str, float]:
    """One server's figures: milliseconds, and shares of time.

    A server runs the code of ``checkout``, with the packages of this Python.
    """
    flags = [MODEL, "--num-instances", "2", "--instance-memory", MEMORY, "--enable-admin"]
    flags += ["--overload-policy", "recompute", *options.serve_flags, *more_flags]
    with tempfile.TemporaryDirectory(prefix="pipeline-cost-") as folder:
        trace = Path(folder) / "trace.json"
        with (
            contextlib.chdir(checkout),
            # Shared weights leave nothing to drop. No flag, because another checkout may lack it.
            patch.dict(os.environ, {"PYTHONPATH": str(checkout), "KUNSERVE_WEIGHTS": "private"}),
            running_server([*flags, "--trace-out", str(trace)]) as server,
        ):
            phases = asyncio.run(measure(server.url, options))
        spans, between = read_trace(trace)
    found: dict[str, list[float]] = {}
    for phase in phases:
        inside = [s for s in spans if phase.start_s <= s.start_s < phase.end_s]
        beside = [b for b in between if phase.start_s <= b.until_s < phase.end_s]
        if phase.is_prefill:
            parts = free_parts(inside, beside, "prefill")
        elif phase.is_pair:
            parts = pair_parts(inside, phase) | free_parts(inside, beside, "pair")
        else:
            parts = single_parts(inside, phase)
        if not phase.is_prefill:
            parts |= thread_parts(inside, beside, phase)
        for name, value in parts.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def single_parts(spans: list[Span], phase: Phase) -> dict[str, float]:
    """A single instance's step is all there is, but for planning and the mail."""
    step_ms = 1e3 * statistics.mean(span.end_s - span.start_s for span in spans)
    return {
        "single: TPOT": 1e3 * phase.tpot_s,
        "single: step": step_ms,
        "single: step, processor": 1e3 * statistics.mean(span.cpu_s for span in spans),
        "single: between steps": 1e3 * phase.tpot_s - step_ms,
    }


def pair_parts(spans: list[Span], phase: Phase) -> dict[str, float]:
    """What a token's time is made of, from the first stage to the first stage again."""
    instances = sorted({span.instance for span in spans})
    chains: dict[str, list[Span]] = {}
    for span in spans:
        chains.setdefault(span.microbatch, []).append(span)
    steps = {
        key: [span for span in chain if span.part == "step"]
        for key, chain in chains.items()
        if sum(span.part == "step" for span in chain) == len(instances)
    }
    busy = {me: [s for s in spans if s.instance == me] for me in instances}
    seconds = phase.end_s - phase.start_s
    first, last = (spans_of[0] for spans_of in (busy[instances[0]], busy[instances[-1]]))
    leader = next(iter(steps.values()))[0].instance
    assert first.instance != last.instance, "a pipeline has two stages at least"
    parts: dict[str, list[float]] = {}
    for chain in steps.values():
        one, two = chain[0], chain[-1]
        among = [s for s in busy[two.instance] if s.microbatch != one.microbatch]
        waited_s = overlap_s(one.end_s, two.start_s, among)
        parts.setdefault("stage 0", []).append(one.end_s - one.start_s)
        parts.setdefault("stage 0, processor", []).append(one.cpu_s)
        parts.setdefault("waits for stage 1", []).append(waited_s)
        parts.setdefault("on its way", []).append(two.start_s - one.end_s - waited_s)
        parts.setdefault("stage 1", []).append(two.end_s - two.start_s)
        parts.setdefault("stage 1, processor", []).append(two.cpu_s)
    for span in spans:
        if span.part != "step":
            place = "stage 0" if span.instance == leader else "stage 1"
            name = f"{span.part} on {place}"
            parts.setdefault(name, []).append(span.end_s - span.start_s)
            parts.setdefault(f"{name}, processor", []).append(span.cpu_s)
    means_ms = {name: 1e3 * statistics.mean(values) for name, values in parts.items()}
    accounted_ms = sum(means_ms[n] for n in ("stage 0", "waits for stage 1", "on its way"))
    means_ms["after stage 1"] = 1e3 * phase.tpot_s - accounted_ms - means_ms["stage 1"]
    idle = [1.0 - overlap_s(phase.start_s, phase.end_s, busy[me]) / seconds for me in instances]
    order = [leader, *(me for me in instances if me != leader)]
    cpu_s = [sum(span.cpu_s for span in busy[me]) for me in order]
    return {
        "pair: TPOT": 1e3 * phase.tpot_s,
        **{f"pair: {name}": value for name, value in means_ms.items()},
        "pair: bubbles, %": 100.0 * statistics.mean(idle),
        "pair: processor of stage 1 / of stage 0": cpu_s[-1] / cpu_s[0],
        "pair: processor of the busier stage": 1e3 * len(instances) * max(cpu_s) / len(steps),
    }


def free_parts(spans: Sequence[Span], between: Sequence[Between], name: str) -> dict[str, float]:
    """Per microbatch, what each stage's time would be with a core to itself."""
    if not between:
        return {}  # a checkout that does not tell
    leader = next(span.instance for span in spans if span.part == "sample")
    stages = [leader, *sorted({span.instance for span in spans} - {leader})]
    count = sum(span.part == "step" and span.instance == leader for span in spans)
    times = play(spans, between, stages, WAY_S)
    found = {}
    for number, time_of in enumerate(times):
        for part in ("works", "beside", "waits"):
            value_ms = 1e3 * getattr(time_of, f"{part}_s") / count
            found[f"{name}: stage {number} {part}, free cores"] = value_ms
    found[f"{name}: bubbles on free cores, %"] = 100.0 * statistics.mean(t.bubbles for t in times)
    return found


def thread_parts(
    spans: Sequence[Span], between: Sequence[Between], phase: Phase
) -> dict[str, float]:
    """Where each stage's thread was while one token came: all of its time, in four parts."""
    found = {}
    leader = next((s.instance for s in spans if s.part == "sample"), None)
    for instance in sorted({span.instance for span in spans}):
        mine = [b for b in between if b.instance == instance]
        if not mine:
            return {}  # a checkout that does not tell
        num_tokens = (phase.end_s - phase.start_s) / phase.tpot_s
        cpu_s = sum(span.cpu_s for span in spans if span.instance == instance)
        beside_s, asleep_s = sum(b.cpu_s for b in mine), sum(b.asleep_s for b in mine)
        rest_s = (phase.end_s - phase.start_s) - cpu_s - beside_s - asleep_s
        place = "single" if leader is None else f"pair: stage {int(instance != leader)}"
        sums_ms = {
            "computes": cpu_s,
            "beside": beside_s,
            "asleep": asleep_s,
            "lacks a core": rest_s,
        }
        for name, seconds in sums_ms.items():
            found[f"{place}, thread {name}"] = 1e3 * seconds / num_tokens
        found[f"{place}, sleeps / token"] = sum(b.num_sleeps for b in mine) / num_tokens
        found[f"{place}, evictions / token"] = sum(b.num_evicted for b in mine) / num_tokens
    return found


def overlap_s(start_s: float, end_s: float, spans: Sequence[Span]) -> float:
    """How much of the time is within these."""
    return sum(max(0.0, min(end_s, s.end_s) - max(start_s, s.start_s)) for s in spans)


def describe(report: Report, name: str, found: dict[str, float], round_number: int) -> None:
    """Every part, and the pair's TPOT over the singles'."""
    case: dict[str, Any] = {"code": name, "round": round_number}
    for part, value in found.items():
        unit = "%" if "%" in part else "" if " / " in part else "ms"
        report.add(part, value, unit, **case)
    report.add("pair's TPOT / single's", found["pair: TPOT"] / found["single: TPOT"], "", **case)
    busier_ms = found["pair: processor of the busier stage"]
    single_ms = found["single: step, processor"]
    report.add("busier stage / single, processor", busier_ms / single_ms, "", **case)


def main() -> None:
    """Measure here, or in turns with another checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="servers of each checkout")
    parser.add_argument("--turns", type=int, default=2, help="drops and restores of a server")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each phase")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=16, help="of a queue; 0 leaves it out")
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--other", type=Path, help="a checkout to compare with")
    parser.add_argument("--other-flags", type=shlex.split, help="of a server to compare with")
    parser.add_argument("--seed", type=int, default=0)
    options, serve_flags = parser.parse_known_args()
    options.serve_flags = serve_flags
    here = Path(__file__).parents[2]
    cases: dict[str, tuple[Path, list[str]]] = {"this": (here, [])}
    if options.other is not None or options.other_flags:
        other = here if options.other is None else options.other.resolve()
        cases = {"other": (other, options.other_flags or []), **cases}
    ratios: list[float] = []
    with Report("pipeline_cost", model=MODEL, streams=options.streams) as report:
        for number in range(options.rounds):
            found = {name: run(options, *case) for name, case in cases.items()}
            for name, parts in found.items():
                describe(report, name, parts, number)
            if "other" in found:
                ratios.append(found["this"]["pair: TPOT"] / found["other"]["pair: TPOT"])
        if ratios:
            report.add("pair's TPOT, this / other, median", statistics.median(ratios), "")


if __name__ == "__main__":
    main()
