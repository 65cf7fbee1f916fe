"""Random misfortune for a while, under load: nothing is lost, doubled, changed or left behind.

    python -m benchmarks.chaos --minutes 30 [--instances 4] [--seed 0] [--fake]

Four real instances serve requests whose tokens are known from an undisturbed run. Meanwhile
processes are killed, stopped, hung and cut off, disks are slow, clients leave, requests kill the
instance that takes them up, and groups are dropped and restored by force. One line of JSON tells
the counts; the exit code is 1 unless everything is as it must be.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from benchmarks.faulty_instance import POISON, program_of
from kunserve.cluster.launch import FakeSettings, LocalLauncher
from kunserve.cluster.local import LocalCluster
from kunserve.cluster.process_mark import mark_of
from kunserve.core.config import (
    MIB,
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.errors import InvalidRequest, Overloaded, Unavailable
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.tokens import TokenIds

NUM_JOBS = 24
VOCAB = 49152
"""Of SmolLM2."""
IN_FLIGHT = 10
BETWEEN_FAULTS_S = 2.0
"""On average."""
POISON_SHARE = 0.15
"""Of the faults that may be blamed on a request."""
MAX_GENTLE = 3
"""Other faults at once."""
SETTLE_S = 240.0
"""How long everything may take to end, and to be whole again, after the last fault."""
FAULT_S = 60.0
"""How long a fault may take to show, and to be mended, before the next one that may be blamed."""
CUT_S = 15.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    seconds: float
    num_instances: int = 4
    seed: int = 0
    is_fake: bool = False
    hang_timeout_s: float = 8.0
    heartbeat_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked for, again and again."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(slots=True)
class Story:
    """What became of one request."""

    job: int | None
    """None: it is poison."""
    token_ids: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    was_aborted: bool = False
    faults: list[str] = field(default_factory=list)
    """What must never happen."""


def make_jobs(draw: random.Random) -> list[Job]:
    """Short and long, greedy and drawn."""
    jobs = []
    for number in range(NUM_JOBS):
        prompt = tuple(draw.randrange(100, VOCAB) for _ in range(draw.choice([5, 40, 150, 400])))
        sampling = SamplingParams(max_tokens=draw.choice([8, 24, 60, 120]), ignore_eos=True)
        if number % 3 == 2:
            sampling = replace(sampling, temperature=0.8, top_p=0.9, seed=number)
        else:
            sampling = replace(sampling, temperature=0.0)
        jobs.append(Job(prompt, sampling))
    return jobs


class Clients:
    """Keep a number of requests under way, and write down what becomes of each."""

    def __init__(self, cluster: LocalCluster, jobs: list[Job], draw: random.Random) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._draw = draw
        self.stories: dict[RequestId, Story] = {}
        self.num_refused = 0

    @property
    def open(self) -> list[RequestId]:
        """Requests that have neither ended nor been given up by their client."""
        items = self.stories.items()
        return [i for i, story in items if not story.ends and not story.was_aborted]

    def ask(self, job: int | None) -> RequestId | None:
        """Submit a job, or poison; None when the cluster takes nothing just now."""
        what = Job(POISON, SamplingParams(max_tokens=20)) if job is None else self._jobs[job]
        request_id = RequestId(f"r{len(self.stories) + self.num_refused}")
        story = Story(job)
        request = Request(request_id, TokenIds(what.prompt), what.sampling, time.monotonic())
        try:
            self._cluster.submit(request, lambda token: self._take(story, token))
        except (Unavailable, Overloaded):
            self.num_refused += 1
            return None
        self.stories[request_id] = story
        return request_id

    @staticmethod
    def _take(story: Story, token: TokenOutput) -> None:
        if story.ends or story.was_aborted:
            story.faults.append("a token after the end")
        if token.token_id is not None:
            if token.position != len(story.token_ids):
                story.faults.append(f"token {token.position} after {len(story.token_ids)}")
            story.token_ids.append(token.token_id)
        if token.finish_reason is not None:
            story.ends.append(token.finish_reason)

    def leave(self) -> None:
        """One client goes away."""
        healthy = [i for i in self.open if self.stories[i].job is not None]
        if healthy:
            request_id = self._draw.choice(healthy)
            self.stories[request_id].was_aborted = True
            self._cluster.abort(request_id)

    async def keep_asking(self) -> None:
        """Until cancelled."""
        while True:
            while len(self.open) < IN_FLIGHT:
                if self.ask(self._draw.randrange(len(self._jobs))) is None:
                    break
            await asyncio.sleep(POLL_S)


class Misfortune:
    """Faults by chance. Of those that may be blamed on a request, one at a time.

    Two at once can convict an innocent request, because it was alone in both.
    """

    def __init__(
        self, cluster: LocalCluster, clients: Clients, folder: Path, ids: list[InstanceId],
        draw: random.Random,
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._clients = clients
        self._folder = folder
        self._ids = ids
        self._draw = draw
        self.counts: Counter[str] = Counter()
        self.marks: set[str] = set()
        """Of every process seen."""
        self._blamable: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Note which processes run."""
        for instance_id in self._ids:
            pid = self._cluster.pid_of(instance_id)
            mark = None if pid is None else mark_of(pid)
            if mark is not None:
                self.marks.add(mark)

    async def rage(self, seconds: float) -> None:
        """Let one thing after the other happen, and put an end to all of them."""
        until_s = time.monotonic() + seconds
        (self._folder / "poison").touch()
        gentle: dict[Callable[[], Coroutine[None, None, None]], int] = {
            self._leave: 4,
            self._drop: 4,
            self._restore: 3,
            self._slow: 2,
            self._kill: 1,
        }
        under_way: set[asyncio.Task[None]] = set()
        while time.monotonic() < until_s:
            await asyncio.sleep(self._draw.expovariate(1.0 / BETWEEN_FAULTS_S))
            self.look()
            if self._is_nobody_suspected() and self._draw.random() < 0.5:
                poisons = self._draw.random() < POISON_SHARE
                self._blamable = asyncio.create_task(self._poison() if poisons else self._fail())
            else:
                action = self._draw.choices(list(gentle), list(gentle.values()))[0]
                under_way = {task for task in under_way if not task.done()}
                if len(under_way) < MAX_GENTLE:
                    under_way.add(asyncio.create_task(action()))
        if self._blamable is not None:
            under_way.add(self._blamable)
        await asyncio.gather(*under_way)

    def _is_nobody_suspected(self) -> bool:
        """A fault now can convict no innocent request: none runs alone, or waits for that."""
        is_mended = self._blamable is None or self._blamable.done()
        is_free = self._cluster._controller.placement.reserved is None
        return is_mended and is_free and not self._cluster.state().num_unplaced

    async def _leave(self) -> None:
        self.counts["aborts"] += 1
        self._clients.leave()

    async def _drop(self) -> None:
        with contextlib.suppress(InvalidRequest, TimeoutError):
            async with asyncio.timeout(30.0):
                await self._cluster.drop(None)
            self.counts["drops"] += 1

    async def _restore(self) -> None:
        with contextlib.suppress(InvalidRequest, TimeoutError):
            async with asyncio.timeout(60.0):
                await self._cluster.restore()
            self.counts["restores"] += 1

    async def _slow(self) -> None:
        """The disk of one instance is slow for a while, and the instance must read."""
        instance_id = self._draw.choice(self._ids)
        path = self._folder / f"slow-{instance_id}"
        path.touch()
        self.counts["slow disks"] += 1
        asyncio.get_running_loop().call_later(5.0, lambda: path.unlink(missing_ok=True))

    async def _kill(self) -> None:
        """By hand, so that no request is blamed. Where one runs alone, it would be."""
        instance_id = self._draw.choice(self._ids)
        if self._cluster.pid_of(instance_id) is not None:
            with contextlib.suppress(InvalidRequest, TimeoutError):
                await self._cluster.kill(instance_id)
                self.counts["kills by hand"] += 1

    async def _fail(self) -> None:
        """One instance dies, is stopped, hangs or loses its connections, until it is replaced."""
        instance_id = self._draw.choice(self._ids)
        pid = self._cluster.pid_of(instance_id)
        if pid is None:
            return
        how = self._draw.choice(["kill -9", "stop", "hang", "cut"])
        self.counts[how] += 1
        path = self._folder / f"{how}-{instance_id}"
        if how == "kill -9":
            os.kill(pid, signal.SIGKILL)
        elif how == "stop":
            os.kill(pid, signal.SIGSTOP)
        else:
            path.touch()
        # A hang or a cut begins with the next step; an idle instance goes on being well.
        limit_s = CUT_S if how == "cut" else FAULT_S  # nothing may have been on its way
        await self._until(lambda: self._cluster.pid_of(instance_id) != pid, limit_s)
        path.unlink(missing_ok=True)
        await self._until(lambda: not self._cluster.vitals().num_missing, FAULT_S)

    async def _poison(self) -> None:
        request_id = self._clients.ask(None)
        if request_id is not None:
            self.counts["poison"] += 1
            story = self._clients.stories[request_id]
            await self._until(lambda: bool(story.ends), 2.0 * FAULT_S)

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while not condition() and time.monotonic() < until_s:
            self.look()
            await asyncio.sleep(POLL_S)


