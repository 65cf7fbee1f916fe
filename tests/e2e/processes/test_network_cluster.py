"""Fake instances that are reached over TCP with keys, on loopback; several hosts: tests/hosts."""

import asyncio
from dataclasses import replace

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import InstanceOrder, InstanceProcess, LocalLauncher
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Plan
from tests.running.live_cluster import FAKE, Client, config


class LoopbackLauncher(LocalLauncher):
    """As on another host, as far as wires go."""

    front_host = "127.0.0.1"

    async def start(self, order: InstanceOrder) -> InstanceProcess:
        assert order.network is not None and order.parent_pid is None
        return await super().start(replace(order, network=replace(order.network, host="127.0.0.1")))


def test_a_cluster_over_tcp_drops_restores_and_survives_a_death() -> None:
    async def story() -> None:
        cluster = await LocalCluster.start(
            Plan(config(2)), vocab_size=FAKE.vocab_size, fake=FAKE, launcher=LoopbackLauncher()
        )
        try:
            client = Client(cluster)
            for i in range(4):
                client.submit(f"r{i}", max_tokens=80)
            await client.all_flow()
            assert "groups=1+1->2" in await cluster.drop(None)
            await client.all_flow(20)
            await cluster.kill(InstanceId(1))
            await client.all_done()
            assert not cluster.vitals().num_errors
        finally:
            await cluster.close()

    asyncio.run(story())


def test_a_trace_of_several_machines_is_refused() -> None:
    settings = config(2, trace_out="/tmp/never-written")
    with pytest.raises(ConfigError, match="--trace-out is for one machine"):
        asyncio.run(
            LocalCluster.start(
                Plan(settings), vocab_size=FAKE.vocab_size, fake=FAKE, launcher=LoopbackLauncher()
            )
        )
