"""Fake instances that are reached over TCP with keys, on loopback; several hosts: tests/hosts."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import InstanceOrder, InstanceProcess, LocalLauncher
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Plan
from tests.running.live_cluster import FAKE, Client, config

ONE = InstanceId(1)
STUN_S = 1.5
"""Longer than any timeout allowed once. A busy machine adds to it before the default now ends."""


class LoopbackLauncher(LocalLauncher):
    """As on another host, as far as wires go."""

    front_host = "127.0.0.1"

    async def start(self, order: InstanceOrder) -> InstanceProcess:
        assert order.network is not None and order.parent_pid is None
        return await super().start(replace(order, network=replace(order.network, host="127.0.0.1")))


async def _start(settings: KunServeConfig) -> LocalCluster:
    return await LocalCluster.start(
        Plan(settings), vocab_size=FAKE.vocab_size, fake=FAKE, launcher=LoopbackLauncher()
    )


def test_a_cluster_over_tcp_drops_restores_and_survives_a_death() -> None:
    async def story() -> None:
        cluster = await _start(config(2))
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


@pytest.mark.parametrize("is_dropped", [False, True])
def test_an_instance_that_stands_still_for_a_while_costs_time_only(is_dropped: bool) -> None:
    """As a virtual machine that is moved. Before, after 1.2 s its weights were loaded anew."""

    async def story() -> None:
        cluster = await _start(config(2))
        try:
            client = Client(cluster)
            for i in range(4):
                client.submit(f"r{i}", max_tokens=400)
            await client.all_flow()
            if is_dropped:
                await cluster.drop(None)
            groups, pid = cluster.state().groups, cluster.pid_of(ONE)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(STUN_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            await client.all_done()
            state = cluster.state()
            assert state.groups == groups and cluster.pid_of(ONE) == pid
            assert state.num_deaths == state.num_rerun == cluster.vitals().num_errors == 0
        finally:
            await cluster.close()

    asyncio.run(story())


def test_a_trace_of_several_machines_is_refused() -> None:
    settings = config(2, trace_out="/tmp/never-written")
    with pytest.raises(ConfigError, match="--trace-out is for one machine"):
        asyncio.run(_start(settings))
