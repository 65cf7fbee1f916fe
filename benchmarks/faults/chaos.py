"""Random misfortune for a while, under load: nothing is lost, doubled, changed or left behind.

    python -m benchmarks.faults.chaos --minutes 30 [--instances 4] [--seed 0] [--fake]

Four real instances serve requests whose tokens are known from an undisturbed run. Meanwhile
processes are killed, stopped, hung and cut off, words between them are lost, disks are slow,
clients leave, requests kill the instance that takes them up, and groups are dropped and restored
by force, unless all share one copy of the weights (``--shared-weights``). The front is stopped now
and then, and killed and started again by the same command: requests of that moment end for their
clients, all others lose nothing. One line of JSON tells the counts; the exit code is 1 unless
everything is as it must be.
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
from dataclasses import dataclass, replace
from pathlib import Path

import click

from benchmarks.faults.chaos_clients import POLL_S, VOCAB, Clients, Job, judge, make_jobs
from benchmarks.faults.chaos_front import Front, FrontOrder
from kunserve.cluster.processes.launch import FakeSettings
from kunserve.cluster.processes.process_mark import kill_marked, mark_of, pid_of
from kunserve.core.config import (
    MIB,
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.ids import InstanceId
from kunserve_lab.bench.environment import environment
from kunserve_lab.world.fake_main import MODULE as FAKE_MODULE

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
A_WHILE_S = 5.0
"""How long a disk is bad, and an instance slow to meet others."""
GONE_S = 90.0
"""How long an instance does not come back, of a long run."""
MAX_DOWN_S = 2.0
"""How long nobody starts the front again after it died, at most."""
STOPPED_S = 2.0
"""How long the front is stopped."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    seconds: float
    num_instances: int = 4
    seed: int = 0
    is_fake: bool = False
    hang_timeout_s: float = 8.0
    heartbeat_timeout_s: float = 5.0
    kills_fronts: bool = True
    shares_weights: bool = False


