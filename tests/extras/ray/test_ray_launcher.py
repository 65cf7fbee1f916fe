"""The launcher over Ray, with a stand-in for Ray: actors live here, instances are processes."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import InstanceOrder
from kunserve.core.config import MIB, ClusterConfig, InstanceConfig, KunServeConfig
from kunserve.core.errors import ConfigError, StartupFailure, TooLittleMemory
from kunserve.core.ids import InstanceId
from kunserve.core.place import Place
from kunserve.core.plan import Plan
from kunserve.engine.memory.free_memory import PROCESS_BYTES
from kunserve.transport.wire.network import FrontPlace, Network
from kunserve_extras.ray.nodes import Node as Has
from kunserve_extras.ray.nodes import need_of, num_that_fit, place_of, shortage
from tests.extras.ray.fake_ray import FakeRay, Node, installed
from tests.running.live_cluster import FAKE, Client, until, with_cluster

ONE = InstanceId(1)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Two nodes for an instance each."""
    left = Node("127.0.0.1", {"CPU": 1.0, "memory": 1e10}, {"rack": "left", "link-gbps": "25"})
    with installed(FakeRay(left, Node("127.0.0.2", {"CPU": 1.0})), monkeypatch) as fake:
        yield fake


def launcher(address: str | None = None, **how: Any) -> Any:
    from kunserve_extras.ray.launcher import RayLauncher
    from kunserve_extras.ray.session import Session

    return RayLauncher(Session(address), **how)


