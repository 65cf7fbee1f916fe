"""A front on a host of its own, for tests and benchmarks of several hosts.

    python -m benchmarks.links.hosts_front ORDERS    (JSON of ``Orders``)

It reads commands line by line and answers each with a line of JSON. ``FrontOnHost`` is the end
that whoever starts it has in its hands.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from benchmarks.faults.faulty_instance import program_of
from benchmarks.links.hosts import Host, NamespaceLauncher, environment
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import FakeSettings, Launcher, LocalLauncher
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Plan
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.fake_main import MODULE as FAKE_MODULE

PATIENCE_S = 100.0
FAKE = FakeSettings(FAKE_MODULE, step_s=0.004)
VOCAB_SIZE = 49152
"""SmolLM2's."""


@dataclass(frozen=True)
class Orders:
    """What the front is to start."""

    address: str
    """Of its host."""
    places: list[tuple[int, str]]
    """By instance: the process that keeps its namespace, and its address. Without any, two
    instances are beside the front, as on one machine."""
    model: str | None = None
    """None: fake instances."""
    run_folder: str | None = None
    faults: str | None = None
    link_gbps: float | None = None
    checks_invariants: bool = True
    cluster: dict[str, Any] = field(default_factory=dict)


def config_of(orders: Orders) -> KunServeConfig:
    """As the orders say."""
    settings = ClusterConfig(
        num_instances=len(orders.places) or 2, check_invariants=orders.checks_invariants
    )
    config = KunServeConfig(
        instance=InstanceConfig(block_size=16, num_threads=1),
        overload=OverloadConfig(policy="drop", restore_below=0.0),
        cluster=replace(settings, **orders.cluster),
    )
    if orders.model is None:
        return config
    return replace(
        config,
        model=ModelConfig(model=orders.model),
        instance=replace(config.instance, kv_cache_memory_bytes=64 << 20),
        scheduler=SchedulerConfig(max_num_batched_tokens=64),
    )


class Answers:
    """Requests and their tokens: the same prompt gives the same, whatever happens."""

    def __init__(self, cluster: LocalCluster, vocab_size: int) -> None:
        """Prompts are of the first ``vocab_size`` tokens."""
        self._cluster = cluster
        self._vocab_size = vocab_size
        self.tokens: dict[str, list[int]] = {}
        self.times_s: dict[str, list[float]] = {}
        self.ends: dict[str, FinishReason] = {}
        self._changed = asyncio.Event()

    def submit(self, name: str, seed: int, num_prompt: int, max_tokens: int) -> None:
        """A greedy request whose prompt follows from the seed."""
        prompt = np.random.default_rng(seed).integers(3, self._vocab_size, num_prompt).tolist()
        sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        self.tokens[name], self.times_s[name] = [], [time.monotonic()]
        request = Request(RequestId(name), TokenIds(prompt), sampling, time.monotonic())
        self._cluster.submit(request, self._deliver)

    def _deliver(self, token: TokenOutput) -> None:
        name = token.request_id
        assert name not in self.ends, "ended twice"
        if token.token_id is not None:
            assert token.position == len(self.tokens[name]), token
            self.tokens[name].append(token.token_id)
            self.times_s[name].append(time.monotonic())
        if token.finish_reason is not None:
            self.ends[name] = token.finish_reason
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what tokens tell."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def load(self, num_requests: int, num_prompt: int, max_tokens: int) -> dict[str, Any]:
        """So many requests at once: how long all took, and each one's time per token."""
        began_s = time.monotonic()
        names = [f"load-{began_s}-{number}" for number in range(num_requests)]
        for number, name in enumerate(names):
            self.submit(name, number, num_prompt, max_tokens)
        await self.until(lambda: all(name in self.ends for name in names))
        times = [self.times_s[name][1:] for name in names]
        per_token_s = [(line[-1] - line[0]) / (len(line) - 1) for line in times]
        return {"seconds": time.monotonic() - began_s, "per_token_s": per_token_s}

    def longest_gap_s(self, since_s: float) -> float:
        """Of all requests, the longest time between two tokens of which the later came then."""
        gaps = [0.0]
        for line in self.times_s.values():
            gaps += [b - a for a, b in itertools.pairwise(line) if b >= since_s]
        return max(gaps)


