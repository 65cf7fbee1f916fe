"""An instance's process, from its order on."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from kunserve.cluster.instance.start import EXIT_ORPHANED
from kunserve.cluster.processes.launch import FakeSettings, InstanceOrder, LocalProcess
from kunserve.core.config import KunServeConfig
from kunserve.core.faults import EXIT_LOST_MESSAGES, EXIT_MACHINE_FAILED
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Message, Ready, ResetPrefixCache
from kunserve.core.plan import Plan
from kunserve.transport.wire.channel import FrontChannel, FrontNetwork
from kunserve.transport.wire.network import FrontPlace, Network, any_port_of, new_keys
from kunserve_lab.world.fake_main import MODULE as FAKE_MODULE
from tests.unit.transport.wire.test_channel import until

ZERO = InstanceId(0)
HOST = "127.0.0.1"


def test_an_instance_whose_front_died_first_ends(tmp_path: Path) -> None:
    """The parent's death is a signal only for those that asked for it in time."""
    order = InstanceOrder(
        InstanceId(0),
        FakeSettings(FAKE_MODULE),
        front_address=f"ipc://{tmp_path}/front",
        socket_folder=str(tmp_path),
        plan=Plan(KunServeConfig()),
        parent_pid=os.getpid() + 1,
    )
    ended = subprocess.run(
        [sys.executable, "-m", "kunserve_lab.world.fake_main"],
        input=msgspec.json.encode(order),
        timeout=200,
        check=False,
    )
    assert ended.returncode == EXIT_ORPHANED


def test_a_thread_that_fails_ends_the_process(tmp_path: Path) -> None:
    """Nobody else would look after what it kept: a lease, a heartbeat, who may come in."""
    program = """
import sys, threading, time
from kunserve.cluster.instance.start import run_instance

def load(order):
    threading.Thread(target=lambda: 1 / 0).start()
    time.sleep(200.0)

sys.exit(run_instance(load))
"""
    order = InstanceOrder(ZERO, None, "ipc://nobody", str(tmp_path), Plan(KunServeConfig()))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=msgspec.json.encode(order),
        stderr=subprocess.PIPE,
        timeout=200,
        check=False,
    )
    assert ended.returncode == EXIT_MACHINE_FAILED
    assert b"leaving: a thread has failed" in ended.stderr and b"ZeroDivision" in ended.stderr


def test_an_instance_that_is_told_of_moves_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """Its standard input stays open, and a thread reads that to the end."""

    async def story() -> None:
        keys, mine = new_keys(), new_keys()
        heard: list[Message] = []
        front = FrontChannel(
            lambda _, message: heard.append(message), network=FrontNetwork(keys, 30.0, "front")
        )
        await front.start(any_port_of(HOST))
        front.admit(ZERO, mine.public)
        order = InstanceOrder(
            ZERO,
            FakeSettings(FAKE_MODULE),
            front_address=front.address,
            socket_folder=str(tmp_path),
            plan=Plan(KunServeConfig()),
            parent_pid=os.getpid(),
            network=Network(HOST, mine.public, mine.secret, keys.public, link_timeout_s=30.0),
        )
        process = LocalProcess(order, tells_moves=True)
        process.follow(FrontPlace(front.address))  # at once: it may come together with the order
        await until(lambda: any(isinstance(word, Ready) for word in heard), 100.0)
        route = front._routes[ZERO]
        front._num_told[route] = 7  # as if six messages were lost
        assert front.send(ZERO, ResetPrefixCache())
        assert await process.wait() == f"exit code {EXIT_LOST_MESSAGES}"
        await front.close()

    asyncio.run(story())
