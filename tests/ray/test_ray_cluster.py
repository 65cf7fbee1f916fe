"""Instances on the nodes of a real Ray cluster: ``make test-ray``."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.process_mark import mark_of
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.ids import InstanceId
from tests.conftest import wait_until
from tests.ray.conftest import Nodes
from tests.running.front_process import Front
from tests.running.live_cluster import Client, until, with_cluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
PATIENCE_S = 100.0


def launcher(session: Any, **how: bool) -> Any:
    from kunserve_extras.ray.launcher import RayLauncher

    return RayLauncher(session, **how)


def wardens() -> list[str]:
    """Names of the actors that live."""
    import ray

    return [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)]


def test_instances_are_served_killed_replaced_and_ended(nodes: Nodes, session: Any) -> None:
    import ray

    async def story(cluster: LocalCluster, client: Client) -> None:
        racks = {one.spec.place.rack for one in cluster.state().instances}
        assert racks == {"left", "right"}
        for i in range(8):
            client.submit(f"r{i}", max_tokens=400)
        await client.all_flow()
        assert "groups=1+1->2" in await cluster.drop(None)
        await client.until(lambda: all(len(t) > 20 for t in client.tokens.values()))
        before = cluster.pid_of(InstanceId(1))
        (name,) = [name for name in wardens() if re.search(r"/1-", name)]
        ray.kill(ray.get_actor(name, namespace="kunserve"))
        await until(lambda: cluster.vitals().num_missing)
        await client.all_done()
        await until(lambda: not cluster.vitals().num_missing)
        assert cluster.pid_of(InstanceId(1)) != before
        assert mark_of(before or 0) is None, "the process dies with its warden"

    with_cluster(story, launcher=lambda: launcher(session))
    wait_until(lambda: not wardens(), PATIENCE_S)


def test_a_node_dies_and_its_instance_comes_back_on_one_that_comes_later(
    nodes: Nodes, session: Any
) -> None:
    lost = nodes.add()
    phases: dict[str, float] = {}

    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(9):
            client.submit(f"r{i}", max_tokens=700)
        await client.all_flow()
        num_tokens = {name: len(tokens) for name, tokens in client.tokens.items()}
        began_s = time.monotonic()

        def note(phase: str) -> None:
            phases[phase] = time.monotonic() - began_s

        nodes.kill(lost)
        note("node is dead")
        await until(lambda: cluster.vitals().num_missing or cluster.state().num_deaths)
        note("noticed")
        await client.until(
            lambda: all(len(client.tokens[name]) > num for name, num in num_tokens.items())
        )
        note("all of its requests stream elsewhere")
        nodes.add()
        note("another node is there")
        await client.all_done()
        await until(lambda: not cluster.vitals().num_missing)
        note("its instance is back")
        assert cluster.state().num_deaths
        await cluster.scale(2)
        await until(lambda: cluster.vitals().num_instances == 2)

    with_cluster(story, num_instances=3, launcher=lambda: launcher(session))
    print(", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items()))


def test_the_next_front_takes_the_instances_over(nodes: Nodes, tmp_path: Path) -> None:
    """On the same host, and on another one, which has neither its files nor its address."""
    address = nodes.cluster.address
    with Front(tmp_path / "run", 2, tmp_path, {}, address) as first:
        first.ask("submit early 2000")
        pids = first.ask("state")["pids"]
        first.die()
    with Front(tmp_path / "run", 2, tmp_path, {}, address) as second:
        wait_until(lambda: not second.ask("state")["missing"], PATIENCE_S)
        assert second.ask("state")["pids"] == pids
        second.ask("submit late 60")
        assert "groups=1+1->2" in second.ask("drop")
        second.ask("finish")
        assert second.ask("state")["errors"] == 0
        second.die()
    with Front(tmp_path / "elsewhere", 2, tmp_path, {}, f"{address},127.0.0.2") as third:
        wait_until(lambda: not third.ask("state")["missing"], PATIENCE_S)
        state = third.ask("state")
        assert state["pids"] == pids and state["address"].startswith("tcp://127.0.0.2:")
        assert [len(group) for group in state["groups"]] == [2]
        third.ask("submit later 60")
        third.ask("finish")
        assert third.ask("state")["errors"] == 0
    wait_until(lambda: all(mark_of(pid) is None for pid in pids), PATIENCE_S)
    wait_until(lambda: not wardens(), PATIENCE_S)


def test_what_cannot_be_is_told_at_once(nodes: Nodes, session: Any) -> None:
    from kunserve_extras.ray.session import Session

    with pytest.raises(TooLittleMemory, match=r"3 instances need 1 CPU each; the Ray cluster has"):
        with_cluster(lambda *_: None, 3, launcher=lambda: launcher(session))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nobody listens there"):
        Session("127.0.0.1:1")


@contextmanager
def server(*flags: str) -> Iterator[str]:
    """``kunserve serve`` until the block ends; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kunserve.cli", "serve", "smollm2-135m", "--port", str(port)]
    sizes = ["--instance-memory", "400MiB"]
    process = subprocess.Popen([*command, *sizes, *flags])
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, "it did not start"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(is_up, 200.0)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def complete(url: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_smollm2_says_the_same_over_ray(nodes: Nodes) -> None:
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):"]
    over_ray = ("--cluster", "ray", "--ray-address", nodes.cluster.address)
    with server("--num-instances", "2", *over_ray, "--enable-admin") as url:
        found = [complete(url, prompt) for prompt in prompts]
        request = urllib.request.Request(
            f"{url}/kunserve/drop", b"{}", {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["dropped_bytes_after"]
        dropped = [complete(url, prompt) for prompt in prompts]
    with server("--num-instances", "1") as url:
        expected = [complete(url, prompt) for prompt in prompts]
    assert found == expected and dropped == expected