async def answer(
    cluster: LocalCluster, answers: Answers, launcher: Launcher, words: list[str]
) -> Any:
    """Carry out one command."""
    match words:
        case ["load", num_requests, num_prompt, max_tokens]:
            return await answers.load(int(num_requests), int(num_prompt), int(max_tokens))
        case ["now"]:
            return time.monotonic()
        case ["gap", since_s]:
            return answers.longest_gap_s(float(since_s))
        case ["submit", name, seed, num_prompt, max_tokens]:
            answers.submit(name, int(seed), int(num_prompt), int(max_tokens))
        case ["flow", name, num_tokens]:
            await answers.until(lambda: len(answers.tokens[name]) >= int(num_tokens))
        case ["result", name]:
            await answers.until(lambda: name in answers.ends)
            return [str(answers.ends[name]), answers.tokens[name]]
        case ["drop"]:
            return await _admin(cluster.drop(None))
        case ["restore"]:
            return await _admin(cluster.restore())
        case ["kill", *numbers]:
            await asyncio.gather(*(cluster.kill(InstanceId(int(n))) for n in numbers))
        case ["unreachable", address] if isinstance(launcher, NamespaceLauncher):
            launcher.unreachable.add(address)
        case ["reachable", address] if isinstance(launcher, NamespaceLauncher):
            launcher.unreachable.discard(address)
        case ["state"]:
            state, vitals = cluster.state(), cluster.vitals()
            return {
                "pids": [cluster.pid_of(InstanceId(i)) for i in range(vitals.num_instances)],
                "groups": sorted([i for i, _ in group.stages] for group in state.groups),
                "used_blocks": sum(load.used_blocks for load in state.loads),
                "missing": vitals.num_missing,
                "errors": vitals.num_errors,
                "deaths": state.num_deaths,
                "outcomes": [str(one.outcome) for one in state.transitions],
                "moved_bytes": sum(one.moved_bytes for one in state.transitions),
            }
    return "done"


async def _admin(asked: Any) -> str:
    """What was done, or why nothing was."""
    try:
        return str(await asked)
    except InvalidRequest as error:
        return f"refused: {error}"


def launcher_of(orders: Orders) -> Launcher:
    """Who starts the instances where they are ordered."""
    program = None if orders.faults is None else program_of(Path(orders.faults))
    if not orders.places:
        return LocalLauncher(program)
    places = dict(enumerate(orders.places))
    return NamespaceLauncher(orders.address, places, program, orders.link_gbps)


async def serve(orders: Orders) -> None:
    """Until told to leave."""
    config, launcher = config_of(orders), launcher_of(orders)
    vocab_size = FAKE.vocab_size if orders.model is None else VOCAB_SIZE
    cluster = await LocalCluster.start(
        Plan(config),
        vocab_size=vocab_size,
        fake=FAKE if orders.model is None else None,
        launcher=launcher,
        run_folder=None if orders.run_folder is None else Path(orders.run_folder),
    )
    answers = Answers(cluster, vocab_size)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps("serving"), flush=True)
    pending: set[asyncio.Task[None]] = set()

    async def carry_out(line: bytes) -> None:
        number, *words = line.decode().split()
        print(json.dumps([number, await answer(cluster, answers, launcher, words)]), flush=True)

    async for line in lines:
        if line.split()[1:] == [b"leave"]:
            break
        task = asyncio.create_task(carry_out(line))
        pending.add(task)
        task.add_done_callback(pending.discard)
    await cluster.close()
    print(json.dumps(["leave", "gone"]), flush=True)


class FrontOnHost:
    """A front that somebody starts, asks and kills."""

    def __init__(self, host: Host, orders: Orders) -> None:
        """Start it on its host."""
        self.process = subprocess.Popen(
            [
                *host.within,
                sys.executable,
                "-m",
                "benchmarks.links.hosts_front",
                msgspec.json.encode(orders).decode(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._number = 0
        self._answers: dict[str, Any] = {}

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the front has died"
        return json.loads(line)

    def tell(self, command: str) -> str:
        """Give a command; ``hear`` has its answer."""
        assert self.process.stdin is not None
        self._number += 1
        self.process.stdin.write(f"{self._number} {command}\n")
        self.process.stdin.flush()
        return str(self._number)

    def hear(self, number: str) -> Any:
        """The answer to a command that was given."""
        while number not in self._answers:
            told, found = self._hear()
            self._answers[told] = found
        return self._answers.pop(number)

    def ask(self, command: str) -> Any:
        """Give a command and wait for its answer."""
        return self.hear(self.tell(command))

    def die(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "FrontOnHost":
        assert self._hear() == "serving"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None and kind is None:
            self.tell("leave")
            assert self.hear("leave") == "gone"
        self.die()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Orders)))