async def undisturbed(setting: Setting, jobs: list[Job]) -> list[tuple[int, ...]]:
    """The tokens of every job on one instance that is left alone."""
    draw = random.Random(setting.seed)
    cluster = await start(replace(setting, num_instances=1), None)
    try:
        clients = Clients(cluster, jobs, draw)
        for job in range(len(jobs)):
            clients.ask(job)
        while clients.open:
            await asyncio.sleep(POLL_S)
        return [tuple(story.token_ids) for story in clients.stories.values()]
    finally:
        await cluster.close()


async def start(setting: Setting, faults: Path | None) -> LocalCluster:
    """SmolLM2 in bfloat16 with little KV memory, so that load alone makes drops; or a fake."""
    config = KunServeConfig(
        model=ModelConfig(model="smollm2-135m", dtype="bfloat16"),
        instance=InstanceConfig(kv_cache_memory_bytes=24 * MIB),
        scheduler=SchedulerConfig(max_num_batched_tokens=128),
        overload=OverloadConfig(),
        cluster=ClusterConfig(
            num_instances=setting.num_instances,
            hang_timeout_s=setting.hang_timeout_s,
            heartbeat_timeout_s=setting.heartbeat_timeout_s,
            check_invariants=True,
        ),
    )
    return await LocalCluster.start(
        config,
        vocab_size=VOCAB,
        fake=FakeSettings(vocab_size=VOCAB, kv_blocks=80, step_s=0.02) if setting.is_fake else None,
        launcher=None if faults is None else LocalLauncher(program_of(faults)),
    )


