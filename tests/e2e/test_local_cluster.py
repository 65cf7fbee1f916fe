"""Real processes and sockets around fake bodies: tokens survive drops, restores and deaths."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from kunserve.cluster.fake import FakeModel, expected_tokens
from kunserve.cluster.launch import FakeSettings
from kunserve.cluster.local import LocalCluster
from kunserve.core.config import ClusterConfig, InstanceConfig, KunServeConfig, OverloadConfig
from kunserve.core.errors import InvalidRequest, PromptTooLong, Unavailable
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request, SamplingParams

FAKE = FakeSettings(step_s=0.004)
MODEL = FakeModel(FAKE.num_layers, FAKE.vocab_size)
MAX_LEN = FAKE.kv_blocks * 16


def config(num_instances: int = 2, policy: str = "drop") -> KunServeConfig:
    # restore_below=0: restores happen only when a test asks for one.
    return KunServeConfig(
        instance=InstanceConfig(block_size=16),
        overload=OverloadConfig(policy=policy, restore_below=0.0),  # type: ignore[arg-type]
        cluster=ClusterConfig(num_instances=num_instances),
    )


class Client:
    """Submits requests and collects what they produce."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.requests: dict[str, Request] = {}
        self._changed = asyncio.Event()

    def submit(self, name: str, prompt_tokens: int = 40, max_tokens: int = 60) -> None:
        request = Request(
            RequestId(name),
            tuple((i * 7 + len(name)) % FAKE.vocab_size for i in range(prompt_tokens)),
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            arrival_s=0.0,
        )
        self.requests[name] = request
        self.tokens[name] = []
        self.cluster.submit(request, self._deliver)

    def _deliver(self, token: TokenOutput) -> None:
        if token.token_id is not None:
            assert token.position == len(self.tokens[token.request_id])
            self.tokens[token.request_id].append(token.token_id)
        if token.finish_reason is not None:
            assert token.request_id not in self.ends, "ended twice"
            self.ends[token.request_id] = token.finish_reason
        self._changed.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def all_done(self) -> None:
        await self.until(lambda: len(self.ends) == len(self.requests))
        for name, request in self.requests.items():
            assert tuple(self.tokens[name]) == expected_tokens(request, MODEL, MAX_LEN), name
            assert self.ends[name] is FinishReason.LENGTH


def with_cluster(
    story: Callable[[LocalCluster, Client], Awaitable[None]], num_instances: int = 2
) -> None:
    async def main() -> None:
        cluster = await LocalCluster.start(
            config(num_instances), vocab_size=FAKE.vocab_size, fake=FAKE
        )
        try:
            await story(cluster, Client(cluster))
        finally:
            await cluster.close()

    asyncio.run(main())


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


def test_a_request_waits_since_it_arrived_at_the_front() -> None:
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
        assert outputs[0].queued_s is not None and outputs[0].queued_s >= 1000.0

    with_cluster(story)


def test_refusals() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        with pytest.raises(PromptTooLong, match=r"maximum context length is \d+ tokens"):
            client.submit("huge", prompt_tokens=MAX_LEN, max_tokens=10)
        with pytest.raises(PromptTooLong):  # the last token counts, as in the HTTP front
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
        async with asyncio.timeout(10.0):
            while any(load.used_blocks or load.num_waiting for load in cluster.state().loads):
                await asyncio.sleep(0.02)
        assert cluster.num_unfinished() == 0

    with_cluster(story)
