"""The three ways of ``docs/architecture.md``: every function on them is there, and is called so.

One small cluster of processes around fake bodies lives through a burst, and writes its calls.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import LocalLauncher
from kunserve.core.config import MIB, InstanceConfig, KunServeConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.plan import Plan
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.server.start.app import create_app
from tests.running.live_cluster import FAKE, PATIENCE_S, config, until
from tests.specs import SMOLLM2_135M
from tests.unit.server.tiny_tokenizer import tiny_tokenizer
from tests.ways.called import stop_writing, write_calls

ROOT = Path(__file__).parents[2]
MOST = {"request": 55, "drop": 48, "piece": 39}
"""Functions of a way: more than so many are too many to read."""
NUM_BURST = 12
MOST_BURSTS = 10
"""On a busy machine nobody may run on one side when the drop comes: then no KV is moved. Or the
burst is over before a drop comes, which is not decided again at once behind a restore.
"""


def ways() -> dict[str, list[tuple[str, list[str]]]]:
    """Way -> (process, its functions in order), as the page has them."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for name, block in re.findall(r"```way-(\w+)\n(.*?)```", page, re.DOTALL):
        found[name] = []
        for line in block.splitlines():
            process, _, functions = line.partition(": ")
            found[name].append((process, functions.split()))
    return found


WAYS = ways()


async def burst(folder: Path) -> None:
    """One request alone, then so many that memory runs out, and a drop makes room and moves KV."""
    settings = replace(config(2), cluster=replace(config(2).cluster, check_invariants=False))
    launcher = LocalLauncher(("-m", "tests.ways.called_instance", str(folder)))
    fake = replace(FAKE, kv_blocks=24)
    cluster = await LocalCluster.start(
        Plan(settings), vocab_size=fake.vocab_size, fake=fake, launcher=launcher
    )
    try:
        with (folder / "front").open("w", buffering=1) as target:
            write_calls(target)
            try:
                await ask(cluster, settings)
            finally:
                stop_writing()
    finally:
        await cluster.close()


async def ask(cluster: LocalCluster, settings: KunServeConfig) -> None:
    app = create_app(cluster, tiny_tokenizer(), "tiny", settings)

    async def with_state(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        scope["state"] = {}
        await app(scope, receive, send)

    transport = httpx.ASGITransport(app=with_state)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:

        async def one(max_tokens: int) -> None:
            body = {"model": "tiny", "prompt": "hello " * 8, "max_tokens": max_tokens}
            body |= {"stream": True, "ignore_eos": True, "temperature": 0}
            answer = await client.post("/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text

        def is_dropped() -> bool:
            return len(cluster.state().loads) == 1

        async def many() -> None:
            requests = asyncio.gather(*[one(90) for _ in range(NUM_BURST)])
            await until(lambda: requests.done() or is_dropped())
            await requests

        await one(3)
        for _ in range(MOST_BURSTS):
            await many()
            if any(record.moved_bytes for record in cluster.state().transitions):
                return
            if is_dropped():
                await cluster.restore()
                await until(lambda: len(cluster.state().loads) == 2)
        raise AssertionError("no drop moved KV")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """Kind of process -> the calls of each."""
    folder = tmp_path_factory.mktemp("calls")
    asyncio.run(burst(folder))
    remap(folder)
    found: dict[str, list[list[str]]] = {"front": [], "instance": [], "memory": []}
    for file in folder.iterdir():
        found[file.name.partition("-")[0]].append(file.read_text().splitlines())
    assert [len(processes) for processes in found.values()] == [1, 2, 1]
    return found


def remap(folder: Path) -> None:
    """What a drop does to real memory, which bodies without a model do not have."""
    memory = InstanceMemory(InstanceId(0), SMOLLM2_135M, InstanceConfig(memory_bytes=320 * MIB))
    with (folder / "memory").open("w") as target:
        write_calls(target)
        memory.drop(LayerRange(0, 15))
        stop_writing()
    memory.close()


def missing_from(called: list[str], way: list[str]) -> str | None:
    """The first function of a way that is not called after those before it."""
    rest: Iterator[str] = iter(called)
    return next((name for name in way if name not in rest), None)


@pytest.mark.parametrize("name", MOST)
def test_a_way_is_what_the_page_says(name: str, calls: dict[str, list[list[str]]]) -> None:
    for process, way in WAYS[name]:
        kind = process.split(",")[0]
        missing = [missing_from(called, way) for called in calls[kind]]
        assert None in missing, (process, missing)


def test_no_function_stands_twice_on_a_part_of_a_way() -> None:
    for way in WAYS.values():
        for process, functions in way:
            assert not [n for n, times in Counter(functions).items() if times > 1], process


def test_the_page_counts_right() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name, way in WAYS.items():
        count = sum(len(functions) for _, functions in way)
        assert f"**{count} functions**" in page, (name, count)
        assert count <= MOST[name], name