async def run_chaos(setting: Setting) -> dict[str, object]:
    """One run: its counts, and whether everything is as it must be (``ok``)."""
    draw = random.Random(setting.seed)
    jobs = make_jobs(draw)
    expected = await undisturbed(setting, jobs)
    ids = [InstanceId(i) for i in range(setting.num_instances)]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        cluster = await start(setting, Path(folder))
        try:
            clients = Clients(cluster, jobs, draw)
            misfortune = Misfortune(cluster, clients, Path(folder), ids, draw)
            asking = asyncio.create_task(clients.keep_asking())
            num_open_files = await _settled_open_files(clients)
            await misfortune.rage(setting.seconds)
            asking.cancel()
            left = await settle(cluster, clients, misfortune, num_open_files)
            num_errors = cluster.vitals().num_errors
        finally:
            await cluster.close()
    left["processes"] = sum(mark_of(int(m.split(":")[0])) == m for m in misfortune.marks)
    counts = judge(clients.stories, expected)
    is_ok = not (any(left.values()) or counts["wrong"] or counts["unfinished"] or num_errors)
    return {
        "seconds": setting.seconds,
        "seed": setting.seed,
        "instances": setting.num_instances,
        "processes": len(misfortune.marks),
        "faults": dict(misfortune.counts),
        "refused": clients.num_refused,
        **counts,
        "internal_errors": num_errors,
        "left": left,
        "ok": is_ok,
    }


async def settle(
    cluster: LocalCluster, clients: Clients, misfortune: Misfortune, num_open_files: int
) -> dict[str, int]:
    """Wait until all requests have ended and the cluster is whole; what is left over."""
    until_s = time.monotonic() + SETTLE_S

    def blocks() -> int:
        return sum(load.used_blocks + load.num_waiting for load in cluster.state().loads)

    def is_over() -> bool:
        misfortune.look()
        is_whole = not cluster.vitals().num_missing and _num_open_files() <= num_open_files
        return is_whole and not clients.open and not blocks()

    while not is_over() and time.monotonic() < until_s:
        await asyncio.sleep(POLL_S)
    return {
        "requests": cluster.num_unfinished(),
        "blocks": blocks(),
        "missing instances": cluster.vitals().num_missing,
        "open files": max(0, _num_open_files() - num_open_files),
    }


def judge(stories: dict[RequestId, Story], expected: list[tuple[int, ...]]) -> dict[str, int]:
    """Count what became of the requests. ``wrong`` is what must not happen at all."""
    counts = Counter(
        dict.fromkeys(("requests", "identical", "aborted", "poisoned", "wrong", "unfinished"), 0)
    )
    for request_id, story in stories.items():
        counts["requests"] += 1
        verdict = _verdict(story, expected)
        counts[verdict] += 1
        if verdict in ("wrong", "unfinished"):
            print(f"{request_id}: {verdict}: {story}", file=sys.stderr)
    return dict(counts)


def _verdict(story: Story, expected: list[tuple[int, ...]]) -> str:
    if story.faults or len(story.ends) > 1:
        return "wrong"
    if story.was_aborted:
        known = expected[story.job] if story.job is not None else ()
        return "aborted" if tuple(story.token_ids) == known[: len(story.token_ids)] else "wrong"
    if not story.ends:
        return "unfinished"
    if story.job is None:
        return "poisoned" if story.ends == [FinishReason.ERROR] else "wrong"
    return "identical" if tuple(story.token_ids) == expected[story.job] else "wrong"


async def _settled_open_files(clients: Clients) -> int:
    """Of this process, once all instances have served: each has two connections by then."""
    while not all(story.token_ids for story in clients.stories.values()) or not clients.stories:
        await asyncio.sleep(POLL_S)
    return _num_open_files()


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@click.command()
@click.option("--minutes", default=30.0, help="Of misfortune; starting and settling come on top.")
@click.option("--instances", default=4, type=click.IntRange(min=2))
@click.option("--seed", default=0)
@click.option("--fake", is_flag=True, help="Instances without a model.")
def main(minutes: float, instances: int, seed: int, fake: bool) -> None:
    """Run it and say the counts."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    setting = Setting(minutes * 60.0, instances, seed, fake)
    result = asyncio.run(run_chaos(setting))
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