class Misfortune:
    """Faults by chance. Of those that may be blamed on a request, one at a time."""

    def __init__(
        self, front: Front, clients: Clients, folder: Path, setting: Setting, draw: random.Random
    ) -> None:
        self._front = front
        self._clients = clients
        self._folder = folder
        self._setting = setting
        self._ids = [InstanceId(i) for i in range(setting.num_instances)]
        self._draw = draw
        self.counts: Counter[str] = Counter()
        self.marks: set[str] = set()
        """Of every process of an instance that was seen."""
        self._blamable: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Note which processes run."""
        if self._front.state is not None:
            self.marks.update(mark for mark in self._front.state.marks if mark is not None)

    def _mark(self, instance_id: InstanceId) -> str | None:
        state = self._front.state
        return None if state is None else state.marks[instance_id]

    async def rage(self, seconds: float) -> None:
        """Let one thing after the other happen, and put an end to all of them."""
        until_s = time.monotonic() + seconds
        (self._folder / "poison").touch()
        gentle: dict[Callable[[], Coroutine[None, None, None]], float] = {
            self._leave: 4,
            self._drop: 4,
            self._restore: 3,
            self._disk: 2,
            self._shy: 2,
            self._mute: 2,
            self._kill: 1,
            self._lose: 0.5,
        }
        if self._setting.kills_fronts:
            gentle |= {self._kill_front: 0.5, self._stop_front: 0.5}
        under_way: set[asyncio.Task[None]] = set()
        while time.monotonic() < until_s:
            await asyncio.sleep(self._draw.expovariate(1.0 / BETWEEN_FAULTS_S))
            self.look()
            if (self._blamable is None or self._blamable.done()) and self._draw.random() < 0.5:
                poisons = self._draw.random() < POISON_SHARE
                self._blamable = asyncio.create_task(self._poison() if poisons else self._fail())
            else:
                action = self._draw.choices(list(gentle), list(gentle.values()))[0]
                under_way = {task for task in under_way if not task.done() or task.exception()}
                if len(under_way) < MAX_GENTLE:
                    under_way.add(asyncio.create_task(action()))
        if not self.counts["instances gone"]:
            await self._lose()  # so that a short run has it too; as is the next
        if self._setting.kills_fronts and not self.counts["fronts killed"]:
            await self._kill_front()
        if self._blamable is not None:
            under_way.add(self._blamable)
        await asyncio.gather(*under_way)

    async def _leave(self) -> None:
        self.counts["aborts"] += 1
        self._clients.leave(self._front)

    async def _drop(self) -> None:
        self.counts["drops"] += await self._front.change("drop")

    async def _restore(self) -> None:
        self.counts["restores"] += await self._front.change("restore")

    async def _disk(self) -> None:
        """The disk of one instance is bad for a while, should the instance read."""
        how = self._draw.choice(["slow", "stuck", "eio"])
        self.counts[f"disks {how}"] += 1
        self._for_a_while(how)

    async def _shy(self) -> None:
        """One instance meets others late."""
        self.counts["late handshakes"] += 1
        self._for_a_while("shy")

    def _for_a_while(self, fault: str) -> None:
        path = self._folder / f"{fault}-{self._draw.choice(self._ids)}"
        path.touch()
        asyncio.get_running_loop().call_later(A_WHILE_S, lambda: path.unlink(missing_ok=True))

    async def _lose(self) -> None:
        """An instance dies and does not come back: none that is started there gets ready."""
        if list(self._folder.glob("refuse-*")):
            return
        instance_id = self._draw.choice(self._ids)
        path = self._folder / f"refuse-{instance_id}"
        path.touch()
        if await self._front.change("kill", instance_id):
            self.counts["instances gone"] += 1
            await self._until(lambda: False, min(GONE_S, self._setting.seconds / 4.0))
        path.unlink(missing_ok=True)

    async def _mute(self) -> None:
        """The next word from one instance to another is lost."""
        (self._folder / f"mute-{self._draw.choice(self._ids)}").touch()
        self.counts["words lost"] += 1

    async def _kill(self) -> None:
        """By hand, so that no request is blamed."""
        instance_id = self._draw.choice(self._ids)
        self.counts["kills by hand"] += await self._front.change("kill", instance_id)

    async def _kill_front(self) -> None:
        """By ``kill -9``; after a while it is started again by the same command."""
        if not self._front.is_up:
            return
        self.counts["fronts killed"] += 1
        await self._front.die()
        self._clients.all_cut()
        await asyncio.sleep(self._draw.uniform(0.0, MAX_DOWN_S))
        await self._front.start()

    async def _stop_front(self) -> None:
        if not self._front.is_up:
            return
        self.counts["fronts stopped"] += 1
        self._front.signal(signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        self._front.signal(signal.SIGCONT)

    async def _fail(self) -> None:
        """One instance dies, is stopped, hangs or loses its connections, until it is replaced."""
        instance_id = self._draw.choice(self._ids)
        mark = self._mark(instance_id)
        if mark is None:
            return
        how = self._draw.choice(["kill -9", "stop", "hang", "cut"])
        self.counts[how] += 1
        path = self._folder / f"{how}-{instance_id}"
        if how == "kill -9":
            kill_marked(mark)
        elif how == "stop":
            if mark_of(pid_of(mark)) == mark:
                os.kill(pid_of(mark), signal.SIGSTOP)
        else:
            path.touch()
        # A hang or a cut begins with the next step; an idle instance goes on being well.
        limit_s = CUT_S if how == "cut" else FAULT_S  # nothing may have been on its way
        await self._until(lambda: self._mark(instance_id) not in (mark, None), limit_s)
        path.unlink(missing_ok=True)
        await self._until(self._is_whole, FAULT_S)

    def _is_whole(self) -> bool:
        state = self._front.state
        return state is not None and not state.num_missing

    async def _poison(self) -> None:
        story = self._clients.ask(self._front, None)
        if story is not None:
            self.counts["poison"] += 1
            await self._until(lambda: not story.is_open, 2.0 * FAULT_S)

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while not condition() and time.monotonic() < until_s:
            self.look()
            await asyncio.sleep(POLL_S)


async def undisturbed(setting: Setting, jobs: list[Job], place: Path) -> list[tuple[int, ...]]:
    """The tokens of every job on one instance that is left alone."""
    clients = Clients(jobs, random.Random(setting.seed))
    front = front_of(replace(setting, num_instances=1), clients, place)
    try:
        await front.start()
        stories = [clients.ask(front, job) for job in range(len(jobs))]
        while clients.open:
            assert front.is_up, "the undisturbed front has died"
            await asyncio.sleep(POLL_S)
        return [tuple(story.token_ids) for story in stories if story is not None]
    finally:
        await front.leave()


def front_of(setting: Setting, clients: Clients, place: Path) -> Front:
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
    fake = (
        FakeSettings(FAKE_MODULE, vocab_size=VOCAB, kv_blocks=80, step_s=0.02)
        if setting.is_fake
        else None
    )
    temporary = place / "tmp"
    temporary.mkdir(exist_ok=True)
    sharers = setting.num_instances if setting.shares_weights else 0
    order = FrontOrder(config, VOCAB, fake, str(place), str(temporary / "run"), sharers)
    return Front(order, clients.hear, temporary)


async def run_chaos(setting: Setting) -> dict[str, object]:
    """One run: its counts, and whether everything is as it must be (``ok``)."""
    draw = random.Random(setting.seed)
    jobs = make_jobs(draw)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        place = Path(folder)
        expected = await undisturbed(setting, jobs, place)
        shared_before = _shared_memory()
        clients = Clients(jobs, draw)
        front = front_of(setting, clients, place)
        misfortune = Misfortune(front, clients, place, setting, draw)
        try:
            await front.start()
            asking = asyncio.create_task(clients.keep_asking(front))
            num_open_files = await _settled_open_files(front, clients)
            await misfortune.rage(setting.seconds)
            asking.cancel()
            left = await settle(front, clients, misfortune, num_open_files)
        finally:
            await front.leave()
        left["processes"] = _num_processes(folder, misfortune.marks)
        left["files"] = len(os.listdir(place / "tmp"))
        left["shared memory"] = len(_shared_memory() - shared_before)
    counts = judge(clients.stories, expected)
    num_errors = front.num_errors
    is_ok = not (any(left.values()) or counts["wrong"] or counts["unfinished"] or num_errors)
    return {
        "seconds": setting.seconds,
        "seed": setting.seed,
        "instances": setting.num_instances,
        "weights": "shared" if setting.shares_weights else "private",
        "processes": len(misfortune.marks),
        "faults": dict(misfortune.counts),
        "refused": clients.num_refused,
        **counts,
        "internal_errors": num_errors,
        "left": left,
        "ok": is_ok,
        "commit": environment()["commit"],
    }


async def settle(
    front: Front, clients: Clients, misfortune: Misfortune, num_open_files: int
) -> dict[str, int]:
    """Wait until all requests have ended and the cluster is whole; what is left over."""
    until_s = time.monotonic() + SETTLE_S

    def left() -> dict[str, int]:
        state = front.state
        assert state is not None, "the front has died by itself"
        return {
            "requests": state.num_unfinished,
            "blocks": state.num_held,
            "missing instances": state.num_missing,
            "open files": max(0, state.num_open_files - num_open_files),
        }

    while (any(left().values()) or clients.open) and time.monotonic() < until_s:
        misfortune.look()
        await asyncio.sleep(POLL_S)
    return left()


def _num_processes(folder: str, marks: set[str]) -> int:
    """Processes that were started for this run and are still there."""
    found = {pid_of(mark) for mark in marks if mark_of(pid_of(mark)) == mark}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if folder.encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return len(found)


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("kunserve*")}


async def _settled_open_files(front: Front, clients: Clients) -> int:
    """Of the front, once all instances have served: each has two connections by then."""
    while not all(story.token_ids for story in clients.stories.values()) or not clients.stories:
        await asyncio.sleep(POLL_S)
    assert front.state is not None
    return front.state.num_open_files


@click.command()
@click.option("--minutes", default=30.0, help="Of misfortune; starting and settling come on top.")
@click.option("--instances", default=4, type=click.IntRange(min=2))
@click.option("--seed", default=0)
@click.option("--fake", is_flag=True, help="Instances without a model.")
@click.option("--front-kills/--no-front-kills", default=True, help="Whether the front dies too.")
@click.option("--shared-weights", is_flag=True, help="One copy for all: nothing is dropped.")
def main(
    minutes: float, instances: int, seed: int, fake: bool, front_kills: bool, shared_weights: bool
) -> None:
    """Run it and say the counts."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    setting = Setting(
        minutes * 60.0,
        instances,
        seed,
        fake,
        kills_fronts=front_kills,
        shares_weights=shared_weights,
    )
    result = asyncio.run(run_chaos(setting))
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
