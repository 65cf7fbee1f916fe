"""What an instance does beside its kernels while requests decode, alone and in a pair.

    python -m benchmarks.serving.step_overhead [--rounds 3] [--streams 16] [--other CHECKOUT]

Two instances of SmolLM2, one thread each, decode the same number of streams on two single instances
and then on the pair that a drop makes of them, over and over. Every kernel call is timed on the
clock of its thread (`benchmarks.serving.timed_instance`), so what others do on the machine matters
little. Processor time of the loop's thread outside kernels, as a share and per token, and what
parts of a step it is made of; that of the other threads; and how often any thread of an instance
went to sleep. Half the streams are a single instance's rows. `--other` takes turns with the code of
another checkout. To time the parts costs a few hundredths of a millisecond per step.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]
if __name__ == "__main__" and str(HERE) not in sys.path and "--raw" not in sys.argv:
    sys.path.insert(0, str(HERE))

from kunserve.cluster.driver.local import LocalCluster  # noqa: E402
from kunserve.cluster.processes.launch import LocalLauncher  # noqa: E402
from kunserve.core.config import (  # noqa: E402
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.ids import InstanceId, RequestId  # noqa: E402
from kunserve.core.messages import TokenOutput  # noqa: E402
from kunserve.core.plan import Plan  # noqa: E402
from kunserve.core.request import Request, SamplingParams  # noqa: E402
from kunserve.core.tokens import TokenIds  # noqa: E402

MODEL = "smollm2-135m"
VOCABULARY = 49_152
NUM_INSTANCES = 2
PROGRAM = Path(__file__).with_name("timed_instance.py")
"""This checkout's also for the code of another one."""
SETTLE_S = 0.4
"""Before a phase's first account."""


@dataclass(frozen=True, slots=True)
class Account:
    """What one instance has done so far."""

    at_s: float
    thread_s: float
    num_steps: int
    parts_s: dict[str, float]


