"""Real processes and sockets around fake bodies: tokens survive drops, restores and deaths."""

import asyncio
import time
from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.errors import InvalidRequest, PromptTooLong, Unavailable
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import Request, SamplingParams
from tests.running.live_cluster import FAKE, MAX_LEN, Client, until, with_cluster

pytestmark = pytest.mark.timeout(300)  # a busy machine; the tests have deadlines of their own


def test_tokens_survive_a_drop_and_a_restore() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(12):
            client.submit(f"before-{i}", max_tokens=150)
        await client.until(lambda: all(len(t) > 5 for t in client.tokens.values()))
        said = await cluster.drop(None)
        assert "groups=1+1->2" in said
        state = cluster.state()
        assert len(state.groups) == 1 and state.num_drops == 1
        assert sum(i.dropped_bytes for i in state.instances) == 8 * FAKE.layer_bytes
        assert all(i.kv_units > i.spec.kv_units for i in state.instances)
        for i in range(6):
            client.submit(f"during-{i}", max_tokens=150)
        await client.until(lambda: all(len(t) > 20 for t in client.tokens.values()))
        await cluster.restore()
        state = cluster.state()
        assert len(state.groups) == 2 and state.num_restores == 1
        assert all(i.dropped_bytes == 0 and i.kv_units == i.spec.kv_units for i in state.instances)
        await client.all_done()

    with_cluster(story)


def test_four_stages_by_two_drops_and_back() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(8):
            client.submit(f"r{i}", max_tokens=400)
        await client.until(lambda: all(t for t in client.tokens.values()))
        await cluster.drop(10**9)
        state = cluster.state()
        assert [len(group.stages) for group in state.groups] == [4]
        assert [s.layers.num_layers for s in state.groups[0].stages] == [2, 2, 2, 2]
        await client.until(lambda: all(len(t) > 50 for t in client.tokens.values()))
        await cluster.restore()
        assert len(cluster.state().groups) == 4
        await client.all_done()

    with_cluster(story, num_instances=4)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_killed_instance_costs_a_pause_only(dropped: bool) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(10):
            client.submit(f"r{i}", max_tokens=200)
        await client.until(lambda: all(len(t) > 5 for t in client.tokens.values()))
        if dropped:
            await cluster.drop(None)
        await cluster.kill(InstanceId(1))
        client.submit("after", max_tokens=20)
        await client.all_done()
        assert cluster.is_healthy()

    with_cluster(story)


def test_all_instances_dead_then_one_returns() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(4):
            client.submit(f"r{i}", max_tokens=100)
        await client.until(lambda: all(t for t in client.tokens.values()))
        await asyncio.gather(cluster.kill(InstanceId(0)), cluster.kill(InstanceId(1)))
        await client.all_done()

    with_cluster(story)


def test_a_leader_tells_its_own_time_of_a_request() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        outputs: list[TokenOutput] = []
        done = asyncio.Event()

        def deliver(output: TokenOutput) -> None:
            outputs.append(output)
            if output.finish_reason is not None:
                done.set()

        arrival_s = time.monotonic() - 1000.0
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        cluster.submit(Request(RequestId("early"), (1, 2, 3), sampling, arrival_s), deliver)
        async with asyncio.timeout(30.0):
            await done.wait()
        # The leader may have another clock than the front, so it tells of its own time only.
        assert outputs[0].computed_s is not None and 0.0 <= outputs[0].computed_s < 1000.0

    with_cluster(story)


def test_refusals() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        with pytest.raises(PromptTooLong, match=r"maximum context length is \d+ tokens"):
            client.submit("huge", prompt_tokens=MAX_LEN, max_tokens=10)
        with pytest.raises(PromptTooLong, match=rf"you requested {MAX_LEN + 1} tokens"):
            client.submit("full", prompt_tokens=MAX_LEN, max_tokens=1)
        with pytest.raises(InvalidRequest, match="no group is dropped"):
            await cluster.restore()
        cluster.stop_admission()
        with pytest.raises(Unavailable):
            client.submit("late")

    with_cluster(story)


def test_aborted_requests_leave_no_block() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(10):
            client.submit(f"r{i}", max_tokens=1000)
        await client.until(lambda: any(client.tokens.values()))
        for name in client.requests:
            cluster.abort(RequestId(name))
        await until(
            lambda: not any(ld.used_blocks or ld.num_waiting for ld in cluster.state().loads)
        )
        assert cluster.num_unfinished() == 0

    with_cluster(story)


def test_the_sockets_are_gone_with_the_cluster() -> None:
    folders: list[Path] = []

    async def story(cluster: LocalCluster, _: Client) -> None:
        folders.append(cluster._sockets.path)
        assert (folders[0] / "front").is_socket()

    with_cluster(story)
    assert not folders[0].exists()
