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

from kunserve.cluster.local import LocalCluster
from kunserve.cluster.process_mark import mark_of
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.ids import InstanceId
from tests.conftest import wait_until
from tests.front_process import Front
from tests.live_cluster import Client, until, with_cluster
from tests.ray.conftest import Nodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
PATIENCE_S = 100.0


def launcher(session: Any, **how: bool) -> Any:
    from kunserve.cluster.ray.launcher import RayLauncher

    return RayLauncher(session, **how)


def wardens() -> list[str]:
    """Names of the actors that live."""
    import ray

    return [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)]


def test_instances_are_served_killed_replaced_and_ended(nodes: Nodes, session: Any) -> None:
    import ray

    for rack in ("left", "right"):
        nodes.add(rack=rack)

    async def story(cluster: LocalCluster, client: Client) -> None:
        racks = {one.spec.place.rack for one in cluster.state().instances}
        assert racks <= {"left", "right", ""}
        for i in range(8):
            client.submit(f"r{i}", max_tokens=400)
        await client.all_flow()
        assert "groups=1+1->2" in await cluster.drop(None)
        await client.until(lambda: all(len(t) > 20 for t in client.tokens.values()))
        before = cluster.pid_of(InstanceId(1))
        (name,) = [name for name in wardens() if re.search(r"-1-", name)]
        ray.kill(ray.get_actor(name, namespace="kunserve"))
        await until(lambda: cluster.vitals().num_missing)
        await client.all_done()
        await until(lambda: not cluster.vitals().num_missing)
        assert cluster.pid_of(InstanceId(1)) != before
        assert mark_of(before or 0) is None, "the process dies with its warden"

    with_cluster(story, launcher=lambda: launcher(session))
    wait_until(lambda: not wardens(), PATIENCE_S)


def test_a_node_dies_and_its_instance_comes_back_on_another(nodes: Nodes, session: Any) -> None:
    nodes.add(num_cpus=2)
    lost = nodes.add(num_cpus=1)
    gone_s: list[float] = []

    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(9):
            client.submit(f"r{i}", max_tokens=700)
        await client.all_flow()
        began_s = time.monotonic()
        nodes.kill(lost)
        await until(lambda: cluster.vitals().num_missing or cluster.state().num_deaths)
        gone_s.append(time.monotonic() - began_s)
        nodes.add(num_cpus=2)
        await client.all_done()
        await until(lambda: not cluster.vitals().num_missing)
        assert cluster.state().num_deaths

    with_cluster(story, num_instances=3, launcher=lambda: launcher(session))
    print(f"noticed after {gone_s[0]:.1f} s")


def test_the_next_front_takes_the_instances_over(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(num_cpus=2)
    address = nodes.cluster.address
    with Front(tmp_path / "run", 2, tmp_path, {}, address) as first:
        first.ask("submit early 2000")
        pids = first.ask("state")["pids"]
        first.die()
    with Front(tmp_path / "run", 2, tmp_path, {}, address) as second:
        wait_until(lambda: not second.ask("state")["missing"], PATIENCE_S)
        assert second.ask("state")["pids"] == pids
        second.ask("submit late 60")
        second.ask("finish")
        assert second.ask("state")["errors"] == 0
    wait_until(lambda: all(mark_of(pid) is None for pid in pids), PATIENCE_S)
    wait_until(lambda: not wardens(), PATIENCE_S)


def test_a_cluster_grows_onto_a_node_that_comes_later(nodes: Nodes, session: Any) -> None:
    nodes.add()

    async def story(cluster: LocalCluster, client: Client) -> None:
        client.submit("a", max_tokens=400)
        await cluster.scale(2)
        assert cluster.vitals().num_starting == 1
        nodes.add()
        await until(lambda: len(cluster.state().groups) == 2)
        await cluster.scale(1)
        await client.all_done()
        await until(lambda: cluster.vitals().num_instances == 1)

    with_cluster(story, num_instances=1, launcher=lambda: launcher(session, autoscales=True))


def test_what_cannot_be_is_told_at_once(nodes: Nodes, session: Any) -> None:
    from kunserve.cluster.ray.session import Session

    nodes.add(num_cpus=1)
    with pytest.raises(TooLittleMemory, match=r"2 instances need 1 CPU each; the Ray cluster has"):
        with_cluster(lambda *_: None, launcher=lambda: launcher(session))  # type: ignore[arg-type]
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
    nodes.add(num_cpus=1)
    nodes.add(num_cpus=1)
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
