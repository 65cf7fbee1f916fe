"""A cluster of real processes around fake bodies, and a client that knows the right tokens."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.faulty_instance import program_of
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import FakeSettings, Launcher
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    OverloadConfig,
    ServerConfig,
)
from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Plan
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.fake_body import FakeModel, expected_tokens
from kunserve_lab.world.fake_main import MODULE as FAKE_MODULE
from tests.running.forking import ForkingLauncher

FAKE = FakeSettings(FAKE_MODULE, step_s=0.004)
MODEL = FakeModel(FAKE.num_layers, FAKE.vocab_size)
MAX_LEN = FAKE.kv_blocks * 16
PATIENCE_S = 100.0
"""How long a test waits for what comes at once on an idle machine."""


def config(
    num_instances: int = 2,
    policy: str = "drop",
    request_timeout_s: float | None = None,
    **cluster: object,
) -> KunServeConfig:
    # restore_below=0: restores happen only when a test asks for one.
    settings = ClusterConfig(num_instances=num_instances, check_invariants=True)
    return KunServeConfig(
        instance=InstanceConfig(block_size=16),
        overload=OverloadConfig(policy=policy, restore_below=0.0),  # type: ignore[arg-type]
        cluster=replace(settings, **cluster),  # type: ignore[arg-type]
        server=ServerConfig(request_timeout_s=request_timeout_s),
    )


async def until(condition: Callable[[], object]) -> None:
    """Wait for what no token tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


class Client:
    """Submits requests and collects what they produce."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.requests: dict[str, Request] = {}
        self._changed = asyncio.Event()

    def submit(
        self,
        name: str,
        prompt_tokens: int = 40,
        max_tokens: int = 60,
        prompt: tuple[int, ...] | None = None,
    ) -> None:
        """``prompt``, or one of ``prompt_tokens`` made of the name."""
        made = tuple((i * 7 + len(name)) % FAKE.vocab_size for i in range(prompt_tokens))
        request = Request(
            RequestId(name),
            TokenIds(prompt or made),
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            arrival_s=0.0,
        )
        self.requests[name] = request
        self.tokens[name] = []
        try:
            self.cluster.submit(request, self._deliver)
        except BaseException:
            del self.requests[name], self.tokens[name]
            raise

    def _deliver(self, token: TokenOutput) -> None:
        if token.token_id is not None:
            assert token.position == len(self.tokens[token.request_id])
            self.tokens[token.request_id].append(token.token_id)
        if token.finish_reason is not None:
            assert token.request_id not in self.ends, "ended twice"
            self.ends[token.request_id] = token.finish_reason
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def all_flow(self, num_tokens: int = 5) -> None:
        """Every request has produced more than so many tokens."""
        await self.until(lambda: all(len(t) > num_tokens for t in self.tokens.values()))

    async def all_done(self) -> None:
        """Every request has ended once, with the tokens of an undisturbed run."""
        await self.until(lambda: len(self.ends) == len(self.requests))
        for name, request in self.requests.items():
            assert tuple(self.tokens[name]) == expected_tokens(request, MODEL, MAX_LEN), name
            assert self.ends[name] is FinishReason.LENGTH


def with_cluster(
    story: Callable[[LocalCluster, Client], Awaitable[None]],
    num_instances: int = 2,
    faults: Path | None = None,
    may_err: bool = False,
    launcher: Callable[[], Launcher] | None = None,
    **cluster_settings: object,
) -> None:
    """Run ``story`` on a cluster; ``faults`` is the folder that its instances obey.

    No error may happen inside the cluster, unless the story makes some (``may_err``).
    """

    async def main() -> None:
        cluster = await LocalCluster.start(
            Plan(config(num_instances, **cluster_settings)),  # type: ignore[arg-type]
            vocab_size=FAKE.vocab_size,
            fake=FAKE,
            launcher=launcher() if launcher else ForkingLauncher(faults and program_of(faults)),
        )
        try:
            await story(cluster, Client(cluster))
            assert may_err or not cluster.vitals().num_errors
        finally:
            await cluster.close()

    asyncio.run(main())