def accounts(folder: Path, instance: int) -> Iterator[Account]:
    """All that an instance has written."""
    for path in folder.glob(f"account-{instance}-*"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last one may be cut
                yield Account(*json.loads(line))


def threads_of(pid: int) -> tuple[float, int]:
    """Processor time of a process in seconds, and how often its threads have gone to sleep."""
    seconds, num_sleeps = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = (task / "status").read_text()
        num_sleeps += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds, num_sleeps


async def phase(
    cluster: LocalCluster, folder: Path, options: argparse.Namespace, name: str
) -> list[dict[str, float]]:
    """Decode for a while; each instance's figures."""
    counts: dict[str, int] = {}

    def deliver(token: TokenOutput) -> None:
        counts[token.request_id] = counts.get(token.request_id, 0) + 1

    names = [f"{name}-{number}" for number in range(options.streams)]
    for number, request_id in enumerate(names):
        prompt = TokenIds((number * 7919 + i * 31) % 40_000 for i in range(options.input_tokens))
        sampling = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        request = Request(RequestId(request_id), prompt, sampling, arrival_s=0.0)
        cluster.submit(request, deliver)
    while len(counts) < options.streams or min(counts.values()) < 5:
        await asyncio.sleep(0.01)
    await asyncio.sleep(SETTLE_S)
    found_pids = [cluster.pid_of(InstanceId(i)) for i in range(NUM_INSTANCES)]
    pids = [pid for pid in found_pids if pid is not None]
    from_s, before, tokens = time.monotonic(), [threads_of(pid) for pid in pids], dict(counts)
    await asyncio.sleep(options.seconds)
    until_s, after = time.monotonic(), [threads_of(pid) for pid in pids]
    num_tokens = statistics.median(counts[one] - tokens[one] for one in names)
    for one in names:
        cluster.abort(RequestId(one))
    await asyncio.sleep(0.3)
    found = []
    for instance in range(NUM_INSTANCES):
        inside = [a for a in accounts(folder, instance) if from_s <= a.at_s <= until_s]
        first, last = inside[0], inside[-1]
        steps = last.num_steps - first.num_steps
        thread_s = last.thread_s - first.thread_s
        parts_s = {name: until - first.parts_s[name] for name, until in last.parts_s.items()}
        kernel_s = parts_s.pop("kernels")
        parts_s["the loop itself"] = thread_s - kernel_s - sum(parts_s.values())
        tokens_then = num_tokens * (last.at_s - first.at_s) / (until_s - from_s)
        (all_s, sleeps), (all_before_s, sleeps_before) = after[instance], before[instance]
        beside_s = (all_s - all_before_s) - thread_s * (until_s - from_s) / (last.at_s - first.at_s)
        found.append(
            {
                "outside kernels, %": 100.0 * (thread_s - kernel_s) / thread_s,
                "outside kernels, per token": 1e3 * (thread_s - kernel_s) / tokens_then,
                "outside kernels, per step": 1e3 * (thread_s - kernel_s) / steps,
                "kernels, per token": 1e3 * kernel_s / tokens_then,
                "other threads, per token": 1e3 * beside_s / num_tokens,
                "sleeps per token": (sleeps - sleeps_before) / num_tokens,
                "TPOT": 1e3 * (until_s - from_s) / num_tokens,
                **{f"step: {name}": 1e6 * part_s / steps for name, part_s in parts_s.items()},
            }
        )
    return found


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Phases of one cluster, in turns."""
    config = KunServeConfig(
        model=ModelConfig(model=MODEL),
        instance=InstanceConfig(memory_bytes=options.memory_mib << 20, num_threads=1),
        scheduler=SchedulerConfig(),
        overload=OverloadConfig(policy="recompute"),
        cluster=ClusterConfig(num_instances=NUM_INSTANCES),
    )
    lines = []
    with tempfile.TemporaryDirectory(prefix="step-overhead-") as name:
        folder = Path(name)
        cluster = await LocalCluster.start(
            Plan(config), vocab_size=VOCABULARY, launcher=LocalLauncher((str(PROGRAM), str(folder)))
        )
        try:
            for turn in range(options.turns):
                lines += await phase_lines(cluster, folder, options, "single", turn)
                if options.pair:
                    await cluster.drop(None)
                    lines += await phase_lines(cluster, folder, options, "pair", turn)
                    await cluster.restore()
        finally:
            await cluster.close()
    return lines


async def phase_lines(
    cluster: LocalCluster, folder: Path, options: argparse.Namespace, name: str, turn: int
) -> list[dict[str, Any]]:
    """A line for each instance."""
    found = await phase(cluster, folder, options, f"{name}{turn}")
    return [{"phase": name, "stage": i} | figures for i, figures in enumerate(found)]


def run(options: argparse.Namespace, checkout: Path) -> list[dict[str, Any]]:
    """One cluster of a checkout's code, in a process of its own."""
    words = [str(Path(__file__).resolve()), "--raw", "--turns", str(options.turns)]
    words += ["--streams", str(options.streams), "--seconds", str(options.seconds)]
    words += ["--input-tokens", str(options.input_tokens), "--memory-mib", str(options.memory_mib)]
    words += [] if options.pair else ["--no-pair"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(checkout), str(HERE)))}
    done = subprocess.run(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, check=True, cwd=checkout
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, list[float]]]:
    """By phase and stage, every figure of every turn."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for line in lines:
        place = found.setdefault((str(line["phase"]), int(line["stage"])), {})
        for key, value in line.items():
            if key not in ("phase", "stage"):
                place.setdefault(key, []).append(value)
    return found


def unit_of(figure: str) -> str:
    """What a figure is counted in."""
    if "sleeps" in figure:
        return ""
    return "%" if "%" in figure else "us" if figure.startswith("step: ") else "ms"


def main() -> None:
    """Measure here, or in turns with another checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="clusters of each checkout")
    parser.add_argument("--turns", type=int, default=2, help="drops and restores of a cluster")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each phase")
    parser.add_argument("--streams", type=int, default=32, help="over two instances")
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--memory-mib", type=int, default=400)
    parser.add_argument("--no-pair", dest="pair", action="store_false")
    parser.add_argument("--other", type=Path, help="a checkout to compare with")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.raw:
        print(json.dumps(asyncio.run(measure(options))), flush=True)
        return
    from benchmarks.report import Report

    checkouts = {"this": HERE}
    if options.other is not None:
        checkouts = {"other": options.other.resolve(), "this": HERE}
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    with Report("step_overhead", model=MODEL, streams=options.streams) as report:
        for _ in range(options.rounds):
            for name, checkout in checkouts.items():
                lines[name] += run(options, checkout)
        found = {name: summary(of) for name, of in lines.items()}
        for name, places in found.items():
            for (kind, stage), figures in places.items():
                for figure, values in figures.items():
                    unit = unit_of(figure)
                    value = statistics.median(values)
                    report.add(figure, value, unit, code=name, phase=kind, instance=stage)
        for place, figures in found["this"].items() if "other" in found else ():
            for figure, values in figures.items():
                other = statistics.median(found["other"][place][figure])
                ratio = statistics.median(values) / other if other else None
                report.add(f"{figure}, this / other", ratio, "", phase=place[0], instance=place[1])


if __name__ == "__main__":
    main()