def test_instances_are_placed_served_replaced_and_ended(ray: FakeRay) -> None:
    pids: list[int] = []

    async def story(cluster: LocalCluster, client: Client) -> None:
        assert all(len(ray.on(node)) == 1 for node in ray.nodes)
        options = ray.actors[0].options
        assert options["num_cpus"] == 1.0 and options["scheduling_strategy"] == "SPREAD"
        assert options["max_restarts"] == 0 and options["lifetime"] is None
        for i in range(4):
            client.submit(f"r{i}", max_tokens=60)
        await client.all_flow()
        lost = ray.nodes[1]
        ray.nodes.append(Node("127.0.0.3", {"CPU": 1.0}))
        ray.kill_node(lost)
        await client.all_done()
        await until(lambda: not cluster.vitals().num_missing)
        assert cluster.state().num_deaths == 1 and len(ray.on(ray.nodes[2])) == 1
        pids.extend(dict(cluster.vitals().pids).values())

    with_cluster(story, launcher=launcher)
    assert not ray.living and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert ray.inits[0]["address"] == "auto" and ray.inits[0]["log_to_driver"] is False
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_growth_waits_for_a_node_that_the_autoscaler_is_asked_for(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        from kunserve_extras.ray import launcher as module

        client.submit("r")
        monkeypatch.setattr(module, "PROMPT_S", 0.02)
        await cluster.scale(3)
        await until(lambda: ray.requests)
        assert ray.requests[-1] == [{"CPU": 1.0}] * 3
        assert cluster.vitals().num_starting == 1
        ray.nodes.append(Node("127.0.0.3", {"CPU": 1.0}))
        ray.place_all()
        await until(lambda: len(cluster.state().groups) == 3)
        await cluster.scale(2)
        await until(lambda: ray.requests[-1] == [{"CPU": 1.0}] * 2)
        await client.all_done()

    with_cluster(story, launcher=lambda: launcher(autoscales=True))
    assert ray.requests[-1] == [] and not ray.living


def test_a_cluster_without_room_is_refused_in_numbers(ray: FakeRay) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        raise AssertionError("it started")

    with pytest.raises(TooLittleMemory) as refused:
        with_cluster(story, num_instances=3, launcher=launcher)
    assert str(refused.value) == (
        "3 instances need 1 CPU each; the Ray cluster has 2 nodes (127.0.0.1: 1 CPU; "
        "127.0.0.2: 1 CPU), which hold 2 of them"
    )
    assert not ray.actors


def test_a_cluster_that_is_not_there(ray: FakeRay) -> None:
    with pytest.raises(ConfigError, match=r"--ray-address 127\.0\.0\.1:1: nobody listens there"):
        launcher("127.0.0.1:1")
    with pytest.raises(ConfigError, match="--ray-address is host:port of Ray's head, not 'head'"):
        launcher("head")
    ray.init_error = ConnectionError("Could not find any running Ray instance.\nMore words.")
    with pytest.raises(ConfigError) as refused:
        launcher()
    assert "(Could not find any running Ray instance.); start one with `ray start" in str(
        refused.value
    )


def test_without_ray_the_command_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from kunserve.server.start.launch import _launcher

    for name in [n for n in sys.modules if n.startswith(("ray.", "kunserve_extras.ray."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert _launcher(KunServeConfig()) is None
    with pytest.raises(ConfigError, match=r"pip install 'kunserve\[ray\]'"):
        _launcher(KunServeConfig(cluster=ClusterConfig(launcher="ray")))


def order(**instance: Any) -> InstanceOrder:
    config = KunServeConfig(instance=InstanceConfig(**instance))
    return InstanceOrder(ONE, None, "tcp://front:1", "", Plan(config))


@pytest.mark.parametrize(
    ("instance", "need"),
    [
        (
            {"memory_bytes": 800 * MIB, "num_threads": 4},
            {"CPU": 4.0, "memory": 800 * MIB + PROCESS_BYTES},
        ),
        (
            {"memory_bytes": 800 * MIB, "tensor_parallel_size": 2},
            {"CPU": 2.0, "memory": 800 * MIB + 2 * PROCESS_BYTES},
        ),
        ({"kv_cache_memory_bytes": MIB}, {"CPU": 1.0}),
        ({"device": "cuda"}, {"CPU": 1.0, "GPU": 1.0, "memory": PROCESS_BYTES}),
    ],
)
def test_what_an_instance_needs(instance: dict[str, Any], need: dict[str, float]) -> None:
    assert need_of(order(**instance).plan.config, None) == need
    assert need_of(order(**instance).plan.config, FAKE) == {"CPU": need["CPU"]}


def test_what_nodes_hold() -> None:
    nodes = [Has("a", {"CPU": 8.0, "memory": 3e9}), Has("b", {"CPU": 2.0, "memory": 9e9})]
    assert num_that_fit(nodes, {"CPU": 2.0, "memory": 1e9}) == 3 + 1
    assert num_that_fit(nodes, {"CPU": 1.0, "GPU": 1.0}) == 0
    assert "GPU" in shortage(nodes, {"GPU": 1.0}, 2)
    assert "and 12 nodes more)" in shortage(nodes * 10, {"CPU": 1.0}, 99)


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ({}, Place("127.0.0.1")),
        ({"rack": "r1", "link-gbps": "25"}, Place("127.0.0.1", "r1", 25.0)),
        ({"ray.io/availability-zone": "z"}, Place("127.0.0.1", "z")),
        ({"rack": "r1", "ray.io/availability-zone": "z"}, Place("127.0.0.1", "r1")),
        ({"link-gbps": "fast"}, Place("127.0.0.1")),
    ],
)
def test_labels_tell_the_place(labels: dict[str, str], place: Place) -> None:
    assert place_of("127.0.0.1", labels) == place


def test_an_order_is_carried_out_where_ray_has_put_it(ray: FakeRay) -> None:
    from kunserve_extras.ray.launcher import at
    from kunserve_extras.ray.node_agent import Site

    site = Site("10.0.0.7", "host7", {"rack": "r"}, "1")
    assert at(order(), site) == replace(order(), place=Place("10.0.0.7", "r"))
    network = Network("", "mine", "secret", "the front's")
    placed = at(replace(order(), network=network), site)
    assert placed.network == Network("10.0.0.7", "", "", "the front's"), "keys are made there"


def test_last_words_name_the_node(ray: FakeRay, tmp_path: Path) -> None:
    program = tmp_path / "refuses.py"
    words = msgspec.json.encode(StartupFailure("ModelFiles", "/m: no such folder")).decode()
    program.write_text(f"import sys; sys.stdin.readline(); print({words!r}, end=''); sys.exit(3)")

    def made() -> Any:
        found = launcher()
        found._program = (str(program),)
        return found

    async def story(cluster: LocalCluster, client: Client) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=r"^on .+: /m: no such folder$"):
        with_cluster(story, launcher=made)
    assert not ray.living


def test_another_version_on_a_node_is_refused(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        raise AssertionError("it started")

    def made() -> Any:
        found = launcher()
        from kunserve_extras.ray import node_agent

        real = node_agent.Site
        monkeypatch.setattr(node_agent, "Site", lambda *a: replace(real(*a), version="0.0"))
        return found

    with pytest.raises(ConfigError, match=re.escape("has KunServe 0.0, the front")):
        with_cluster(story, launcher=made)
    assert not ray.living


def test_an_actor_that_does_not_start_its_process_is_ended(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kunserve_extras.ray import launcher as module
    from kunserve_extras.ray.node_agent import NodeAgent

    async def begin(*_: Any) -> None:
        await asyncio.Event().wait()

    async def story() -> None:
        with pytest.raises(OSError, match=r"actor on 127\.0\.0\.1 did not start it within 0\.05 s"):
            async with asyncio.timeout(10.0):
                await launcher().start(order())

    monkeypatch.setattr(NodeAgent, "begin", begin)
    monkeypatch.setattr(module, "BEGIN_S", 0.05)
    asyncio.run(story())
    assert not ray.living


def test_an_actor_that_cannot_be_asked_for_the_end_is_ended(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever Ray raises: else its process would hold its memory, and nobody would watch it."""
    from kunserve_extras.ray.node_agent import NodeAgent

    end = NodeAgent.end
    num_to_fail = 0

    async def asked(agent: NodeAgent) -> Any:
        nonlocal num_to_fail
        if num_to_fail:
            num_to_fail -= 1
            raise ValueError("another class there")
        return await end(agent)

    monkeypatch.setattr(NodeAgent, "end", asked)

    async def story(cluster: LocalCluster, client: Client) -> None:
        nonlocal num_to_fail
        num_to_fail, num_actors = 1, len(ray.actors)
        await cluster.kill(ONE)
        await until(lambda: len(ray.actors) == num_actors + 2)
        await until(lambda: not cluster.vitals().num_missing)
        client.submit("r", max_tokens=20)
        await client.all_done()
        assert len(ray.living) == 2, "the one that was given up has ended"

    with_cluster(story, launcher=launcher)
    assert not ray.living


def test_a_front_finds_what_an_earlier_one_has_left(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.running.live_cluster import config

    async def main(begin: Callable[..., Any]) -> None:
        first = await begin()
        marks = first._processes.marks
        assert all(re.fullmatch(r"\d+:\d+@llm/\d+-\w+", mark) for mark in marks.values())
        assert {actor.options["lifetime"] for actor in ray.actors} == {"detached"}
        later = launcher(name="llm")
        lost = "1:2@llm/0-gone"
        found = await later.find({**marks, InstanceId(7): lost}, epoch=1)
        assert {one: process.pid for one, process in found.items()} == dict(first.vitals().pids)
        (process,) = [p for i, p in found.items() if i == ONE]
        first._processes._places[ONE].process.kill()  # of a front that commands it no more
        process.follow(FrontPlace("tcp://127.0.0.1:1"))
        await asyncio.sleep(0.05)
        assert not first.vitals().num_missing
        process.kill()
        await until(lambda: first.vitals().num_missing)
        assert "ended by SIGKILL" in await process.wait()
        await until(lambda: not first.vitals().num_missing)
        await first.close()

    def begin() -> Any:
        return LocalCluster.start(
            Plan(config(2)),
            vocab_size=FAKE.vocab_size,
            fake=FAKE,
            launcher=launcher(is_detached=True, name="llm"),
            run_folder=tmp_path / "run",
        )

    asyncio.run(main(begin))
    assert not ray.living
