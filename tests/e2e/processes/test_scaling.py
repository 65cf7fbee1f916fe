"""A served cluster grows and shrinks: real processes around fake bodies, tokens known.

Half of it is slow, because every process costs its imports; ``test_chaos`` and the brain's own
``test_scaling`` play the same stories without processes in every run.
"""

import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import InstanceOrder, InstanceProcess, LocalLauncher
from kunserve.control.cluster import scaling
from kunserve.control.cluster.standing import Act
from kunserve.core.errors import InvalidRequest, TooLittleMemory
from kunserve.core.ids import InstanceId
from tests.conftest import wait_until
from tests.running.forking import ForkingLauncher
from tests.running.front_process import Front
from tests.running.live_cluster import Client, until, with_cluster

pytestmark = pytest.mark.timeout(300)  # a busy machine; the tests have deadlines of their own
ONE = InstanceId(1)


def serving(cluster: LocalCluster) -> list[int]:
    """Instances that stand in a group."""
    return sorted(member for group in cluster.state().groups for member in group.members)


async def has_size(cluster: LocalCluster, num_instances: int) -> None:
    """So many serve, and nobody comes or goes."""

    def is_so() -> bool:
        size, vitals = cluster.state().size, cluster.vitals()
        assert size.wanted - size.ordered + size.leaving >= 0
        is_quiet = not (size.ordered or size.leaving or vitals.num_starting or vitals.num_missing)
        is_quiet = is_quiet and not cluster._controller.placement.num_missing
        return is_quiet and vitals.num_instances == len(serving(cluster)) == num_instances

    await until(is_so)


class LessLater(ForkingLauncher):
    """All instances but the first ``num_first`` have less memory."""

    num_first = 1

    async def start(self, order: InstanceOrder) -> InstanceProcess:
        self.num_first -= 1
        if self.num_first < 0:
            assert order.fake is not None
            order = replace(order, fake=replace(order.fake, kv_blocks=8))
        return await super().start(order)


def test_an_instance_with_less_memory_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, answers there were cut short, and long prompts ended it."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        assert await cluster.scale(2) == "from 1 to 2 instances: 1 start"
        await until(lambda: "not grown" in caplog.text)
        for i in range(6):
            client.submit(f"r{i}", prompt_tokens=200, max_tokens=60)
        await client.all_done()
        assert serving(cluster) == [0] and cluster.vitals().num_instances == 1
        assert cluster.state().num_deaths == 0

    with_cluster(story, num_instances=1, policy="recompute", launcher=LessLater)
    reason = "it has room for requests of 128 tokens, but this server takes 4096"
    assert caplog.text.count(f"instance killed instance=1 reason='{reason}") == 2, "tried twice"


@pytest.mark.slow
def test_a_burst_makes_the_cluster_grow_and_calm_makes_it_shrink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "GIVE_BACK_HOLD_S", 0.3)

    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(24):
            client.submit(f"r{i}", max_tokens=150, prompt_tokens=300 + i)
        await until(lambda: len(serving(cluster)) > 1)
        assert cluster.state().size.most == 3
        await client.all_done()
        await has_size(cluster, 1)
        assert serving(cluster) == [0]
        await until(lambda: not any(load.used_blocks for load in cluster.state().loads))

    with_cluster(story, num_instances=1, policy="recompute", max_instances=3)


def test_an_operator_makes_it_grow_and_shrink_while_requests_run() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(12):
            client.submit(f"a{i}", max_tokens=200)
        await client.all_flow()
        assert await cluster.scale(3) == "from 1 to 3 instances: 2 start"
        assert cluster.vitals().num_starting == 2 and cluster.vitals().num_missing == 0
        await has_size(cluster, 3)
        for i in range(12):
            client.submit(f"b{i}", max_tokens=200)
        await client.all_flow()
        pids = dict(cluster.vitals().pids)
        said = await cluster.scale(1)
        assert said == "from 3 to 1 instances: 2 leave once their requests are gone"
        await client.all_done()
        await has_size(cluster, 1)
        gone = [pid for one, pid in pids.items() if one not in serving(cluster)]
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone))
        assert cluster.state().num_deaths == 0
        assert await cluster.scale(1) == "1 instances are wanted already"

    with_cluster(story, num_instances=1, policy="recompute")


def test_an_instance_leaves_long_before_its_answers_end() -> None:
    num_tokens = 400

    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(8):
            # Prompts of their own: the KV of no beginning draws all of them to one instance.
            client.submit(f"r{i}", max_tokens=num_tokens, prompt=(i,) * 40)
        await client.all_flow()
        await until(lambda: all(load.num_running for load in cluster.state().loads))
        await cluster.scale(1)
        await has_size(cluster, 1)
        assert not client.ends and max(map(len, client.tokens.values())) < num_tokens
        assert cluster._controller.balance.num_moved
        await client.all_done()
        assert cluster.state().num_rerun == 0

    with_cluster(story, policy="drop")


