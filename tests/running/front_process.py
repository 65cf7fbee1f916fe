"""A front in a process of its own, over fake instances: ``python -m tests.running.front_process``.

    FOLDER NUM_INSTANCES FAULTS SETTINGS RAY    arguments; SETTINGS is JSON of ``ClusterConfig``,
                                                RAY the address of a Ray cluster and behind a comma
                                                this host's, or empty

It reads commands line by line and answers each with a line of JSON.

    submit NAME MAX_TOKENS | drop | restore | scale N | kill N | finish | state | leave
"""

import asyncio
import json
import os
import select
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.faults.faulty_instance import program_of
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import Launcher, LocalLauncher
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Plan
from tests.running.forking import source_of
from tests.running.live_cluster import FAKE, Client, config


async def serve(folder: str, num_instances: str, faults: str, settings: str, ray: str) -> None:
    cluster = await LocalCluster.start(
        Plan(config(int(num_instances), **json.loads(settings))),
        vocab_size=FAKE.vocab_size,
        fake=FAKE,
        launcher=launcher_of(program_of(Path(faults)), ray),
        run_folder=Path(folder),
    )
    client = Client(cluster)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps("serving"), flush=True)
    async for line in lines:
        words = line.decode().split()
        if words[0] == "leave":
            break
        print(json.dumps(await answer(cluster, client, words)), flush=True)
    await cluster.close()
    print(json.dumps("gone"), flush=True)


def launcher_of(program: tuple[str, str], ray: str) -> Launcher:
    if not ray:
        return LocalLauncher(program)
    from kunserve_extras.ray.launcher import RayLauncher
    from kunserve_extras.ray.session import Session

    address, _, host = ray.partition(",")
    return RayLauncher(Session(address, host or None), is_detached=True, program=program, name="f")


async def answer(cluster: LocalCluster, client: Client, words: list[str]) -> Any:
    match words:
        case ["submit", name, max_tokens]:
            client.submit(name, max_tokens=int(max_tokens))
            await client.all_flow(2)
        case ["drop"]:
            return await cluster.drop(None)
        case ["restore"]:
            return await cluster.restore()
        case ["scale", number]:
            return await cluster.scale(int(number))
        case ["kill", number]:
            await cluster.kill(InstanceId(int(number)))
        case ["finish"]:
            await client.all_done()
        case ["state"]:
            state, vitals = cluster.state(), cluster.vitals()
            return {
                "pids": [cluster.pid_of(InstanceId(i)) for i in range(vitals.num_instances)],
                "groups": [[list(stage) for stage in group.stages] for group in state.groups],
                "ids": [group.group_id for group in state.groups],
                "used_blocks": sum(load.used_blocks for load in state.loads),
                "missing": vitals.num_missing,
                "errors": vitals.num_errors,
                "address": cluster._channel.address,
            }
    return "done"


class Front:
    """A front that a test starts, asks and kills."""

    def __init__(
        self,
        folder: Path,
        num_instances: int,
        faults: Path,
        settings: dict[str, object],
        ray: str = "",
    ) -> None:
        arguments = [str(folder), str(num_instances), str(faults), json.dumps(settings), ray]
        program = ("-m", "tests.running.front_process", *arguments)
        # A fork: what a front imports takes longer than most of what it is asked for.
        self.pid, orders, words, self._end = source_of(program, 1).fork_open(program)
        self._code: int | None = None
        self._orders = os.fdopen(orders, "w", buffering=1)
        self._words = os.fdopen(words)

    def hear(self) -> Any:
        line = self._words.readline()
        assert line, "the front has died"
        return json.loads(line)

    def ask(self, command: str) -> Any:
        self._orders.write(command + "\n")
        return self.hear()

    def die(self) -> None:
        """By ``kill -9``, if it has not ended."""
        if self.wait(0.0) is None:
            os.kill(self.pid, signal.SIGKILL)
            assert self.wait(60.0) is not None

    def wait(self, within_s: float) -> int | None:
        """Its exit code, or None if it has not ended by then."""
        if self._code is None and select.select([self._end], [], [], within_s)[0]:
            self._code = int(os.read(self._end, 16))
        return self._code

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> "Front":
        assert self.hear() == "serving"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self.wait(0.0) is None:
            assert self.ask("leave") == "gone"
            assert self.wait(60.0) == 0
        self.die()
        self._orders.close()
        self._words.close()
        os.close(self._end)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