def test_an_instance_that_is_asked_to_end_hurts_nobody() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(8):
            client.submit(f"r{i}", max_tokens=400, prompt=(i,) * 40)
        await client.all_flow()
        await until(lambda: all(load.num_running for load in cluster.state().loads))
        pid = cluster.pid_of(ONE)
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        await until(lambda: cluster.pid_of(ONE) not in (None, pid))
        assert cluster._controller.balance.num_moved
        await has_size(cluster, 2)
        await client.all_done()
        assert cluster.state().num_rerun == 0

    with_cluster(story, policy="drop")


@pytest.mark.slow
def test_deaths_while_joining_and_leaving(tmp_path: Path) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        (tmp_path / "sleep-1").touch()
        for i in range(6):
            client.submit(f"r{i}", max_tokens=300)
        await client.all_flow()
        await cluster.scale(2)
        await until(lambda: cluster.pid_of(ONE) is not None)
        await cluster.kill(ONE)  # while it joins
        (tmp_path / "sleep-1").unlink()
        await has_size(cluster, 2)
        for i in range(12):
            # Prompts of their own: the KV of no beginning draws all of them to one instance.
            client.submit(f"s{i}", max_tokens=300, prompt=(i,) * 40)
        await until(lambda: all(load.num_running for load in cluster.state().loads))
        await cluster.scale(1)
        (leaving,) = [i for i in serving(cluster) if not cluster_takes(cluster, i)]
        await cluster.kill(InstanceId(leaving))  # while it leaves
        await client.all_done()
        await has_size(cluster, 1)

    with_cluster(story, num_instances=1, faults=tmp_path, policy="recompute")


def cluster_takes(cluster: LocalCluster, instance_id: int) -> bool:
    placement = cluster._controller.placement
    group = placement.with_member(InstanceId(instance_id))
    return group is not None and Act.TAKE in group.may


@pytest.mark.slow
def test_an_instance_that_cannot_start_is_given_up_and_said_why(tmp_path: Path) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        (tmp_path / "refuse-1").touch()
        client.submit("r", max_tokens=100)
        await cluster.scale(2)
        await until(lambda: cluster.state().size.wanted == 1)
        assert cluster.vitals().num_instances == 1 and cluster.is_healthy()
        (reason,) = cluster.state().reasons
        assert reason.startswith("an instance more could not be started: instance 1 did not start")
        (tmp_path / "refuse-1").unlink()
        await cluster.scale(2)
        await has_size(cluster, 2)
        await client.all_done()

    with_cluster(story, num_instances=1, faults=tmp_path, policy="recompute")


class FullLauncher(LocalLauncher):
    """Of a machine that has memory for what runs, and for nothing more."""

    def check_growth(self, _: object, fake: object, num_more: int, pids: Iterable[int]) -> None:
        raise TooLittleMemory(f"{num_more} more beside {len(list(pids))}")


def test_sizes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for wrong in (0, 1, 5):
            with pytest.raises(InvalidRequest, match=rf"must be from 2 to 4 .* not {wrong}\."):
                await cluster.scale(wrong)
        with pytest.raises(InvalidRequest, match="no room for 4 instances: 2 more beside 2"):
            cluster._size._launcher = FullLauncher()
            await cluster.scale(4)
        assert cluster.state().size.wanted == 2
        client.submit("r")
        await client.all_done()

    with_cluster(story, min_instances=2, max_instances=4)


@pytest.mark.slow
def test_the_next_front_finds_the_cluster_as_large_as_it_was(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    with Front(tmp_path / "run", 1, faults, {}) as first:
        first.ask("scale 2")
        wait_until(lambda: len(first.ask("state")["groups"]) == 2, 100.0)
        pids = first.ask("state")["pids"]
        first.die()
    with Front(tmp_path / "run", 1, faults, {}) as second:
        wait_until(lambda: len(second.ask("state")["groups"]) == 2, 100.0)
        assert second.ask("state")["pids"] == pids
        second.ask("submit a 30")
        second.ask("finish")
        assert second.ask("state")["errors"] == 0


@pytest.mark.slow
def test_a_cluster_that_ends_while_it_grows_leaves_nobody(tmp_path: Path) -> None:
    pids: list[int] = []

    async def story(cluster: LocalCluster, client: Client) -> None:
        (tmp_path / "sleep-1").touch()
        await cluster.scale(2)
        await until(lambda: cluster.pid_of(ONE) is not None)
        pids.extend(dict(cluster.vitals().pids).values())

    with_cluster(story, num_instances=1, faults=tmp_path, policy="recompute")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
